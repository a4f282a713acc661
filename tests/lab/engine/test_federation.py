"""The engine of averaging federations: each rule against a naive loop, each algorithm by its own trait."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from export_samples import session
from lab_samples import shares, shipped, some, summed

from protofleet.contract.errors import MethodError, UsageError
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.edge_client.data import LocalData
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.export.verify.verify import Images, run_step
from protofleet.lab.algorithms import ALGORITHMS, RULES
from protofleet.lab.algorithms.base import Outcome, WeightRule, average
from protofleet.lab.algorithms.fedhkd import FedHKD
from protofleet.lab.algorithms.fednh import FedNH
from protofleet.lab.algorithms.fedpr import FedPR
from protofleet.lab.algorithms.head_calibration import _virtual, calibrated_head, ccvr_head, head_by_ffc
from protofleet.lab.algorithms.prototypes import row_bytes
from protofleet.lab.engine.deployed import Course
from protofleet.lab.engine.evaluation import AveragingRecord
from protofleet.lab.engine.run_averaging import Measures, run_algorithm
from protofleet.lab.engine.weight_averaging import Federation
from protofleet.lab.training.local_training import EagerModel, Fitted, train_eager

TEST = some(shipped().test, 8)
GENTLY = {"epochs": 1, "lr": 0.02}


def _model(head: str = "local", seed: int = 3) -> EagerModel:
    net, width = build_backbone("fedproto_mnist", (28, 28, 1), seed=seed)
    return EagerModel(net, classes=10, features=width, mean=(0.5,), std=(0.5,), head=head, seed=seed)


def _federation(name: str, *, rounds: int = 2, fraction: float = 1.0, **hyper: object) -> Federation:
    algorithm = ALGORITHMS[name]
    settled = algorithm.resolve({**GENTLY, **hyper})
    course = Course(rounds=rounds, calibrate=False, fraction=fraction)
    return Federation(algorithm, _model(algorithm.head), shares(), course, settled, batch=8)


def _run(
    name: str,
    measures: Measures | None = None,
    *,
    rounds: int = 2,
    calibrate: bool = False,
    held: bool = True,
    **hyper: object,
):
    algorithm = ALGORITHMS[name]
    own = [LocalData(share.x[:10], share.y[:10]) for share in shares()]
    return run_algorithm(
        algorithm,
        _model(algorithm.head),
        shares(),
        TEST,
        Course(rounds=rounds, calibrate=calibrate),
        algorithm.resolve({**GENTLY, **hyper}),
        batch=8,
        local_tests=own if held else None,
        measures=measures,
    )


# ── servers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rule(name: str, clients: int = 3, **hyper: object) -> WeightRule:
    return RULES[name](ALGORITHMS[name].resolve(hyper), frozenset({"w"}), clients)


def _outcomes(pulls: tuple[float, ...]) -> tuple[dict[str, torch.Tensor], list[Outcome]]:
    rng = np.random.default_rng(5)
    start = {"w": torch.from_numpy(rng.normal(size=(3, 2))), "running": torch.from_numpy(rng.normal(size=2))}
    outcomes = [
        Outcome(
            i, {k: v + torch.from_numpy(rng.normal(size=tuple(v.shape))) for k, v in start.items()}, 10 * i + 5, p, 0.0
        )
        for i, p in enumerate(pulls)
    ]
    return start, outcomes


def test_fednova_divides_each_clients_way_by_its_pull() -> None:
    start, outcomes = _outcomes((4.0, 9.0, 1.5))
    found = _rule("fednova").merge(start, outcomes)
    shares_ = np.array([o.samples for o in outcomes]) / sum(o.samples for o in outcomes)
    effective = sum(p * o.pull for p, o in zip(shares_, outcomes, strict=True))
    way = sum(p * (start["w"] - o.state["w"]).numpy() / o.pull for p, o in zip(shares_, outcomes, strict=True))
    np.testing.assert_allclose(found["w"].numpy(), start["w"].numpy() - effective * way, rtol=1e-12)
    np.testing.assert_allclose(
        found["running"].numpy(), sum(p * o.state["running"].numpy() for p, o in zip(shares_, outcomes, strict=True))
    )


def test_fednova_is_fedavg_where_all_pull_alike() -> None:
    start, outcomes = _outcomes((7.0, 7.0, 7.0))
    found = _rule("fednova").merge(start, outcomes)
    plain = average([o.state for o in outcomes], [o.samples for o in outcomes])
    np.testing.assert_allclose(found["w"].numpy(), plain["w"].numpy(), rtol=1e-12)


@pytest.mark.parametrize(("momentum", "halve_every"), [(0.0, 0), (0.9, 0), (0.9, 2)])
def test_the_pull_is_how_far_constant_gradients_move_the_weights(momentum: float, halve_every: int) -> None:
    """With a constant gradient g, SGD moves the weights by lr·pull·g: counted on torch's own optimiser."""
    steps, lr = 5, 0.1
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=lr, momentum=momentum)
    for number in range(1, steps + 1):
        w.grad = torch.ones(1)
        optimizer.step()
        if halve_every and number % halve_every == 0:
            optimizer.param_groups[0]["lr"] /= 2
    data = some(shipped().train, 4)  # 40 samples: 5 steps of 8
    hyper = ALGORITHMS["fedavg"].resolve({"momentum": momentum, "halve_every": halve_every})
    fitted = train_eager(_model(), data, "fedproto", hyper, epochs=1, batch=8, lr=1e-6, seed=0)
    assert fitted.steps == steps
    assert fitted.pull == pytest.approx(-w.item() / lr, rel=1e-5)


