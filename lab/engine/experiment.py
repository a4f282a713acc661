"""`protofleet lab run`: one federation, by any method or baseline, on any data, backbone and partition.

1. Load the data and divide it over the clients.
2. For a method of the wire (`contract/methods/`) or `local`: export a bundle, and run the device's and the aggregator's
   own cores (`lab/engine/deployed.py`).
3. For an algorithm of `lab/algorithms/`: train in torch and average weights (`lab/engine/run_averaging.py`). On request
   calibrate, and save the backbone for `protofleet export --weights`.
4. Return one record for each round.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.native_kernels import installed_kernels
from protofleet.contract.console.logs import told
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import DEFAULT, METHODS, Value, closing_method, method
from protofleet.contract.names import known, listed
from protofleet.contract.sums.merge_rules import RULES
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.trials.step_forms import choose_step_form
from protofleet.export.backbones.backbone import find_backbone
from protofleet.export.backbones.backbone_names import PREFIX, check_backbone_name
from protofleet.export.backbones.weights import file_sha256
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.algorithms import ALGORITHMS
from protofleet.lab.data.datasets import DataSet, channel_statistics, load_dataset, take
from protofleet.lab.data.partition import Partition, hold_back, liars_of, mislabelled, partition, unlabel
from protofleet.lab.data.shift import check_shift, shifted
from protofleet.lab.data.validation import hold_back_for_validation, validation_split
from protofleet.lab.engine.checkpoint import Checkpoint
from protofleet.lab.engine.deployed import Course, OnDevice, RoundRecord, local_only, run_id, simulate
from protofleet.lab.engine.device_turns import TorchSteps
from protofleet.lab.engine.personal_evaluation import own_tests
from protofleet.lab.engine.run_averaging import Measures, run_algorithm
from protofleet.lab.method_names import LOCAL, check_method_name, sends_class_means
from protofleet.lab.training.local_training import EagerModel, save_weights
from protofleet.lab.workers.workers import OneProcess, Workers, limited_threads

__all__ = ["Experiment", "lab_methods", "run_experiment"]

TRAINERS = ("onnx", "kernels", "torch")


def lab_methods() -> dict[str, str]:
    """Everything that the lab can run: names, each with a line for a person."""
    return {
        **{name: f"{deployed.summary}, as deployed" for name, deployed in METHODS.items()},
        LOCAL: f"{METHODS[DEFAULT].title}'s training without the others",
        **{name: algorithm.summary + " (lab only)" for name, algorithm in ALGORITHMS.items()},
    }


@dataclass(frozen=True)
class Experiment:
    """The settings of one run.

    Attributes:
        partition: which client holds which samples. `partition.clients` is the number of devices.
        course: rounds, sampling, seed.
        backbones: several backbones instead of `backbone`, one for each device in turn, for devices that keep their
            weights (FedProto-mh).
        head: `frozen` for an orthonormal head that is never trained (FedProto-UH); None for the method's own.
        test_samples: number of test images to use, drawn at random. None for all; 0 for none, where only the clients'
            own tests matter.
        positive_rate: share of each client's training samples that is labelled.
        local_test: share of each client's samples that it keeps for its own test.
        measures: further measurements of a federation that averages weights.
        hyper: hyper-parameters that differ from the method's defaults.
        weights: a safetensors file to start from, or "pretrained" for a library's own weights; None for random ones.
        save_weights: file for the final backbone of an algorithm that averages weights.
        input_shape: (H, W, c) to resize images to; None for their own shape.
        scaling: `normalised` by the training images' mean and deviation, or `unit`, which is 0 to 1.
        validation: whether the validation split replaces every test (`lab/data/validation.py`).
        trainer: how the devices' networks are trained: `onnx`, the graph that every device gets; `kernels`, its form
            for protofleet-kernels where a trial finds that faster, as on a device that has the wheel; or `torch`. The
            last two differ from it by rounding. Networks whose weights are averaged are always trained by torch.
        keep_optimizer: whether a device's optimizer keeps its state for the next round. Some frameworks do this, and no
            real device. It needs torch as the trainer.
        shift, severity: `corruption` of each client's images by a kind of its own, with severity 1 to 5
            (`lab/data/shift.py`).
        liars: number of clients that say of each training sample that it is of the next class.
    """

    method: str
    data: str
    partition: Partition
    course: Course
    backbone: str = "small_cnn"
    batch: int = 32
    backbones: tuple[str, ...] = ()
    head: str | None = None
    test_samples: int | None = None
    positive_rate: float = 1.0
    local_test: float = 0.0
    measures: Measures = field(default_factory=Measures)
    hyper: Mapping[str, object] = field(default_factory=dict)
    weights: Path | str | None = None
    save_weights: Path | None = None
    input_shape: tuple[int, int, int] | None = None
    scaling: str = "normalised"
    validation: bool = False
    trainer: str = "onnx"
    keep_optimizer: bool = False
    shift: str = "none"
    severity: int = 3
    liars: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", check_method_name(self.method))
        self._resolved_hyper()
        for name in self.backbones or (self.backbone,):
            check_backbone_name(name)
        if self.save_weights is not None and self.method not in ALGORITHMS:
            raise UsageError(
                "--save-weights",
                expected="a method that averages weights: " + ", ".join(ALGORITHMS),
                got=self.method,
                hint="without it: devices keep their weights",
            )
        if self.course.rounds < 1 or self.batch < 1:
            raise UsageError("--rounds and --batch", expected="1 or more", got=f"{self.course.rounds}, {self.batch}")
        if not 0 < self.course.fraction <= 1:
            raise UsageError("--fraction", expected="above 0, up to 1", got=self.course.fraction)
        if self.method in ALGORITHMS and (self.backbones or self.head):
            raise UsageError(
                "backbones and head", expected="a method whose devices keep their weights", got=self.method
            )
        if self.backbones and self.course.calibrate:
            raise UsageError("backbones", expected="no FFC, whose sums only add up over one extractor", got="FFC")
        if self.head not in (None, "frozen"):
            raise UsageError("head", expected="frozen", got=self.head)
        check_shift(self.shift, self.severity)
        if self.scaling not in ("normalised", "unit"):
            raise UsageError("scaling", expected="normalised or unit", got=self.scaling)
        if self.trainer not in TRAINERS:
            raise UsageError("--trainer", expected=listed(TRAINERS), got=self.trainer)
        if self.trainer == "kernels" and installed_kernels() is None:
            hint = "pip install ./kernels, or --trainer onnx"
            raise UsageError("--trainer kernels", expected="protofleet-kernels installed", got="none", hint=hint)
        by_torch = self.trainer == "torch" and self.method not in ALGORITHMS and method(_row(self.method)).trains
        if self.keep_optimizer and not by_torch:
            expected = "trainer torch, and devices that train and keep their weights"
            raise UsageError("keep_optimizer", expected=expected, got=f"{self.trainer}, {self.method}")
        if self.test_samples is not None and self.test_samples < 0:
            raise UsageError("--test-samples", expected="0 or more", got=self.test_samples)
        if not 0 <= self.liars < self.partition.clients:
            raise UsageError(
                "--liars", expected=f"0 to {self.partition.clients - 1}, fewer than clients", got=self.liars
            )
        known(RULES, self.course.rule, "--rule")
        if self.course.rule != "mean" and not sends_class_means(self.method):
            expected = f"mean for {self.method}, which sends no class means"
            raise UsageError("--rule", expected=expected, got=self.course.rule, hint="--rule mean")
        if not 0 < self.positive_rate <= 1:
            raise UsageError("--positive-rate", expected="above 0, up to 1", got=self.positive_rate)
        if not 0 <= self.local_test < 1:
            raise UsageError("--local-test", expected="0 up to 1, without 1", got=self.local_test)

    def _resolved_hyper(self) -> dict[str, Value]:
        resolve = ALGORITHMS[self.method].resolve if self.method in ALGORITHMS else method(_row(self.method)).resolve
        return resolve(self.hyper)

    def resolved(self) -> dict[str, Any]:
        """Every setting as it is used, defaults included, as plain values. Without data, seed and `save_weights`."""
        settings = json.loads(json.dumps(asdict(self), default=str))
        if isinstance(self.weights, Path) and self.weights.is_file():
            settings["weights"] = file_sha256(self.weights)[:16]
        del settings["data"], settings["course"]["seed"], settings["save_weights"]
        return settings | {"hyper": self._resolved_hyper()}


def run_experiment(
    experiment: Experiment,
    *,
    on_round: Callable[[RoundRecord], None],
    on_device: OnDevice,
    on_text: Callable[[str], None],
    on_line: Callable[[str], None] = lambda line: None,
    data: DataSet | None = None,
    checkpoint: Checkpoint | None = None,
    workers: Workers | None = None,
) -> list[RoundRecord]:
    """Run an experiment; returns one record for each round.

    Args:
        on_round: called with each round's record.
        on_device: called before each device's turn with the round and the number of turns done.
        on_text: called with a few words about the current step.
        on_line: called with a line that a person should see, about images that are left out or resized.
        data: the loaded data set of `experiment.data`; None to load it.
        checkpoint: keeps the run between rounds. A run continues from it. It is removed at the end.
        workers: where clients train and answer; None for this process, on one thread.

    Raises:
        UsageError, DataError, MethodError, ExportError: one line each.
    """
    if data is None:
        on_text("loading the data")
        with told(on_line):
            data = load_dataset(experiment.data, experiment.input_shape)
    if experiment.validation:
        data = validation_split(data, ask=experiment.test_samples != 0)
        on_line("the validation split is asked about: training images that no client trains on, and no test image")
    cut = hold_back_for_validation if experiment.validation else hold_back
    parts = partition(data.train.y, experiment.partition, seed=experiment.course.seed, sources=data.sources)
    cuts = [cut(part, experiment.local_test, experiment.course.seed + n) for n, part in enumerate(parts)]
    shares = [take(data.train, kept) for kept, _ in cuts]
    if experiment.positive_rate < 1:
        rate, seed = experiment.positive_rate, experiment.course.seed
        shares = [LocalData(share.x, unlabel(share.y, rate, seed + n)) for n, share in enumerate(shares)]
    local_tests = [take(data.train, own) for _, own in cuts]
    if experiment.shift == "corruption":
        severity, seed = experiment.severity, experiment.course.seed
        shares = [shifted(own, n, severity, seed) for n, own in enumerate(shares)]
        local_tests = [shifted(own, n, severity, seed + 1_000_003) for n, own in enumerate(local_tests)]
    for n in liars_of(len(shares), experiment.liars, experiment.course.seed):
        shares[n] = LocalData(shares[n].x, mislabelled(shares[n].y, data.classes))
        on_line(f"client {n + 1} of {len(shares)} lies: each of its training images has the label of the next class")
    asked = _asked_about(data, experiment)
    engine = _averaging if experiment.method in ALGORITHMS else _deployed
    workers = workers or OneProcess()
    with limited_threads(workers.threads):
        records = engine(
            experiment, data, asked, shares, local_tests, on_round, on_device, on_text, checkpoint, workers
        )
    if checkpoint is not None:
        checkpoint.remove()
    return records


def _asked_about(data: DataSet, experiment: Experiment) -> LocalData:
    """The requested number of test images."""
    few, many = experiment.test_samples, len(data.test)
    if few is None or few >= many:
        return data.test
    return take(data.test, np.sort(np.random.default_rng(experiment.course.seed).choice(many, few, replace=False)))


def _row(name: str) -> str:
    """The method of the bundle for `name`."""
    return DEFAULT if name == "local" else name


def _deployed(
    experiment: Experiment,
    data: DataSet,
    test: LocalData,
    shares: Sequence[LocalData],
    local_tests: Sequence[LocalData],
    on_round: Callable[[RoundRecord], None],
    on_device: OnDevice,
    on_text: Callable[[str], None],
    checkpoint: Checkpoint | None,
    workers: Workers,
) -> list[RoundRecord]:
    """Run on the device's and the aggregator's own cores."""
    on_text("exporting the bundle")
    names = experiment.backbones or (experiment.backbone,)
    with tempfile.TemporaryDirectory(prefix="protofleet-lab-") as folder:
        bundles = [_bundle(experiment, name, data, Path(folder) / f"{n}.bundle") for n, name in enumerate(names)]
    theirs = [bundles[n % len(bundles)] for n in range(len(shares))]  # a third of the devices each, for three
    torch = _torch_steps(experiment, data, names, len(shares))
    on_text("")
    fleet = bundles[0] if len(bundles) == 1 else theirs
    rounds, own = experiment.course.rounds, any(len(local_test) for local_test in local_tests)

    def pass_on(record: RoundRecord) -> None:
        if not (own and record.round >= _last_round(experiment)):  # the last one is not complete yet
            on_round(record)

    if experiment.method == "local":
        done = local_only(
            fleet,
            shares,
            test,
            rounds=rounds,
            run=run_id(experiment.course.seed),
            evaluate_every=experiment.course.evaluate_every,
            on_round=pass_on,
            on_device=on_device,
            checkpoint=checkpoint,
            local_tests=local_tests,
            workers=workers,
            torch=torch,
        )
    else:
        done = simulate(
            fleet,
            shares,
            test,
            experiment.course,
            on_round=pass_on,
            on_device=on_device,
            checkpoint=checkpoint,
            local_tests=local_tests,
            workers=workers,
            torch=torch,
        )
    if not own:
        return done.records
    on_text("each device's own test")
    last = own_tests(done, fit="fit" in experiment.measures.personal, workers=workers)
    on_round(last)
    return [*done.records[:-1], last]


def _torch_steps(experiment: Experiment, data: DataSet, names: Sequence[str], devices: int) -> TorchSteps | None:
    """How torch trains the devices; None where the bundles' graphs do.

    It is None, too, for a method that trains nothing, and for a network from an ONNX file, which never trains.
    """
    entry = method(_row(experiment.method))
    if experiment.trainer != "torch" or not entry.trains or any(name.startswith(PREFIX) for name in names):
        return None
    seed, weights = experiment.course.seed, experiment.weights
    nets = [find_backbone(name, data.input_shape, seed=seed, weights=weights).net for name in names]
    return TorchSteps([nets[n % len(nets)] for n in range(devices)], experiment.keep_optimizer)


def _last_round(experiment: Experiment) -> int:
    """The number of the last round. FFC's round comes after the method's own."""
    extra = experiment.course.calibrate and experiment.method not in ("local", closing_method().name)
    return experiment.course.rounds + extra


def _bundle(experiment: Experiment, backbone: str, data: DataSet, path: Path) -> Bundle:
    """The bundle of every device with this backbone, with the step that it is to train with here."""
    mean, std = _scaling(experiment, data)
    build_bundle(
        backbone=backbone,
        method_name=_row(experiment.method),
        labels=data.labels,
        input_shape=data.input_shape,
        out=path,
        weights=experiment.weights,
        head="frozen" if experiment.head == "frozen" else None,
        hyper=dict(experiment.hyper),
        batch=experiment.batch,
        seed=experiment.course.seed,
        mean=mean,
        std=std,
        provenance=f"weights {Path(experiment.weights).name}" if experiment.weights else "random weights",
        for_kernels=experiment.trainer == "kernels",
    )
    return choose_step_form(read_bundle(path), path)


def _scaling(experiment: Experiment, data: DataSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the deviation for each channel of images in 0 to 1."""
    channels = data.input_shape[2]
    return _statistics(data) if experiment.scaling == "normalised" else ((0.0,) * channels, (1.0,) * channels)


