"""Our methods in Flower's messages: what comes out is, to the last bit, what our own aggregator makes of them.

The aggregator is the real one (coordinator, checks and store); only the broker is left out. With real SuperLinks and
SuperNodes: tests/protofleet/flower/test_processes.py.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aggregator_samples import manifest
from edge_samples import fashion

pytest.importorskip("flwr.serverapp.strategy", reason="flwr is not installed here (docs/flower.md)")

from flower_grid import LocalGrid, grid_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DataError, ProtofleetError
from protofleet.contract.heads.answers import linear_logits, softmax
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS
from protofleet.contract.methods import method as method_of
from protofleet.contract.methods.fedcof import GroupMeans
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Participation, Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.device.device import Device
from protofleet.flower import Learned, MethodStrategy, Samples, bundle_mod, method_mod, no_training, received

C, D, CLIENTS = 4, 6, 3
SHIPPED = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"


def _samples(number: int, round: int = 1) -> Samples:
    """Of one client: classes 0 and 1 in each round, class 2 in the first only, class 3 never."""
    rng = np.random.default_rng(10 * round + number)
    labels = rng.permutation(np.arange(20 + number) % (3 if round == 1 else 2))
    head, prototypes = rng.normal(size=(2, C, D))
    return Samples(rng.normal(size=(len(labels), D)), labels, head=head, bias=rng.normal(size=C), prototypes=prototypes)


def _unit(samples: Samples) -> np.ndarray:
    return unit_rows(samples.features.astype(np.float64))


def _soft(s: Samples) -> np.ndarray:
    return softmax(linear_logits(s.features, s.head, s.bias) / method_of("fedhkd").hyper["temperature"].default)


# What a client of each method says, from the papers' words; FedCOF here with one group of each class.
SAYS: dict[str, Callable[[Samples], Statistic]] = {
    "ncm": lambda s: UnitMeans.of(_unit(s), s.labels, C),
    "ffc": lambda s: FeatureGram.of(_unit(s), s.labels, C),
    "fedcof": lambda s: GroupMeans.of(_unit(s), 8 * s.labels, 8 * C),
    "fedproto": lambda s: ClassMeans.of(s.features, s.labels, C),
    "fedpr": lambda s: ClassMeans.of(s.features, s.labels, C),
    "fedhp": lambda s: ClassMeans.from_means(s.prototypes, np.bincount(s.labels, minlength=C)),
    "fedhkd": lambda s: HyperKnowledge.of(s.features, _soft(s), s.labels, C),
    "spherefed": lambda s: Participation(np.zeros(C, np.int64)),
}
SET = {"fedcof": {"groups": 1}}


def _aggregated(tmp_path: Path, name: str, says: list[list[Statistic]], run: list[bytes]) -> GlobalState:
    """What our aggregator makes of these statistics, of each round and client; its run is put into `run`."""
    m = manifest(classes=C, width=D, name=name)
    identity, settings = bytes(range(32)), Settings(rounds=len(says), calibrate=False, min_clients=CLIENTS)
    with DurableStore(tmp_path / "store.sqlite", identity, "fleet") as store:
        core = rounds_of(store, m, identity, settings, now=0.0)
        for number in range(CLIENTS):
            core.rounds.birth(str(number), b"%d" % number, 0.0)
        for statistics in says:
            while core.rounds.phase != "open":
                assert core.advance(0.0, 0.0) is not None
            a = core.announcement()
            key = {"run": a.run, "round": a.round, "method": name, "bundle": identity, "extractor": a.extractor}
            made = [Contribution.of(statistic, **key) for statistic in statistics]  # type: ignore[arg-type]
            decisions = core.take([(str(n), encode(each, a.encoding)) for n, each in enumerate(made)], 1.0)
            assert all(decision.accepted for decision in decisions), [d.receipt for d in decisions]
            core.advance(1.0, 1.0)
        run.append(core.parts.run)
        return core.state


def _same(found: GlobalState, wanted: GlobalState) -> None:
    assert set(found.rows) == set(wanted.rows)
    for kind, rows in wanted.rows.items():
        np.testing.assert_array_equal(found.rows[kind].classes, rows.classes)
        assert found.rows[kind].rows.tobytes() == np.asarray(rows.rows, found.rows[kind].rows.dtype).tobytes(), kind
    assert (found.version, found.round) == (wanted.version, wanted.round)


def test_every_method_is_carried_or_refused_in_one_line() -> None:
    for name, found in METHODS.items():
        if name in SAYS:
            continue
        with pytest.raises(ProtofleetError, match="expected a method that adds no noise") as told:
            MethodStrategy(name, classes=C, width=D)
        assert found.mechanism(found.resolve({})) is not None
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", SAYS)
def test_features_of_a_model_come_to_what_our_aggregator_makes_of_them(name: str, tmp_path: Path) -> None:
    """Two rounds: in the second nobody has class 2, which keeps what it has had."""
    own, clients = SAYS[name], range(CLIENTS)
    rounds = [[_samples(number, round) for number in clients] for round in (1, 2)]
    wanted = _aggregated(tmp_path, name, [[own(s) for s in each] for each in rounds], run := [])
    strategy = MethodStrategy(name, classes=C, width=D, set=SET.get(name), run=run[0])
    asked = []

    def train(message: Message, context: object) -> Message:
        asked.append(received(message))
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(100))})}), reply_to=message)

    def given(number: int) -> Callable[..., Samples]:
        return lambda message, context: rounds[message.content["config"]["server-round"] - 1][number]

    grid = grid_of([method_mod(given(number)) for number in clients], train)
    result = strategy.start(grid, num_rounds=2)
    _same(strategy.state, wanted)
    assert set(result.arrays) == {word for kind in wanted.rows for word in (kind, f"{kind}.classes")}
    assert len(asked) == (2 * CLIENTS if method_of(name).trains else 0)
    for reply in (each for replies in grid.seen for each in replies):
        assert not reply.content.array_records  # no weights, whatever the app's own function had replied
        assert [*reply.content.keys()] == ["protofleet"]
    for before in asked[CLIENTS:]:  # what the second round began with is what the first came to, as it travels
        assert before.state.version == (1 if name != "spherefed" else 0)


@pytest.mark.parametrize("name", ["ncm", "ffc", "fedcof"])
def test_a_bundles_devices_come_to_what_our_aggregator_makes_of_them(name: str, tmp_path: Path) -> None:
    bundle, secrets = read_bundle(SHIPPED), [bytes([number]) * 32 for number in range(CLIENTS)]
    shares = [fashion(bundle, 30, (number, number + 1, 5), seed=number) for number in range(CLIENTS)]
    wanted, run = _of_devices(tmp_path, bundle, name, shares, secrets)
    strategy = MethodStrategy.of_bundle(SHIPPED, name, run=run)
    mods = [bundle_mod(SHIPPED, lambda context, s=share: (s.x, s.y)) for share in shares]
    grid = grid_of(mods, no_training)
    for context, secret in zip(grid.contexts.values(), secrets, strict=True):
        context.state["protofleet.secret"] = ConfigRecord({"key": secret})
    strategy.start(grid)
    _same(strategy.state, wanted)
    held = fashion(bundle, 40, (0, 1, 2, 5), seed=9)
    features = Device(bundle, held, "asks")._graphs.shared_extractor().features(held.x)
    device = Device(bundle, shares[0], "0", test=held)
    says = strategy.learned(features)
    assert (says == held.y).mean() == device.evaluate(wanted).all_classes[method_of(name).way]


def _of_devices(tmp_path: Path, bundle: Bundle, name: str, shares: list, secrets: list) -> tuple[GlobalState, bytes]:
    settings = Settings(method=name, rounds=1, calibrate=False, min_clients=CLIENTS)
    with DurableStore(tmp_path / "store.sqlite", bundle.sha256, "fleet") as store:
        core = rounds_of(store, bundle.manifest, bundle.sha256, settings, now=0.0)
        for number in range(CLIENTS):
            core.rounds.birth(str(number), b"%d" % number, 0.0)
        core.advance(0.0, 0.0)
        a = core.announcement()
        made = []
        for number, (share, secret) in enumerate(zip(shares, secrets, strict=True)):
            done = Device(bundle, share, str(number), secret=secret).run_round(a, None)
            made.append((str(number), encode(done.contribution, a.encoding)))
        assert all(decision.accepted for decision in core.take(made, 1.0))
        core.advance(1.0, 1.0)
        return core.state, core.parts.run


def test_what_a_bundles_device_trains_stays_in_the_clients_context(
    mnist_like_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round goes on from what the one before it has come to, for each client."""
    path, began, ended = mnist_like_bundle(), list[dict[str, Any]](), list[dict[str, Any]]()

    class Told(Device):
        def run_round(self, *given: Any, **named: Any) -> Any:
            began.append({name: values.copy() for name, values in self.state().items()})
            done = super().run_round(*given, **named)
            ended.append({name: values.copy() for name, values in self.state().items()})
            return done

    monkeypatch.setattr("protofleet.flower.client.Device", Told)
    shares = [fashion(read_bundle(path), 16, (number, 3), seed=number) for number in range(2)]
    grid = grid_of([bundle_mod(path, lambda context, s=share: (s.x, s.y)) for share in shares], no_training)
    MethodStrategy.of_bundle(path).start(grid, num_rounds=2)
    order = [message.metadata.dst_node_id for messages in grid.down for message in messages]
    assert len(order) == len(began) == 4
    for node in set(order):
        first, second = (index for index, each in enumerate(order) if each == node)
        assert ended[first].keys() == began[second].keys() != set()
        for name, values in ended[first].items():
            np.testing.assert_array_equal(began[second][name], values, err_msg=name)
        assert not began[first]
        assert any(not np.array_equal(values, ended[second][name]) for name, values in ended[first].items())