def test_fedadam_and_fedavgm_follow_algorithm_2_over_two_rounds() -> None:
    for name in ("fedavgm", "fedadam"):
        rule = _rule(name)
        state, m, v = None, 0.0, 0.0
        for _ in range(2):
            start, outcomes = _outcomes((1.0, 1.0))
            start = start if state is None else state
            delta = (
                average([o.state for o in outcomes], [o.samples for o in outcomes])["w"].numpy() - start["w"].numpy()
            )
            if name == "fedavgm":
                m = 0.9 * m + delta
                expected = start["w"].numpy() + m
            else:
                m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
                expected = start["w"].numpy() + 0.01 * m / (np.sqrt(v) + 1e-3)
            state = rule.merge(start, outcomes)
            np.testing.assert_allclose(state["w"].numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("name", RULES)
def test_running_statistics_are_averaged_whatever_the_rule(name: str) -> None:
    rule = RULES[name](ALGORITHMS["fedavg"].resolve({"base": name, "momentum": 0.0}), frozenset({"w"}), 2)
    start = {"w": torch.zeros(1), "running_mean": torch.zeros(1)}
    outcomes = []
    for client, samples in ((0, 10), (1, 30)):
        state = {"w": torch.ones(1), "running_mean": torch.full((1,), 4.0 * (client + 1))}
        rule.trained(client, start, state, Fitted(0.0, 2, 2.0 + client, 0.1))
        outcomes.append(Outcome(client, state, samples, 2.0 + client, 0.0))
    assert rule.merge(start, outcomes)["running_mean"].tolist() == [7.0]  # (10 · 4 + 30 · 8) / 40


def test_nobody_sampled_changes_nothing() -> None:
    federation = _federation("fedadam", fraction=1e-9)
    before = copy.deepcopy(federation.centres[0])
    gathered = federation.run_round(1)
    assert gathered.loss is None
    assert all(torch.equal(before[name], tensor) for name, tensor in federation.centres[0].items())


def test_the_proximal_term_holds_weights_back() -> None:
    def distance(mu: float) -> float:
        model, data = _model(), shares()[0]
        before = model.head_weight.detach().clone()
        hyper = ALGORITHMS["fedprox"].resolve({"mu": mu})
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        correct = RULES["fedprox"](hyper, frozenset(start), 1).correction(None, start)
        train_eager(model, data, "fedproto", hyper, epochs=2, batch=8, lr=0.05, seed=0, correct=correct)
        return float((model.head_weight.detach() - before).norm())

    assert distance(5.0) < 0.8 * distance(1e-9)


def test_the_proximal_gradient_is_mu_times_the_way_for_shared_weights_alone() -> None:
    start = {"w": torch.tensor([1.0, -2.0])}  # a head that stays with its client has no common start to be held to
    shared, kept = (torch.nn.Parameter(torch.tensor([3.0, 0.0])) for _ in range(2))
    shared.grad, kept.grad = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])
    correct = RULES["fedprox"](ALGORITHMS["fedprox"].resolve({"mu": 0.25}), frozenset(start), 1).correction(None, start)
    assert correct is not None
    correct({"w": shared, "head.weight": kept})
    assert shared.grad.tolist() == [1.0, 1.0]  # 0.5 + 0.25 · 2
    assert kept.grad.tolist() == [0.5, 0.5]


