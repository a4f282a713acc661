"""What one device computes in a run of the lab, as workloads of the cost models (`hw_profiles/workload`).

In a round, by what the method or the algorithm says of itself:

    training     so many steps, the rule's correction among them: the graph that is exported for devices, as `profile`
                 has it; on an array the step that is derived layer by layer, as `cost` has it
    features     a pass over all its samples, for what it sends and for the class means by which it answers; a second
                 one where what it sends is not made of these means
    statistic    what is summed of the features

After the last round a closing, where the accuracy is that of a closed form or of CCVR: a pass and the sums. What the
server computes is none of a device's, and so is not here. Nor are reading and decoding images, noise, encoding,
sending, and what is done to weights once a round.

An algorithm that averages weights is no method of the wire, but its clients' loss is one's, or cross-entropy, which is
FedProto's without the pull: that graph stands for its own. One that does not say what its loss consists of is a
MethodError; so every method of `lab list` is known here, by its class alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from contract.errors import MethodError
from contract.methods import DEFAULT, METHODS, Head, Method, Value, closing_method, method
from contract.statistics import ClassMeans, Field
from edge_client.extractor import BLOCK_SAMPLES
from export.backbones import find_backbone
from export.build import load_dynamo
from export.features import export_features
from export.graphs import export_step
from export.step import Preprocess, plan_step
from hw_profiles.workload.baselines import ccvr, features_width
from hw_profiles.workload.calibration_step import method_calibration, statistic_work
from hw_profiles.workload.fold import fold_weights
from hw_profiles.workload.from_onnx import read_workload
from hw_profiles.workload.model import Layer, Role, Tensor, Workload
from hw_profiles.workload.training import HeadUse, Training, method_training
from hw_profiles.workload.training_step import training_step
from lab.algorithms import ALGORITHMS, RULES
from lab.algorithms.base import Algorithm
from lab.engine.experiment import Experiment

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
    """A workload that is run so many times; `on_array` instead of it where layers are costed one by one."""

    name: str
    workload: Workload
    times: float
    on_array: Workload | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """What a device computes: in each of `rounds`, and once after the last.

    Attributes:
        rounds: that a device takes part in; a fraction where only some are sampled.
    """

    round: tuple[Part, ...]
    closing: tuple[Part, ...]
    rounds: float


class Network:
    """A backbone as devices have it, for C classes: its graphs, exported once each. It needs no weights.

    Args:
        input_shape: (H, W, c).

    Raises:
        UsageError, ExportError: no such backbone, or one that cannot be exported for such images.
    """

    def __init__(self, backbone: str, input_shape: tuple[int, int, int], classes: int) -> None:
        load_dynamo()
        self.classes, self._name, self._shape = classes, backbone, input_shape
        self._found = find_backbone(backbone, input_shape)
        self._preprocess = Preprocess(self._found.mean, self._found.std)
        first = method(DEFAULT)
        plan = plan_step(self._found.net, first, first.settle({}), first.heads[0], classes, self.width)
        self._features = export_features(self._found.net, self._preprocess, plan.state, input_shape, unit=False)
        self._roles = {each.name: _ROLES.get(each.role, "buffer") for each in plan.state}
        self._forward: dict[int, Workload] = {}
        self._steps: dict[tuple[object, ...], Workload] = {}

    @property
    def width(self) -> int:
        """D."""
        return self._found.width

    def forward_at(self, batch: int) -> Workload:
        """The features graph at batch B."""
        if batch not in self._forward:
            graph = read_workload(self._features, name=self._name, batch=batch, roles=self._roles)
            assert features_width(graph) == self.width
            self._forward[batch] = graph
        return self._forward[batch]

    def step(self, found: Method, hyper: Mapping[str, Value], head: Head, batch: int) -> Workload:
        """The training step that is exported of a method; `hyper` is settled."""
        objective = (found.objective, found.name if found.state(2, 2, seed=0) else "", *sorted(hyper.items()))
        key = (*objective, head, batch)
        if key not in self._steps:
            plan = plan_step(self._found.net, found, hyper, head, self.classes, self.width)
            graph = export_step(self._found.net, self._preprocess, plan, batch, self._shape)
            roles = {each.name: _ROLES.get(each.role, "buffer") for each in plan.state}
            name = f"{self._name} {found.name}"
            self._steps[key] = read_workload(graph, name=name, roles=roles, step_inputs=plan.inputs)
        return self._steps[key]


@lru_cache(maxsize=4)
def network(backbone: str, input_shape: tuple[int, int, int], classes: int) -> Network:
    """As `Network`, which takes seconds, once for each."""
    return Network(backbone, input_shape, classes)


def device_work(experiment: Experiment, way: str, net: Network, samples: int) -> Work:
    """What a device with N samples does in this run.

    Args:
        way: by which the accuracy answers: `linear` and `ccvr` are those of a closing, where the run has one.

    Raises:
        MethodError: a method or an algorithm that does not say what its loss consists of.
    """
    algorithm = ALGORITHMS.get(experiment.method)
    rounds = experiment.course.rounds * experiment.course.fraction
    wanted = [name for name, its in (("ffc", "linear"), ("ccvr", "ccvr")) if its == way and _has(experiment, name)]
    closing = tuple(part for name in wanted for part in _closing(name, net, samples))
    if algorithm is not None:
        return Work(tuple(_averaged(algorithm, experiment, net, samples)), closing, rounds)
    found = method(DEFAULT if experiment.method == "local" else experiment.method)
    if not found.trains:
        return Work(tuple(_untrained(found, experiment, net, samples)), (), rounds)
    return Work(tuple(_trained(found, experiment, net, samples)), closing, rounds)


def _has(experiment: Experiment, closing: str) -> bool:
    return closing in experiment.measures.closings or (closing == "ffc" and experiment.course.calibrate)


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _trained(found: Method, experiment: Experiment, net: Network, samples: int) -> Iterator[Part]:
    """A method of the wire that trains; `local`, which sends nothing, knows its class means, too."""
    hyper, batch = found.settle(experiment.hyper), experiment.batch
    head: Head = "frozen" if experiment.head == "frozen" else found.heads[0]
    if not found.loss:
        raise MethodError(f"{found.name}: loss", expected="what its loss consists of", got="none")
    training = method_training(found, net.classes, net.width, hyper=hyper, head=head)
    derived = training_step(net.forward_at(batch), training)
    yield _steps(net.step(found, hyper, head, batch), derived, hyper, experiment, samples)
    sends = experiment.method == found.name and found.statistic is not ClassMeans and bool(found.statistic.FIELDS)
    keeps = "prototypes" in found.global_rows or found.has_personal_head
    yield from _summed(found.statistic.FIELDS, net, samples, passes=keeps + sends, unit=found.unit_features)


def _untrained(found: Method, experiment: Experiment, net: Network, samples: int) -> Iterator[Part]:
    hyper = found.settle(experiment.hyper)
    yield _pass(net, samples, 1)
    yield Part("statistic", method_calibration(found, samples, net.classes, net.width, hyper=hyper).device, 1)


def _averaged(algorithm: type[Algorithm], experiment: Experiment, net: Network, samples: int) -> Iterator[Part]:
    settled, terms, batch = algorithm.settle(experiment.hyper), algorithm.costed_terms(), experiment.batch
    head, use = _HEADS[algorithm.head]
    stands = METHODS[algorithm.objective if algorithm.objective in METHODS else DEFAULT]
    hyper = {name: settled.get(name, each.default) for name, each in stands.hyper.items()}
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
    yield _steps(exported, derived, settled, experiment, samples)
    if algorithm.statistic is not None:
        yield from _summed(algorithm.statistic.FIELDS, net, samples, passes=1, unit=unit)


def _corrected(step: Workload, ops: int) -> Workload:
    """The step with its rule's share: so many operations on each trained number, with one more that the rule holds."""
    layers, tensors = list(step.layers), dict(step.tensors)
    for trained in [each for each in step.tensors.values() if each.role == "parameter"]:
        held = Tensor(f"told.{trained.name}", trained.shape, "buffer")
        tensors[held.name] = held
        name, reads = f"{trained.name}:correction", (trained.name, held.name)
        layers.append(
            Layer(name, "Add", "elementwise", "update", reads, (trained.name,), vector_ops=ops * trained.elements)
        )
    return replace(step, layers=tuple(layers), tensors=tensors)


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(
    exported: Workload, derived: Workload, hyper: Mapping[str, Value], experiment: Experiment, samples: int
) -> Part:
    return Part("training", exported, int(hyper["epochs"]) * -(-samples // experiment.batch), derived)


def _pass(net: Network, samples: int, times: int) -> Part:
    """Features of all its samples, in blocks."""
    block = min(BLOCK_SAMPLES, samples)
    return Part("features", fold_weights(net.forward_at(block)), times * samples / block)


def _summed(fields: Sequence[Field], net: Network, samples: int, *, passes: int, unit: bool) -> Iterator[Part]:
    if passes:
        yield _pass(net, samples, passes)
        yield Part(
            "statistic", statistic_work(fields or ClassMeans.FIELDS, samples, net.classes, net.width, unit=unit), 1
        )


def _closing(name: str, net: Network, samples: int) -> Iterator[Part]:
    yield _pass(net, samples, 1)
    if name == "ccvr":
        yield Part("statistic", ccvr(samples, net.classes, net.width).device, 1)
    else:
        yield Part("statistic", method_calibration(closing_method(), samples, net.classes, net.width).device, 1)
