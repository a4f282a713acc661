"""The work of one device in a run of the lab, as workloads of the cost models (`hw_profiles/workload`).

A round consists of these parts. The method's or the algorithm's class says which apply:

    training     the training steps, with the rule's correction: on a CPU the graph that is exported for devices, as in
                 `profile`; on an array the step that is derived layer by layer, as in `cost`
    features     a pass over all samples, for the contribution and for the class means that answer; a second pass where
                 the contribution is not made of these means
    statistic    the sums over the features

After the last round a closing follows where the accuracy is that of a closed form or of CCVR: a pass and the sums.

Not counted: the server's work, reading and decoding images, noise, encoding, sending, and operations on the weights
once a round.

An algorithm that averages weights is no method of the wire. But its clients' loss is that of a method, or
cross-entropy, which is FedProto's loss without the pull. The graph of that method stands for its own. So every method
of `lab list` is known here by its class alone. A class that does not state the terms of its loss is a MethodError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from protofleet.contract.errors import MethodError
from protofleet.contract.methods import DEFAULT, METHODS, Head, Method, Value, closing_method, method
from protofleet.contract.sums.statistics import ClassMeans, Field
from protofleet.edge_client.training.extractor import BLOCK_SAMPLES
from protofleet.export.backbones.backbone import find_backbone
from protofleet.export.bundles.build import load_dynamo
from protofleet.export.bundles.bundle_graphs import export_step
from protofleet.export.bundles.features import export_features
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.hw_profiles.workload.baselines import ccvr, features_width
from protofleet.hw_profiles.workload.calibration_step import method_calibration, statistic_work
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import read_workload
from protofleet.hw_profiles.workload.model import Layer, Role, Tensor, Workload
from protofleet.hw_profiles.workload.training import HeadUse, Training, method_training
from protofleet.hw_profiles.workload.training_step import training_step
from protofleet.lab.algorithms import ALGORITHMS, RULES
from protofleet.lab.algorithms.base import Algorithm
from protofleet.lab.engine.experiment import Experiment

__all__ = ["Network", "Part", "Work", "device_work", "network"]

_ROLES: Mapping[str, Role] = {"param": "parameter", "optimizer": "optimizer", "frozen": "frozen"}
_HEADS: Mapping[str, tuple[Head, HeadUse]] = {
    "local": ("local", "trained"),
    "initial": ("frozen", "frozen"),
    "frozen": ("frozen", "frozen"),
    "normalised": ("frozen", "frozen"),
}


@dataclass(frozen=True, eq=False)
class Part:
    """A workload, and how often it runs.

    Attributes:
        on_array: in its place where layers are costed one by one.
        forward: of a training step, the inference graph of its network, by which its operators are judged.
        sums: whether it is of sums over features, which no fitted network has.
    """

    name: str
    workload: Workload
    times: float
    on_array: Workload | None = None
    forward: Workload | None = None
    sums: bool = False


@dataclass(frozen=True, eq=False)
class Work:
    """The work of a device: in each of `rounds`, and once after the last.

    Attributes:
        rounds: rounds that a device takes part in; a fraction where only some devices are sampled.
    """

    round: tuple[Part, ...]
    closing: tuple[Part, ...]
    rounds: float


class Network:
    """A backbone's graphs for devices, for C classes. Each is exported once, without weights.

    Args:
        input_shape: (H, W, c).

    Raises:
        UsageError, ExportError: no such backbone, or one that cannot be exported for such images.
    """

    def __init__(self, backbone: str, input_shape: tuple[int, int, int], classes: int) -> None:
        load_dynamo()
        self.classes, self._name, self._shape = classes, backbone, input_shape
        self._backbone = find_backbone(backbone, input_shape)
        self._preprocess = Preprocess(self._backbone.mean, self._backbone.std)
        first = method(DEFAULT)
        plan = plan_step(self._backbone.net, first, first.resolve({}), first.heads[0], classes, self.width)
        self._features = export_features(self._backbone.net, self._preprocess, plan.state, input_shape, unit=False)
        self._roles = {tensor.name: _ROLES.get(tensor.role, "buffer") for tensor in plan.state}
        self._forward: dict[int, Workload] = {}
        self._steps: dict[tuple[object, ...], Workload] = {}

    @property
    def width(self) -> int:
        """D."""
        return self._backbone.width

    @cached_property
    def inference(self) -> Workload:
        """The features graph of one photo, as a runtime runs it."""
        return fold_weights(self.forward_at(1))

    def forward_at(self, batch: int) -> Workload:
        """The features graph at batch B."""
        if batch not in self._forward:
            graph = read_workload(self._features, name=self._name, batch=batch, roles=self._roles)
            assert features_width(graph) == self.width
            self._forward[batch] = graph
        return self._forward[batch]

    def step(self, trained_method: Method, hyper: Mapping[str, Value], head: Head, batch: int) -> Workload:
        """The exported training step of a method. `hyper` is resolved."""
        stateful = trained_method.name if trained_method.state(2, 2, seed=0) else ""
        objective = (trained_method.objective, stateful, *sorted(hyper.items()))
        key = (*objective, head, batch)
        if key not in self._steps:
            plan = plan_step(self._backbone.net, trained_method, hyper, head, self.classes, self.width)
            graph = export_step(self._backbone.net, self._preprocess, plan, batch, self._shape)
            roles = {tensor.name: _ROLES.get(tensor.role, "buffer") for tensor in plan.state}
            name = f"{self._name} {trained_method.name}"
            self._steps[key] = read_workload(graph, name=name, roles=roles, step_inputs=plan.inputs)
        return self._steps[key]


@lru_cache(maxsize=4)
def network(backbone: str, input_shape: tuple[int, int, int], classes: int) -> Network:
    """A cached `Network`: making one takes seconds."""
    return Network(backbone, input_shape, classes)


def device_work(experiment: Experiment, way: str, net: Network, samples: int) -> Work:
    """The work of a device with N samples in this run.

    Args:
        way: the way of answering that gives the accuracy. `linear` and `ccvr` are those of a closing, if any.

    Raises:
        MethodError: a method or an algorithm that does not say what its loss consists of.
    """
    algorithm = ALGORITHMS.get(experiment.method)
    rounds = experiment.course.rounds * experiment.course.fraction
    wanted = [name for name, its in (("ffc", "linear"), ("ccvr", "ccvr")) if its == way and _has(experiment, name)]
    closing = tuple(part for name in wanted for part in _closing(name, net, samples))
    if algorithm is not None:
        return Work(tuple(_averaged(algorithm, experiment, net, samples)), closing, rounds)
    local_method = method(DEFAULT if experiment.method == "local" else experiment.method)
    if not local_method.trains:
        return Work(tuple(_untrained(local_method, experiment, net, samples)), (), rounds)
    return Work(tuple(_trained(local_method, experiment, net, samples)), closing, rounds)


def _has(experiment: Experiment, closing: str) -> bool:
    return closing in experiment.measures.closings or (closing == "ffc" and experiment.course.calibrate)


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _trained(own: Method, experiment: Experiment, net: Network, samples: int) -> Iterator[Part]:
    """The parts of a method of the wire that trains. `local` sends nothing, but computes its class means, too."""
    hyper, batch = own.resolve(experiment.hyper), experiment.batch
    head: Head = "frozen" if experiment.head == "frozen" else own.heads[0]
    if not own.loss:
        raise MethodError(f"{own.name}: loss", expected="what its loss consists of", got="none")
    training = method_training(own, net.classes, net.width, hyper=hyper, head=head)
    derived = training_step(net.forward_at(batch), training)
    yield _steps(net, net.step(own, hyper, head, batch), derived, hyper, experiment, samples)
    sends = experiment.method == own.name and own.statistic is not ClassMeans and bool(own.statistic.FIELDS)
    keeps = "prototypes" in own.global_rows or own.has_personal_head
    yield from _summed(own.statistic.FIELDS, net, samples, passes=keeps + sends, unit=own.unit_features)


def _untrained(own: Method, experiment: Experiment, net: Network, samples: int) -> Iterator[Part]:
    hyper = own.resolve(experiment.hyper)
    yield _pass(net, samples, 1)
    yield _sums(method_calibration(own, samples, net.classes, net.width, hyper=hyper).device)


def _averaged(algorithm: type[Algorithm], experiment: Experiment, net: Network, samples: int) -> Iterator[Part]:
    settled, terms, batch = algorithm.resolve(experiment.hyper), algorithm.costed_terms(), experiment.batch
    head, use = _HEADS[algorithm.head]
    stands = METHODS[algorithm.objective if algorithm.objective in METHODS else DEFAULT]
    hyper = {name: settled.get(name, option.default) for name, option in stands.hyper.items()}
    if terms == ("cross-entropy",):
        hyper["lambda"] = 0.0  # without the pull to prototypes
    elif terms != stands.loss:
        expected = f"those of {stands.name}, or cross-entropy"
        raise MethodError(f"{algorithm.name}: loss_terms", expected=expected, got=", ".join(terms))
    unit = algorithm.head in ("frozen", "normalised")
    training = Training(
        algorithm.name, net.classes, use, terms, lambda name: stands.update_of(name, hyper), use == "trained", unit
    )
    derived, exported = training_step(net.forward_at(batch), training), net.step(stands, hyper, head, batch)
    if ops := RULES[str(settled["base"])].correction_ops:
        derived, exported = _corrected(derived, ops), _corrected(exported, ops)
    yield _steps(net, exported, derived, settled, experiment, samples)
    if algorithm.statistic is not None:
        yield from _summed(algorithm.statistic.FIELDS, net, samples, passes=1, unit=unit)


def _corrected(step: Workload, ops: int) -> Workload:
    """The step with the rule's correction: `ops` operations on each trained number, and one more tensor for each."""
    layers, tensors = list(step.layers), dict(step.tensors)
    for trained in [tensor for tensor in step.tensors.values() if tensor.role == "parameter"]:
        correction = Tensor(f"told.{trained.name}", trained.shape, "buffer")
        tensors[correction.name] = correction
        name, reads = f"{trained.name}:correction", (trained.name, correction.name)
        layers.append(
            Layer(name, "Add", "elementwise", "update", reads, (trained.name,), vector_ops=ops * trained.elements)
        )
    return replace(step, layers=tuple(layers), tensors=tensors)


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(
    net: Network,
    exported: Workload,
    derived: Workload,
    hyper: Mapping[str, Value],
    experiment: Experiment,
    samples: int,
) -> Part:
    times = int(hyper["epochs"]) * -(-samples // experiment.batch)
    return Part("training", exported, times, derived, net.inference)


def _pass(net: Network, samples: int, times: int) -> Part:
    """The features of all samples, in blocks."""
    block = min(BLOCK_SAMPLES, samples)
    return Part("features", fold_weights(net.forward_at(block)), times * samples / block)


def _sums(workload: Workload) -> Part:
    return Part("statistic", workload, 1, sums=True)


def _summed(fields: Sequence[Field], net: Network, samples: int, *, passes: int, unit: bool) -> Iterator[Part]:
    if passes:
        yield _pass(net, samples, passes)
        yield _sums(statistic_work(fields or ClassMeans.FIELDS, samples, net.classes, net.width, unit=unit))


def _closing(name: str, net: Network, samples: int) -> Iterator[Part]:
    yield _pass(net, samples, 1)
    if name == "ccvr":
        yield _sums(ccvr(samples, net.classes, net.width).device)
    else:
        yield _sums(method_calibration(closing_method(), samples, net.classes, net.width).device)