# ── baselines ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_baseline_learns_and_reports(name: str) -> None:
    records = _run(name, rounds=4, lr=0.002 if name == "fedhkd-averaged" else 0.02)
    assert all(isinstance(record, AveragingRecord) for record in records)
    assert [record.participants for record in records] == [3] * 4
    losses = [record.loss or 0.0 for record in records]
    assert losses[3] < losses[1]  # the first round of FedPR and FedHKD has no second term yet
    assert 0 < records[-1].local_test["head"] <= 1
    assert set(records[-1].trained) == set(records[-1].local_test)


def test_fedper_keeps_heads_and_averages_backbones() -> None:
    federation = _federation("fedper")
    federation.run_round(1)
    states = []
    for client in range(3):
        federation.load(client)
        states.append(copy.deepcopy(federation.model.state_dict()))
    assert torch.equal(states[0]["backbone.0.weight"], states[1]["backbone.0.weight"])
    assert not torch.equal(states[0]["head_weight"], states[1]["head_weight"])
    assert len(federation.groups()) == 3


def test_fedbabu_trains_no_head_and_sends_none() -> None:
    federation = _federation("fedbabu")
    before = federation.model.head_weight.detach().clone()
    gathered = federation.run_round(1)
    assert torch.equal(federation.model.head_weight, before)
    assert gathered.uplink_bytes[0] == 4 * sum(p.numel() for p in federation.model.backbone.parameters())


def test_fesem_puts_clients_of_one_kind_together() -> None:
    """Clients 0 and 1 hold the same images, 2 and 3 the same others."""
    one, other = shares()[0], shares()[2]
    federation = Federation(
        ALGORITHMS["fesem"],
        _model(),
        [one, one, other, other],
        Course(rounds=3, calibrate=False),
        ALGORITHMS["fesem"].resolve({"clusters": 2, "lr": 0.05}),
        batch=8,
    )
    for number in (1, 2, 3):
        federation.run_round(number)
    assert federation.member[0] == federation.member[1] != federation.member[2] == federation.member[3]
    assert len(federation.groups()) == 2


def test_more_clusters_than_clients_is_one_line() -> None:
    with pytest.raises(UsageError, match="clusters, expected up to 3, the number of clients, got 4"):
        _federation("fesem", clusters=4)