def test_tensors_of_torch_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    features, labels = torch.randn(5, D, requires_grad=True), torch.arange(5) % C
    found = Samples(features, labels)
    np.testing.assert_array_equal(found.features, features.detach().numpy())
    assert found.labels.dtype == np.int64


def _page(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files of docs/flower.md by their names, and a module `task`, which is the reader's own."""
    torch = pytest.importorskip("torch")
    text = (Path(__file__).parents[3] / "docs" / "flower.md").read_text()
    found = {block.splitlines()[0]: block for block in re.findall(r"```python\n(# .*?)```", text, re.S)}
    torch.manual_seed(0)
    pixels = {number: torch.randn(16, 8) + 2 for number in range(2)}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.features, self.head = torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)

    task = ModuleType("task")
    task.load_model = Net
    task.load_data = lambda context: (pixels[context.node_config["partition-id"]], torch.arange(16) % 4)
    monkeypatch.setitem(sys.modules, "task", task)
    return found


def test_the_apps_of_the_page_run_with_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """FFC as it stands; FedProto, whose loss falls while a client's model stays in its context."""
    files = _page(monkeypatch)
    apps = {}
    for name in ("# server_app.py", "# client_app.py", "# client_app.py, FedProto"):
        exec(compile(files[name], name, "exec"), space := {})  # as Flower loads it
        apps[name] = space["app"]
    grid = LocalGrid(dict.fromkeys((5, 6), apps["# client_app.py"]))
    apps["# server_app.py"](grid, grid.contexts[5])
    assert "(4, 32) 1" in capsys.readouterr().out
    trained = LocalGrid(dict.fromkeys((5, 6), apps["# client_app.py, FedProto"]))
    strategy = MethodStrategy("fedproto", classes=4, width=32)
    losses = strategy.start(trained, num_rounds=3).train_metrics_clientapp
    assert losses[3]["loss"] < losses[1]["loss"]
    assert strategy.state.version == 3
    assert len(strategy.state.prototypes.classes) == 4
    assert not any(reply.content.array_records for replies in trained.seen for reply in replies)


