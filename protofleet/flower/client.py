"""The client's side: mods that answer our strategy's messages, and let every other message through.

`method_mod` is for a model of one's own: the app's train function runs first where the method trains, and then its
model's features are summarised; whatever arrays it replied are dropped. `bundle_mod` is for one of our bundles: the
device's own core trains and summarises, on stock ONNX Runtime.

A refusal is a reply with one line as its error, which the ServerApp logs, and no traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from contract.bundle import Bundle, read_bundle
from contract.errors import BundleError, DataError, DivergedError, ProtofleetError, UsageError
from contract.messages import Contribution
from contract.topics import check_device
from edge_client.data import UNLABELLED, LocalData
from edge_client.device import Device
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
    """What has come of the rounds so far, of a train or evaluate message of `MethodStrategy`.

    Raises:
        WireError: a message of another strategy, or one that is not whole.
        ProtofleetError: a method that is not installed here.
    """
    task = Task.read(message.content)
    if task is None:
        raise DataError("a message", expected="one of MethodStrategy", got="another strategy's")
    return Learned(task.method, task.hyper, task.classes, task.width, task.state)


def no_training(message: Message, context: Context) -> Message:
    """A train function for apps whose mod alone answers: Flower asks for one in every ClientApp."""
    return Message(RecordDict(), reply_to=message)


def method_mod(
    samples: Callable[[Message, Context], Samples],
    *,
    extractor: str = "",
    methods: Collection[str] | None = None,
    min_samples: int = 1,
) -> Mod:
    """A mod that sends what a method says of features, in place of weights.

    For a method that trains (FedProto, FedPR, FedHP, FedHKD) the app's own train function is called first; `received`
    gives it the global prototypes. Of its reply the single numbers of its metrics are kept, and nothing else.

    Args:
        samples: called then, with the message and the context: the client's samples by the features of its model.
        extractor: names the shared extractor, as `MethodStrategy(extractor=…)` does: a server that asks for another is
            refused. Where the server sends the extractor's arrays along, they stand for it instead.
        methods: names of those that this client takes part in, whatever the server asks for; None for any.
        min_samples: classes of which it has fewer are withheld, also where the server asks for less.

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
    """A mod that is a device of ours: it trains and summarises with a bundle's graphs, and needs no torch.

    What it trains stays in the client's context, between the messages of a run.

    Args:
        bundle: file, the same as, or of one fleet with, that of `MethodStrategy.of_bundle`.
        data: images (N, H, W, c) uint8 of the bundle's shape, and class numbers (N,), of this client.
        threads: within an operator.
        methods, min_samples: as of `method_mod`.

    Returns:
        for `ClientApp(mods=[…])`; the app's train function is never called by our messages.
    """
    read: list[Bundle] = []

    def summarise(task: Task, message: Message, context: Context) -> Contribution:
        if not read:
            read.append(read_bundle(bundle))
        found = read[0]
        _check_bundle(task, found)
        device = Device(
            found,
            _images(found, data(context)),
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
    """What a client's owner lets out, and whether the mod trains itself or the app does."""

    trains_itself: bool
    methods: Collection[str] | None
    min_samples: int

    def hold(self, task: Task) -> Task:
        """The task as the owner lets it be done.

        Raises:
            UsageError: not at all.
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
    """The single numbers of all metrics; lists could be anything."""
    found: dict[str, Any] = {}
    for record in content.metric_records.values():
        found |= {name: value for name, value in record.items() if not isinstance(value, list)}
    return found


def _name(context: Context) -> str:
    """What outlasts a run, and puts contributions in order: the number of the client's partition, if it has one."""
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