def test_fednh_moves_unit_prototypes_by_smoothing() -> None:
    model, side = _model("normalised"), FedNH(10, 50, {"smoothing": 0.75}, 3)
    before = model.head_weight.numpy().copy()
    held = shares()
    for share in held:
        side.gather(side.summarise(model, share, np.random.default_rng(0)))
    side.merge()
    side.install(model)
    z = np.concatenate([model.features(share.x) for share in held]).astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    y = np.concatenate([share.y for share in held])
    mean = z[y == 4].mean(axis=0)
    naive = 0.75 * before[4] + 0.25 * mean / np.linalg.norm(mean)
    np.testing.assert_allclose(model.head_weight.numpy()[4], naive / np.linalg.norm(naive), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(model.head_weight.numpy(), axis=1), 1.0, rtol=1e-5)
    side = FedNH(10, 50, {"smoothing": 0.0}, 3)  # nothing of the old ones, and yet those that nobody held stay
    (kept, *_), before = shares(), model.head_weight.numpy().copy()
    one = LocalData(kept.x[kept.y == 1], kept.y[kept.y == 1])
    side.gather(side.summarise(model, one, np.random.default_rng(0)))
    side.merge()
    side.install(model)
    unchanged = (model.head_weight.numpy() == before).all(axis=1)
    assert np.flatnonzero(~unchanged).tolist() == [1]


def test_rows_beside_weights_cost_their_numbers_and_a_count_for_each_class_that_is_there() -> None:
    present = np.array([True, False, True])
    assert row_bytes(present, 5) == 4 * 2 * (5 + 1)
    assert row_bytes(present, 5, 3) == 4 * 2 * (5 + 3 + 1)
    assert row_bytes(np.zeros(3, dtype=bool), 5) == 0


def test_fedpr_gives_each_holder_one_vote_and_keeps_what_nobody_sent() -> None:
    model, side, held = _model(), FedPR(10, 50, {}, 3), shares()
    for share in held[:2]:
        side.gather(side.summarise(model, share, np.random.default_rng(0)))
    side.merge()
    guide = side.guide()
    assert guide is not None
    means = [ClassMeans.of(model.features(share.x), share.y, 10) for share in held]
    np.testing.assert_allclose(guide.prototypes[3], (means[0].means[3] + means[1].means[3]) / 2, rtol=1e-5)
    assert guide.mask.tolist() == [1.0] * 7 + [0.0] * 3
    side.gather(side.summarise(model, held[2], np.random.default_rng(0)))
    side.merge()
    later = side.guide()
    assert later is not None
    assert torch.equal(later.prototypes[3], guide.prototypes[3])
    assert later.mask.tolist() == [1.0] * 10


