"""The client's side: mods that answer our strategy's messages, and let every other message through.

- `method_mod` is for the app's own model. Where the method trains, the app's train function runs first. Then the mod
  summarises the model's features. Arrays in the train function's reply are dropped.
- `bundle_mod` is for one of our bundles. The device's own core trains and summarises, on stock ONNX Runtime.

A refusal is a reply with one line as its error and no traceback. The ServerApp logs that line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import BundleError, DataError, DivergedError, ProtofleetError, UsageError
from protofleet.contract.wire.messages import Contribution
from protofleet.contract.wire.topics import check_device
from protofleet.edge_client.data import UNLABELLED, LocalData
from protofleet.edge_client.device.device import Device
from protofleet.flower.learned import Learned
from protofleet.flower.records import Reply, Task, extractor_id
from protofleet.flower.samples import Samples, statistic_of

__all__ = ["bundle_mod", "method_mod", "no_training", "received"]

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]
Summarise = Callable[[Task, Message, Context], Contribution]

_SECRET, _WEIGHTS = "protofleet.secret", "protofleet.weights"  # in the client's context, which stays on it
_REFUSED = 6  # flwr's ErrorCode.MOD_FAILED_PRECONDITION
_EXAMPLES = "num-examples"


def received(message: Message) -> Learned:
    """The result of the rounds so far, read from a train or evaluate message of `MethodStrategy`.

    Raises:
        WireError: the message is of another strategy, or incomplete.
        ProtofleetError: the method is not installed here.
    """
    task = Task.read(message.content)
    if task is None:
        raise DataError("a message", expected="one of MethodStrategy", got="another strategy's")
    return Learned(task.method, task.hyper, task.classes, task.width, task.state)


def no_training(message: Message, context: Context) -> Message:
    """A train function that does nothing, for apps whose mod does all. Flower asks for one in every ClientApp."""
    return Message(RecordDict(), reply_to=message)


def method_mod(
    samples: Callable[[Message, Context], Samples],
    *,
    extractor: str = "",
    methods: Collection[str] | None = None,
    min_samples: int = 1,
) -> Mod:
    """A mod that sends a method's statistic of features instead of weights.

    For a method that trains (FedProto, FedPR, FedHP, FedHKD) the app's own train function is called first. `received`
    gives it the global prototypes. Only the single numbers in the metrics of its reply are kept.

    Args:
        samples: called with the message and the context. Returns the client's samples, as features of its model.
        extractor: names the shared extractor, as `MethodStrategy(extractor=…)` does. A server that asks for another one
            is refused. Where the server sends the extractor's arrays, they identify it instead.
        methods: names of the methods that this client takes part in; None for any.
        min_samples: classes with fewer samples are withheld, also where the server's own limit is lower.

    Returns:
        for `ClientApp(mods=[…])`.
    """

    def summarise(task: Task, message: Message, context: Context) -> Contribution:
        if task.announcement.extractor:
            _check_extractor(task, message, extractor)
        given = samples(message, context)
        if not isinstance(given, Samples):
            raise DataError("what the mod was given", expected="Samples", got=type(given).__name__)
        a = task.announcement
        return Contribution.of(
            statistic_of(given, task, _secret(context)),
            run=a.run,
            round=a.round,
            method=a.method,
            bundle=a.bundle,
            extractor=a.extractor,
        )

    return _mod(summarise, _Terms(False, methods, min_samples))


def bundle_mod(
    bundle: str | os.PathLike[str],
    data: Callable[[Context], tuple[NDArray[np.uint8], NDArray[np.integer]]],
    *,
    threads: int = 1,
    methods: Collection[str] | None = None,
    min_samples: int = 1,
) -> Mod:
    """A mod that is one of our devices: it trains and summarises with a bundle's graphs, and needs no torch.

    The trained weights stay in the client's context between the messages of a run.

    Args:
        bundle: a file: the bundle of `MethodStrategy.of_bundle`, or another bundle of the same fleet.
        data: returns this client's images (N, H, W, c) uint8 in the bundle's shape, and class numbers (N,).
        threads: number of threads within an operator.
        methods, min_samples: as for `method_mod`.

    Returns:
        for `ClientApp(mods=[…])`. Our messages never call the app's train function.
    """
    read: list[Bundle] = []

    def summarise(task: Task, message: Message, context: Context) -> Contribution:
        if not read:
            read.append(read_bundle(bundle))
        loaded = read[0]
        _check_bundle(task, loaded)
        device = Device(
            loaded,
            _images(loaded, data(context)),
            check_device(_name(context) or f"node-{context.node_id}"),
            threads=threads,
            secret=_secret(context),
        )
        if _WEIGHTS in context.state:
            device.restore({name: array.numpy() for name, array in context.state.array_records[_WEIGHTS].items()})
        try:
            done = device.run_round(task.announcement, task.state)
        except DivergedError:
            return device.sit_out(task.announcement).contribution
        if device.state():
            context.state[_WEIGHTS] = ArrayRecord({name: Array(value) for name, value in device.state().items()})
        return done.contribution

    return _mod(summarise, _Terms(True, methods, min_samples))


@dataclass(frozen=True)
class _Terms:
    """What the owner of a client allows, and whether the mod trains or the app does."""

    trains_itself: bool
    methods: Collection[str] | None
    min_samples: int

    def hold(self, task: Task) -> Task:
        """The task within the limits that the owner sets.

        Raises:
            UsageError: the owner does not allow this method.
        """
        if self.methods is not None and task.method.name not in self.methods:
            own = ", ".join(self.methods) or "no method"
            raise UsageError(
                "the round's method", expected=f"what this client takes part in: {own}", got=task.method.name
            )
        a = task.announcement
        return replace(task, announcement=replace(a, min_samples=max(a.min_samples, self.min_samples)))


def _mod(summarise: Summarise, terms: _Terms) -> Mod:
    def mod(message: Message, context: Context, call_next: Next) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        try:
            task = Task.read(message.content)
            if task is None:
                return call_next(message, context)
            task, metrics = terms.hold(task), {}
            if task.method.trains and not terms.trains_itself:
                trained = call_next(message, context)
                if trained.has_error():
                    return trained
                metrics = _numbers(trained.content)
            contribution = summarise(task, message, context)
        except ProtofleetError as error:
            return Message(Error(_REFUSED, str(error)), reply_to=message)
        content = Reply(_name(context), contribution).content(task.announcement.encoding)
        if metrics:
            content["metrics"] = MetricRecord({_EXAMPLES: contribution.samples, **metrics})
        return Message(content, reply_to=message)

    return mod


def _numbers(content: RecordDict) -> dict[str, int | float]:
    """The single numbers of all metrics. Lists are left out: they could hold anything."""
    numbers: dict[str, Any] = {}
    for record in content.metric_records.values():
        numbers |= {name: value for name, value in record.items() if not isinstance(value, list)}
    return numbers


def _name(context: Context) -> str:
    """The number of the client's partition, empty if it has none. It outlasts a run and orders the contributions."""
    return str(context.node_config.get("partition-id", ""))