@lru_cache(maxsize=2)
def _statistics(data: DataSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Channel statistics, computed once for each data set: they take most of the time of a short run."""
    return channel_statistics(data.train.x)


def _averaging(
    experiment: Experiment,
    data: DataSet,
    test: LocalData,
    shares: Sequence[LocalData],
    local_tests: Sequence[LocalData],
    on_round: Callable[[RoundRecord], None],
    on_device: OnDevice,
    on_text: Callable[[str], None],
    checkpoint: Checkpoint | None,
    workers: Workers,
) -> list[RoundRecord]:
    on_text("building the backbone")
    algorithm, seed = ALGORITHMS[experiment.method], experiment.course.seed
    hyper = algorithm.resolve(experiment.hyper)
    mean, std = _scaling(experiment, data)
    backbone = find_backbone(experiment.backbone, data.input_shape, seed=seed, weights=experiment.weights)
    shape = {"classes": data.classes, "features": backbone.width}
    model = EagerModel(backbone.net, **shape, mean=mean, std=std, head=algorithm.head, seed=seed)
    on_text("")
    records = run_algorithm(
        algorithm,
        model,
        shares,
        test,
        experiment.course,
        hyper,
        batch=experiment.batch,
        local_tests=local_tests,
        measures=experiment.measures,
        on_round=on_round,
        on_device=on_device,
        checkpoint=checkpoint,
        workers=workers,
    )
    if experiment.save_weights is not None:
        save_weights(model, experiment.save_weights)
    return records