def test_fedhkd_gathers_means_of_features_and_soft_predictions() -> None:
    model, held = _model(), shares()
    hyper = ALGORITHMS["fedhkd-averaged"].resolve({})
    side = FedHKD(10, 50, hyper, 3)
    assert side.guide() is None
    for share in held:
        side.gather(side.summarise(model, share, np.random.default_rng(0)))
    side.merge()
    guide = side.guide()
    assert guide is not None
    x, y = np.concatenate([share.x for share in held]), np.concatenate([share.y for share in held])
    features = torch.from_numpy(model.features(x)).double()
    logits = features @ model.head_weight.detach().double().T + model.head_bias.detach().double()
    soft = torch.softmax(logits / 0.5, dim=1).numpy()
    for j in (0, 3, 9):
        np.testing.assert_allclose(guide.prototypes[j], features.numpy()[y == j].mean(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(guide.soft_predictions[j], soft[y == j].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_fedhkds_noise_is_fresh_and_of_the_stated_size() -> None:
    model, share = _model(), shares()[0]

    def knowledge(noise: float, seed: int) -> np.ndarray:
        hyper = ALGORITHMS["fedhkd-averaged"].resolve({"noise": noise, "clip": 0.5})
        side = FedHKD(10, 50, hyper, 3)
        side.gather(side.summarise(model, share, np.random.default_rng(seed)))
        side.merge()
        guide = side.guide()
        assert guide is not None
        return guide.prototypes.numpy()[0]

    mechanism_mean = knowledge(1e-9, 0)
    draws = np.stack([knowledge(2.0, seed) for seed in range(60)])
    count = int((share.y == 0).sum())
    assert (draws - mechanism_mean).std() == pytest.approx(2.0 * 2 * 0.5 / count, rel=0.1)
    assert len({draw.tobytes() for draw in draws}) == 60


def test_samples_without_a_label_are_left_out_or_weighed() -> None:
    share = shares()[0]
    half = LocalData(share.x, np.where(np.arange(len(share)) % 2, share.y, -1))

    def trained(data: LocalData, pu_weight: float) -> torch.Tensor:
        model, hyper = _model(), ALGORITHMS["fedavg"].resolve({"pu_weight": pu_weight})
        train_eager(model, data, "fedproto", hyper, epochs=1, batch=8, lr=0.05, seed=0)
        return model.head_weight.detach()

    assert torch.equal(trained(half, 0.0), trained(half.labelled, 0.0))
    assert not torch.equal(trained(half, 1.0), trained(half, 0.0))
    records = run_algorithm(
        ALGORITHMS["fedpr-averaged"],
        _model(),
        [half, shares()[1]],
        TEST,
        Course(rounds=2),
        ALGORITHMS["fedpr-averaged"].resolve({}),
        batch=8,
    )
    assert set(records[-1].all_classes) == {"head", "prototype", "linear"}


def test_options_are_checked() -> None:
    with pytest.raises(MethodError, match="no hyper-parameter 'lamda'"):
        ALGORITHMS["fedavg"].resolve({"lamda": 1})
    assert ALGORITHMS["spherefed"].resolve({"base": "fedprox"})["mu"] == ALGORITHMS["fedprox"].resolve({})["mu"]
    with pytest.raises(MethodError, match="fedavg over fedavg has no hyper-parameter 'mu'"):
        ALGORITHMS["fedavg"].resolve({"mu": 0.1})
    with pytest.raises(MethodError, match="base, expected one of fedavg"):
        ALGORITHMS["fedavg"].resolve({"base": "fedsgd"})


def test_cosine_falls_to_nearly_nothing() -> None:
    federation = _federation("spherefed", rounds=10, schedule="cosine", lr=0.5)
    rates = [federation._lr(number) for number in range(1, 11)]
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.02
    assert federation._lr(11) == 0.5  # personal fits


# ── closings and personal heads ─────────────────────────────────────────────────────────────────────────────────────


def test_virtual_features_have_the_pooled_classes_mean_and_covariance() -> None:
    rng = np.random.default_rng(1)
    pooled = rng.normal(size=(400, 3)) @ np.array([[1.0, 0.5, 0], [0, 2, 0], [0, 0, 0]]) + [1, 2, 3]  # singular
    z, y = _virtual(
        np.array([0.0, 400.0]),
        np.stack([np.zeros(3), pooled.sum(axis=0)]),
        np.stack([np.zeros((3, 3)), pooled.T @ pooled]),
        2000,
        rng,
    )
    assert set(y) == {1}
    assert len(z) == 2000
    np.testing.assert_allclose(z.mean(axis=0), pooled.mean(axis=0), atol=0.15)
    np.testing.assert_allclose(np.cov(z.T), np.cov(pooled.T), atol=0.4)


def test_closings_answer_better_than_an_untrained_head() -> None:
    model, held = _model("initial"), shares()
    features = model.features(TEST.x)
    before = (model.predict(TEST.x) == TEST.y).mean()
    hyper = ALGORITHMS["fedavg"].resolve({"ccvr_virtual": 200})
    for head in (
        calibrated_head(summed(model, held), method("ffc").resolve({"ridge": 1e-6})),
        ccvr_head(model, held, hyper, seed=0),
    ):
        assert (head(features) == TEST.y).mean() > before + 0.2


def test_the_last_record_carries_closings_and_personal_heads() -> None:
    first, last = _run("spherefed", Measures(("ffc", "ccvr"), ("fit", "head-sgd", "head-ffc")), ridge=1e-6)
    assert set(first.all_classes) == {"head"}
    assert not first.personal
    assert set(last.all_classes) == {"head", "linear", "ccvr"}
    assert set(last.personal) == {"fit/head", "head-sgd/head", "head-ffc/linear"}
    assert last.closing_bytes == {"linear": 8 * (50 * 51 // 2 + 10 * 51), "ccvr": 4 * 10 * (50 * 51 // 2 + 51)}
    # Fitted to the very samples that are asked about (the test's held-back ones are training samples too).
    assert last.personal["head-ffc/linear"] > 0.9


def test_personal_without_held_samples_is_one_line() -> None:
    with pytest.raises(UsageError, match="personal, expected samples held back"):
        _run("fedavg", Measures(personal=("fit",)), held=False)
    with pytest.raises(UsageError, match=r"personal, expected .*, got fits, try one of fit"):
        Measures(personal=("fits",))


def test_a_client_with_one_sample_is_handled() -> None:
    model = _model()
    single = LocalData(TEST.x[:1], TEST.y[:1])
    algorithm = ALGORITHMS["fedpr-averaged"]
    empty = LocalData(TEST.x[:0], TEST.y[:0])
    (record,) = run_algorithm(
        algorithm,
        model,
        [single, shares()[0]],
        TEST,
        Course(rounds=1),
        algorithm.resolve({}),
        batch=8,
        local_tests=[empty, single],
    )
    assert record.participants == 2
    features = model.features(single.x)
    assert (head_by_ffc(features, single.y, 10, method("ffc").resolve({"ridge": 1e-6}))(features) == single.y).all()


# ── shares of odd sizes ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["fedavg", "fednova", "fedpr-averaged"])
def test_a_client_without_samples_takes_no_part(name: str) -> None:
    """In nothing: rounds, closings, personal measures and accuracies are those of the others alone."""
    algorithm, nobody = ALGORITHMS[name], LocalData(TEST.x[:0], TEST.y[:0])
    settled = algorithm.resolve({**GENTLY, "epochs": 1})
    records = []
    for parts in (shares(), [*shares(), nobody]):
        held = [LocalData(share.x[:10], share.y[:10]) for share in parts[:3]] + [TEST] * (len(parts) - 3)
        course, measures = Course(rounds=2, calibrate=True), Measures(personal=("head-ffc", "fit"))
        records.append(
            run_algorithm(
                algorithm,
                _model(algorithm.head),
                parts,
                TEST,
                course,
                settled,
                batch=8,
                local_tests=held,
                measures=measures,
            )
        )
    assert records[0] == records[1]
    assert records[1][-1].participants == 3


def test_a_last_batch_of_one_trains_as_on_a_device() -> None:
    """33 samples in batches of 32, through BatchNorm over planes of one pixel: torch alone refuses the last one."""
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)
    )
    row, preprocess = method("fedproto"), Preprocess((0.5,), (0.5,))
    hyper = row.resolve({})
    plan = plan_step(net, row, hyper, "local", 10, 4)
    state = initial_state(net, plan, 3)
    running = session(export_step(net, preprocess, plan, 32, (28, 28, 1)))
    model = EagerModel(copy.deepcopy(net), classes=10, features=4, mean=(0.5,), std=(0.5,), seed=3)
    data = LocalData(TEST.x[:33], TEST.y[:33])
    fitted = train_eager(model, data, "fedproto", hyper, epochs=1, batch=32, lr=0.05, seed=7)
    assert fitted.steps == 2
    order = np.random.default_rng(7).permutation(33)
    for chosen in (order[:32], order[32:]):
        padded = np.resize(chosen, 32)
        nothing = np.zeros((10, 4), np.float32)
        real = np.arange(32) < len(chosen)
        images = Images(data.x[padded], data.y[padded], nothing, np.zeros(10, np.float32), real, {})
        state |= run_step(running, plan, state, images, 0.05)
    for name, tensor in model.backbone.state_dict().items():
        if tensor.is_floating_point():
            np.testing.assert_allclose(tensor.numpy(), state[f"backbone.{name}"], rtol=1e-3, atol=1e-5, err_msg=name)