def _secret(context: Context) -> bytes:
    if _SECRET not in context.state:
        context.state[_SECRET] = ConfigRecord({"key": os.urandom(32)})
    return bytes(context.state.config_records[_SECRET]["key"])  # type: ignore[arg-type]


def _check_extractor(task: Task, message: Message, named: str) -> None:
    sent: Mapping[str, ArrayRecord] = message.content.array_records
    mine = extractor_id(next(iter(sent.values())) if sent else named)
    if mine != task.announcement.extractor:
        got = "the arrays that came" if sent else f"extractor={named!r}"
        raise DataError(
            "extractor", expected="the one that the server names", got=got, hint="the same name on either side"
        )


def _check_bundle(task: Task, bundle: Bundle) -> None:
    a = task.announcement
    mine, wanted = (bundle.extractor(task.method), a.extractor) if a.extractor else (bundle.sha256, a.bundle)
    if mine != wanted:
        what = "extractor of the bundle" if a.extractor else "bundle"
        raise BundleError(what, expected=f"sha256 {wanted[:4].hex()}…, as the server's", got=f"{mine[:4].hex()}…")


def _images(bundle: Bundle, given: object) -> LocalData:
    if not (isinstance(given, tuple) and len(given) == 2):
        raise DataError("data of a client", expected="(images, labels)", got=type(given).__name__)
    shape, (x, y) = tuple(bundle.manifest.input_shape), map(np.asarray, given)
    if x.dtype != np.uint8 or x.shape[1:] != shape or y.ndim != 1 or len(x) != len(y) or y.dtype.kind not in "iu":
        wanted = f"images uint8 (N, {', '.join(map(str, shape))}) and class numbers (N,)"
        raise DataError("data of a client", expected=wanted, got=f"{x.dtype} {x.shape} and {y.dtype} {y.shape}")
    if len(y) and not UNLABELLED <= y.min() <= y.max() < bundle.manifest.classes:
        expected = f"0 to {bundle.manifest.classes - 1}, or {UNLABELLED} for none"
        raise DataError("labels", expected=expected, got=f"{y.min()} to {y.max()}")
    return LocalData(x, y.astype(np.int64))
