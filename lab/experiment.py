"""`protofleet lab run`: one federation in one process, by any method or baseline, on any data, backbone and partition.

1. Load the data and divide it over the clients.
2. For a method of the wire (`fedproto`, `ffc`) or `local`: export a bundle and drive the device's and the aggregator's
   own cores (`lab/simulate.py`). For a row of `lab/baselines.py`: train in torch and average weights
   (`lab/averaging.py`), and, when asked, calibrate and save the backbone for `protofleet export --weights`.
3. Hand out one record for each round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.bundle import Bundle, read_bundle
from contract.errors import UsageError, near_names
from contract.methods import method
from edge_client.data import LocalData
from export.backbones import build_backbone
from export.build import build_bundle
from lab.averaging import Measures, run_baseline
from lab.baselines import BASELINES
from lab.datasets import DataSet, load_dataset, take
from lab.eager import EagerModel, save_weights
from lab.partition import Partition, hold_back, partition
from lab.prepare import channel_statistics
from lab.simulate import Course, OnDevice, RoundRecord, local_only, run_id, simulate

__all__ = ["LAB_METHODS", "Experiment", "run_experiment"]

LAB_METHODS = {
    "fedproto": "class prototypes, as deployed",
    "ffc": "closed-form calibration of the shared backbone, as deployed",
    "local": "FedProto's training without the others",
    **{name: baseline.summary + " (lab only)" for name, baseline in BASELINES.items()},
}


@dataclass(frozen=True)
class Experiment:
    """What is run.

    Attributes:
        partition: who holds what; its `clients` is the number of devices.
        course: rounds, sampling, seed.
        local_test: share of each client's samples that it keeps for its own test.
        measures: what a federation that averages weights measures beside.
        hyper: hyper-parameters that differ from the method's defaults.
        weights: safetensors to start from; random weights when None.
        save_weights: where a baseline's backbone is written at the end.
    """

    method: str
    data: str
    partition: Partition
    course: Course
    backbone: str = "small_cnn"
    batch: int = 32
    local_test: float = 0.0
    measures: Measures = field(default_factory=Measures)
    hyper: Mapping[str, object] = field(default_factory=dict)
    weights: Path | None = None
    save_weights: Path | None = None

    def __post_init__(self) -> None:
        if self.method not in LAB_METHODS:
            raise UsageError(
                "--method", expected="a method of the lab", got=self.method, hint=near_names(self.method, LAB_METHODS)
            )
        settle = BASELINES[self.method].settle if self.method in BASELINES else method(_row(self.method)).settle
        settle(self.hyper)
        if self.save_weights is not None and self.method not in BASELINES:
            raise UsageError(
                "--save-weights",
                expected="a method that averages weights: " + ", ".join(BASELINES),
                got=self.method,
                hint="without it: devices keep their weights",
            )
        if self.course.rounds < 1 or self.batch < 1:
            raise UsageError("--rounds and --batch", expected="1 or more", got=f"{self.course.rounds}, {self.batch}")
        if not 0 < self.course.fraction <= 1:
            raise UsageError("--fraction", expected="above 0, up to 1", got=self.course.fraction)
        if not 0 <= self.local_test < 1:
            raise UsageError("--local-test", expected="0 up to 1, without 1", got=self.local_test)


def run_experiment(
    experiment: Experiment,
    *,
    on_round: Callable[[RoundRecord], None],
    on_device: OnDevice,
    on_text: Callable[[str], None],
    data: DataSet | None = None,
) -> list[RoundRecord]:
    """Run it.

    Args:
        on_round: called with each round's record.
        on_device: called before each device's turn with the round and how many have had theirs.
        on_text: called with a few words about what is done now.
        data: what `experiment.data` names, where it is loaded already.

    Raises:
        UsageError, DataError, MethodError, ExportError: one line each.
    """
    if data is None:
        on_text("loading the data")
        data = load_dataset(experiment.data)
    parts = partition(data.train.y, experiment.partition, seed=experiment.course.seed)
    cuts = [hold_back(part, experiment.local_test, experiment.course.seed + n) for n, part in enumerate(parts)]
    shares = [take(data.train, kept) for kept, _ in cuts]
    if experiment.method in BASELINES:
        held = [take(data.train, own) for _, own in cuts]
        return _averaging(experiment, data, shares, held, on_round, on_device, on_text)
    on_text("exporting the bundle")
    with tempfile.TemporaryDirectory(prefix="protofleet-lab-") as folder:
        bundle = _bundle(experiment, data, Path(folder) / "lab.bundle")
    on_text("")
    if experiment.method == "local":
        return local_only(
            bundle,
            shares,
            data.test,
            rounds=experiment.course.rounds,
            run=run_id(experiment.course.seed),
            evaluate_every=experiment.course.evaluate_every,
            on_round=on_round,
            on_device=on_device,
        ).records
    return simulate(bundle, shares, data.test, experiment.course, on_round=on_round, on_device=on_device).records


def _row(name: str) -> str:
    """The row of the methods table that a bundle for `name` is made of."""
    return "fedproto" if name == "local" else name


def _bundle(experiment: Experiment, data: DataSet, path: Path) -> Bundle:
    mean, std = channel_statistics(data.train.x)
    build_bundle(
        backbone=experiment.backbone,
        method_name=_row(experiment.method),
        labels=data.labels,
        input_shape=data.input_shape,
        out=path,
        weights=experiment.weights,
        hyper=dict(experiment.hyper),
        batch=experiment.batch,
        seed=experiment.course.seed,
        mean=mean,
        std=std,
        provenance=f"weights {experiment.weights.name}" if experiment.weights else "random weights",
    )
    return read_bundle(path)


def _averaging(
    experiment: Experiment,
    data: DataSet,
    shares: Sequence[LocalData],
    held: Sequence[LocalData],
    on_round: Callable[[RoundRecord], None],
    on_device: OnDevice,
    on_text: Callable[[str], None],
) -> list[RoundRecord]:
    on_text("building the backbone")
    baseline, seed = BASELINES[experiment.method], experiment.course.seed
    hyper = baseline.settle(experiment.hyper)
    mean, std = channel_statistics(data.train.x)
    net, width = build_backbone(experiment.backbone, data.input_shape, seed=seed)
    model = EagerModel(net, classes=data.classes, features=width, mean=mean, std=std, head=baseline.head, seed=seed)
    on_text("")
    records = run_baseline(
        baseline,
        model,
        shares,
        data.test,
        experiment.course,
        hyper,
        batch=experiment.batch,
        held=held,
        measures=experiment.measures,
        on_round=on_round,
        on_device=on_device,
    )
    if experiment.save_weights is not None:
        save_weights(model, experiment.save_weights)
    return records
