"""An optimizer that goes on in a client's next round where it was, as in some frameworks: each client's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_samples import bundle_of, shipped, some

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import UsageError
from protofleet.edge_client.device.device import round_seed
from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.data.datasets import take
from protofleet.lab.data.partition import Partition
from protofleet.lab.engine.checkpoint import Checkpoint
from protofleet.lab.engine.deployed import Course, RoundRecord, local_only, run_id
from protofleet.lab.engine.device_turns import TorchSteps
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.engine.torch_trainer import TorchTrainer
from protofleet.lab.paper_tables.config import Settings
from protofleet.lab.workers.engines import open_workers

BATCH, BACKBONE = 16, "fedproto_mnist"


def _trainer(bundle: Bundle) -> TorchTrainer:
    return TorchTrainer(bundle, build_backbone(BACKBONE, (28, 28, 1), seed=0)[0])


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        ("fedproto", {"momentum_buffer"}),
        ("fedhkd", {"step", "exp_avg"}),
        ("fedhp", {"momentum_buffer", "step", "exp_avg"}),  # its prototypes have an optimizer of their own
    ],
)
def test_two_trainings_with_it_are_one_that_was_never_interrupted(method: str, kinds: set[str], tmp_path: Path) -> None:
    bundle, data = bundle_of(tmp_path / "b.bundle", method, BACKBONE), some(shipped().train, 7)
    whole, begun, parted = _trainer(bundle), _trainer(bundle), _trainer(bundle)
    whole.load_state(bundle.params)
    begun.load_state(bundle.params)
    for seed in (1, 2):
        whole.fit(data, epochs=1, lr=0.01, given={}, seed=seed)  # the second time without a new optimizer
        begun.load_state(bundle.params | (begun.export_state() if seed == 2 else {}))
        begun.fit(data, epochs=1, lr=0.01, given={}, seed=seed)
    parted.load_state(bundle.params)
    parted.fit(data, epochs=1, lr=0.01, given={}, seed=1)
    weights, kept = parted.export_state(), parted.optimizer_state()
    assert kinds <= {name.partition(".")[0] for name in kept}
    parted.load_state(bundle.params)
    parted.begin_with({})
    parted.fit(some(shipped().train, 3), epochs=2, lr=0.01, given={}, seed=9)  # somebody else's turn
    parted.begin_with(kept)
    assert parted.optimizer_state().keys() == kept.keys()
    parted.load_state(bundle.params | weights)
    parted.fit(data, epochs=1, lr=0.01, given={}, seed=2)
    assert all(np.array_equal(value, parted.export_state()[name]) for name, value in whole.export_state().items())
    assert not all(np.array_equal(value, begun.export_state()[name]) for name, value in whole.export_state().items())


def test_each_client_has_its_own(tmp_path: Path) -> None:
    """Two clients that train alone for three rounds: as two trainers, one for each."""
    bundle, run = bundle_of(tmp_path / "b.bundle", "fedproto", BACKBONE), run_id(4)
    shares = [some(shipped().train, 5, seed=1), some(shipped().train, 3, seed=2)]
    wanted = []
    for number, share in enumerate(shares, 1):
        trainer = _trainer(bundle)
        trainer.load_state(bundle.params)
        seeds = [round_seed(f"device-{number}", run, each) for each in (1, 2, 3)]
        wanted.append([trainer.fit(share, epochs=1, lr=0.01, given={}, seed=seed) for seed in seeds])
    nets = [build_backbone(BACKBONE, (28, 28, 1), seed=0)[0]] * 2
    asked = take(shipped().test, np.arange(5))
    done = local_only(bundle, shares, asked, rounds=3, run=run, evaluate_every=2, torch=TorchSteps(nets, True))
    assert [each.loss for each in done.records] == [float(np.mean(pair)) for pair in zip(*wanted, strict=True)]


def _experiment(method: str = "fedhp", **given: object) -> Experiment:
    experiment = Experiment(
        method,
        "fashion_mnist_subset",
        Partition("dirichlet", 4, alpha=0.5, only=200),
        Course(rounds=4, calibrate=False, fraction=0.8, evaluate_every=3),
        BACKBONE,
        BATCH,
        test_samples=40,
        local_test=0.2,
        measures=Measures(personal=("fit",)),
        trainer="torch",
        keep_optimizer=True,
        hyper=given.pop("hyper", {"lr": 0.02, "epochs": 1}),
    )
    return replace(experiment, **given)  # type: ignore[arg-type]


def _run(experiment: Experiment, checkpoint: Checkpoint | None = None, stop_after: int = 0, jobs: int = 1) -> list:
    shown: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        shown.append(record)
        if len(shown) == stop_after:
            raise KeyboardInterrupt

    nothing = {"on_device": lambda number, turn: None, "on_text": lambda text: None}
    with open_workers("processes", jobs) as workers:
        records = run_experiment(
            experiment, data=shipped(), on_round=on_round, checkpoint=checkpoint, workers=workers, **nothing
        )
    return [record.as_json() for record in records]


def test_a_run_with_it_is_the_same_stopped_and_on_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofleet.lab.engine.checkpoint._EVERY_S", 0)
    monkeypatch.setattr("protofleet.lab.engine.checkpoint._SHARE", 0)
    whole = _run(_experiment())
    with pytest.raises(KeyboardInterrupt):
        _run(_experiment(), Checkpoint(tmp_path / "run.checkpoint", "it"), stop_after=2)
    assert _run(_experiment(), Checkpoint(tmp_path / "run.checkpoint", "it")) == whole
    assert _run(_experiment(), jobs=2) == whole
    anew = _run(_experiment(keep_optimizer=False))
    assert anew[0]["loss"] == whole[0]["loss"], "there is nothing to keep before the first round"
    assert anew[1]["loss"] != whole[1]["loss"]


@pytest.mark.parametrize(
    "given", [{"trainer": "onnx"}, {"method": "fedavg", "hyper": {}}, {"method": "ncm", "hyper": {}}]
)
def test_where_it_cannot_be_kept_is_one_line(given: dict) -> None:
    with pytest.raises(UsageError, match="keep_optimizer, expected trainer torch, and devices that train and keep"):
        _experiment(**given)


def test_a_tables_setting_reaches_the_run() -> None:
    given = Settings(method="fedproto", trainer="torch", keep_optimizer=True, clients=2)
    assert given.experiment("fashion_mnist_subset", 0) == replace(
        Settings(method="fedproto", trainer="torch", clients=2).experiment("fashion_mnist_subset", 0),
        keep_optimizer=True,
    )