def test_an_app_of_fedavg_goes_on_and_its_model_is_what_ffc_is_computed_over() -> None:
    """FedAvg's rounds pass through the mod untouched; FFC's then take the averaged arrays for the extractor."""

    def train(message: Message, context: object) -> Message:
        rows = {"arrays": ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy() + context.node_id)})}
        return Message(RecordDict({**rows, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    seen = []

    def embed(message: Message, context: object) -> Samples:
        seen.append(message.content["arrays"]["w"].numpy())
        return _samples(context.node_config["partition-id"])

    grid = grid_of([method_mod(embed) for _ in range(CLIENTS)], train)
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    averaged = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=1).arrays
    strategy = MethodStrategy("ffc", classes=C, width=D)
    strategy.start(grid, averaged)
    assert strategy.state.head is not None
    assert [each.tolist() for each in seen] == [[pytest.approx(899.0)] * 2] * CLIENTS


def test_single_numbers_of_a_train_function_are_kept_and_averaged() -> None:
    def train(message: Message, context: object) -> Message:
        number = context.node_config["partition-id"]
        told = MetricRecord({"loss": float(number), "weights": [1.0, 2.0]})
        return Message(RecordDict({"metrics": told}), reply_to=message)

    grid = grid_of([method_mod(lambda m, c: _samples(c.node_config["partition-id"])) for _ in range(2)], train)
    result = MethodStrategy("fedproto", classes=C, width=D).start(grid, num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["num-examples"] == 41
    assert metrics["loss"] == pytest.approx(21 / 41)
    assert "weights" not in metrics


WRONG = [
    (Samples(np.zeros((3, D + 1)), [0, 1, 2]), f"features, expected (N, {D}), as the server says, got (3, {D + 1})"),
    (Samples(np.zeros((3, D)), [0, 1, C]), f"labels, expected 0 to {C - 1}, as the server says, got 0 to {C}"),
    (Samples(np.zeros((3, D)), [0, 1, 2]), "samples for fedhkd, expected head of the model, got none, try Samples("),
    ("features", "what the mod was given, expected Samples, got str"),
]


@pytest.mark.parametrize(("samples", "line"), WRONG)
def test_a_client_that_is_wrong_says_so_in_one_line_and_the_others_go_on(samples, line, caplog) -> None:
    """FedHKD over three clients of which one has no proper samples."""
    clients = [lambda m, c: _samples(0), lambda m, c: _samples(1), lambda m, c: samples]
    strategy = MethodStrategy("fedhkd", classes=C, width=D)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(grid_of(map(method_mod, clients), no_training), num_rounds=1)
    (said,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert line in said
    assert said.startswith("aggregate_train: node 898 is left out: ")
    assert strategy.state.prototypes is not None


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Samples(np.zeros(3), [0]), "features, expected floats (N, D), got float64 (3,)"),
        (lambda: Samples(np.full((1, D), np.nan), [0]), "features, expected finite numbers, got others, try a smaller"),
        (lambda: Samples(np.zeros((2, D)), [0]), "labels, expected 2, one for each feature, got 1"),
        (lambda: Samples(np.zeros((1, D)), [0.5]), "labels, expected whole numbers (N,), got float64 (1,)"),
        (lambda: MethodStrategy("ncmm", classes=C, width=D), "unknown method, expected a known method, got ncmm, try"),
        (lambda: MethodStrategy("ncm", classes=0, width=D), "a fleet, expected 1 to 65536 classes, 1 feature at"),
        (lambda: MethodStrategy("ncm", classes=C, width=D, max_share=0), "max_share, expected above 0, up to 1, got 0"),
        (
            lambda: MethodStrategy("ncm", classes=C, width=D, min_samples=0),
            "min_samples (field 12), expected 1 to 4294967295, got 0",
        ),
        (lambda: MethodStrategy("ncm", classes=C, width=D, suspects="x"), "suspects, expected leave-out, name, ignore"),
        (lambda: MethodStrategy("ffc", classes=C, width=D, rule="median"), "--rule, expected mean for feature-gram"),
        (lambda: MethodStrategy.of_bundle(SHIPPED, "fedproto"), "method, expected ffc, as the bundle, or one that"),
        (
            lambda: MethodStrategy.of_bundle(SHIPPED, set={"project": 3}),
            "set, expected ridge or form, got project, try",
        ),
        (lambda: MethodStrategy("ncm", classes=C, width=D).learned.answer, "an answer of ncm, expected what rounds"),
        (lambda: received(Message(RecordDict(), 1, "train")), "a message, expected one of MethodStrategy, got another"),
    ],
)
def test_what_cannot_be_is_one_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(ProtofleetError) as told:
        make()
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def test_a_client_over_another_extractor_is_left_out(caplog) -> None:
    mods = [method_mod(lambda m, c: _samples(0), extractor=name) for name in ("vit", "resnet")]
    strategy = MethodStrategy("ncm", classes=C, width=D, extractor="vit")
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(grid_of(mods, no_training))
    assert "extractor, expected the one that the server names, got extractor='resnet'" in caplog.text
    alone = SAYS["ncm"](_samples(0))
    np.testing.assert_array_equal(strategy.state.rows["means"].rows, alone.means.astype(np.float32)[:3])


def test_a_reply_of_another_round_is_left_out(caplog) -> None:
    honest, said = method_mod(lambda m, c: _samples(1)), []

    def late(message, context, call_next):
        said.append(honest(message, context, call_next).content)
        return Message(said[0], reply_to=message)

    strategy = MethodStrategy("fedproto", classes=C, width=D)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(grid_of([method_mod(lambda m, c: _samples(0)), late], no_training), num_rounds=2)
    (left,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    run = strategy.state.run.hex()
    assert f"expected round 2 of fedproto, run {run}, got round 1 of fedproto, run {run}" in left


def test_a_client_lets_out_what_its_owner_says_whatever_the_server_asks_for(caplog) -> None:
    """One takes part in FFC alone; one withholds classes of which it has fewer than eight."""
    apart = method_mod(lambda m, c: _samples(0), methods=["ffc"])
    few = method_mod(lambda m, c: _samples(1), min_samples=8)
    strategy = MethodStrategy("ncm", classes=C, width=D)
    grid = grid_of([apart, few], no_training)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(grid)
    assert "the round's method, expected what this client takes part in: ffc, got ncm" in caplog.text
    counts = np.bincount(_samples(1).labels)
    assert counts.tolist() == [7, 7, 7]
    assert strategy.state.rows["means"].classes.tolist() == []
    more = grid_of([method_mod(lambda m, c: _samples(1), min_samples=7)] * 2, no_training)
    strategy.start(more)
    assert strategy.state.rows["means"].classes.tolist() == [0, 1, 2]


def test_an_app_without_our_mod_is_told_which_one_it_lacks(caplog) -> None:
    app = ClientApp()
    app.train()(no_training)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = MethodStrategy("ncm", classes=C, width=D, min_train_nodes=1, min_available_nodes=1)
        assert strategy.start(LocalGrid({7: app})).arrays == ArrayRecord()
    assert "node 7 is left out: a reply, expected a contribution, got none, try method_mod or bundle_mod" in caplog.text


def test_evaluation_gets_what_has_come_of_the_rounds() -> None:
    mods = [method_mod(lambda m, c: _samples(c.node_config["partition-id"])) for _ in range(2)]
    grid, seen = grid_of(mods, no_training), []

    def evaluate(message: Message, context: object) -> Message:
        seen.append(received(message))
        return Message(RecordDict({"m": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=message)

    for app in grid._apps.values():
        app.evaluate()(evaluate)
    strategy = MethodStrategy("ncm", classes=C, width=D, fraction_evaluate=1.0)
    result = strategy.start(grid)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5
    features = _samples(0).features
    for learned in seen:
        assert isinstance(learned, Learned)
        np.testing.assert_array_equal(learned(features), strategy.learned(features))
        rows, present = learned.rows("means")
        assert present.tolist() == [True, True, True, False]
        np.testing.assert_array_equal(rows[:3], strategy.state.rows["means"].rows.astype(np.float32))
    with pytest.raises(DataError, match=r"features, expected \(N, 6\)"):
        seen[0](features[:, :2])


def test_a_message_that_is_broken_is_refused_by_the_client_in_one_line() -> None:
    grid = grid_of([method_mod(lambda m, c: _samples(0))], no_training)
    strategy = MethodStrategy("ncm", classes=C, width=D, min_train_nodes=1, min_available_nodes=1)
    config = ConfigRecord()
    (message,) = strategy.configure_train(1, ArrayRecord(), config, grid)
    for key in [key for key in config if key.startswith("protofleet.")]:
        broken = ConfigRecord({**config, key: b"\xff" * 9})
        (reply,) = grid.send_and_receive([Message(RecordDict({"config": broken}), 900, "train")])
        assert reply.has_error()
        assert "expected" in reply.error.reason
        assert "Traceback" not in reply.error.reason
    assert message.metadata.message_type == "train"
