"""Devices that publish any bytes on any topic: the aggregator's ingest decides on all of them, and never fails.

An input is a list of messages, each with the topic that it came on; also frozen ones, from which a few bytes differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from aggregator_samples import BUNDLE, CLASSES, RUN, WIDTH, contribution, gram, means

from protofleet.aggregator.ingest.broken_message import tie
from protofleet.aggregator.ingest.ingest import Decision, Ingest, View
from protofleet.aggregator.ingest.validation import Terms
from protofleet.aggregator.store.records import StandingMark
from protofleet.contract.errors import WireError
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire import topics
from protofleet.contract.wire.chunks import Assembler, split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution
from tests.attacks.choices import Choices

LONGEST_BYTES = 4096
_ROUNDS = View(RUN, BUNDLE, CLASSES, WIDTH, round=2, method="fedproto", open=True)
_REFUSED = dataclasses.replace(_ROUNDS, refusal=lambda device: "no" if device == "c" else "")
VIEWS = (
    _ROUNDS,
    dataclasses.replace(_ROUNDS, method="ffc"),
    dataclasses.replace(_ROUNDS, method="fedcof"),
    dataclasses.replace(_ROUNDS, open=False, fraction=0.5, seed=3),
    dataclasses.replace(_REFUSED, terms=Terms("f64", 5, 100, withheld=(1,))),
    dataclasses.replace(
        _ROUNDS, method="ncm", held=lambda device: StandingMark(3, bytes(8)), terms=Terms(standing=True)
    ),
    dataclasses.replace(_ROUNDS, round=0, open=False),
)
TOPICS = tuple(topics.up("fleet", device) for device in "abc")


def run(data: bytes) -> None:
    choices = Choices(data)
    view, now = choices.one_of(VIEWS), 0.0
    committed: set[tuple[int, str, str]] = set()
    ingest = Ingest(lambda *key: key in committed, Assembler(capacity_bytes=1 << 16))
    while choices:
        now += choices.below(8)
        try:
            device = topics.device_of(choices.one_of((*TOPICS, choices.text())))
        except WireError:
            continue
        payload = _payload(choices)
        decision = ingest.decide(device, payload, view, now)
        _check(decision, device, view, committed)
        if choices.below(4) == 0:  # a batch ends
            ingest.forget_accepted()
            for asked in ingest.stalled(now, view, lambda each: each != "b"):
                _check(asked, asked.device, view, committed)
    assert ingest.assembler.held_bytes <= 1 << 16


def _payload(choices: Choices) -> bytes:
    """Bytes as they are, or a good message of which a few are others."""
    if choices.chance():
        return choices.block()
    payload = bytearray(choices.one_of(good_messages()))
    for _ in range(choices.below(4)):
        payload[choices.below(len(payload))] = choices.number()
    return bytes(payload)


@functools.cache
def good_messages() -> tuple[bytes, ...]:
    """Contributions that these views take, and chunks of them."""
    made = [contribution(round=2), contribution(means(1), round=2, method="ncm", bundle=BUNDLE)]
    made += [contribution(gram(), round=2, method="ffc"), contribution(round=1)]
    made += [dataclasses.replace(made[1], standing="present", round=4)]
    made += [Contribution.withdrawal(run=RUN, round=3, method="ncm", bundle=BUNDLE)]
    whole = [encode(message, encoding) for message in made for encoding in ("f64", "f16", "int8")]
    chunks = [
        encode(chunk)
        for message in made[:3]
        for chunk in split(encode(message, "f64"), 200, run=RUN, round=2, method=message.method)
    ]
    return (*whole, *chunks)


def _check(decision: Decision, device: str, view: View, committed: set[tuple[int, str, str]]) -> None:
    assert decision.device == device
    if decision.receipt is not None:
        assert decode(encode(decision.receipt)) == decision.receipt
        assert decision.receipt.digest, "an answer that names nothing could end another contribution"
    accepted = decision.accepted
    assert (accepted is not None) == (decision.outcome == "committed")
    if accepted is None:
        return
    key = (accepted.round, accepted.method, accepted.device)
    assert view.held is not None or key not in committed, "counted twice"
    committed.add(key)
    assert (accepted.method, accepted.device) == (view.method, device)
    assert view.held is not None or (accepted.round == view.round and view.open)
    kept = decode(accepted.payload)
    assert isinstance(kept, Contribution)
    if kept.standing != "withdrawn":  # what is committed can be merged
        method = method_of(view.method)
        statistic, hyper = kept.statistic(method.statistic, view.classes, view.width), method.resolve({})
        merged = method.merge(lambda: iter([statistic]), "mean", hyper)
        rows = method.next_rows({}, merged, hyper)
        for part in GlobalState(RUN, 1, 2, rows).parts(1 << 16):
            decode(encode(part, "f64"))


def seeds() -> Iterable[bytes]:
    for view in range(len(VIEWS)):
        for number in range(len(good_messages())):
            yield bytes([view, 1, 0, 0, 0, number, 0, 0] * 2)
    for payload in good_messages():
        assert tie(payload) is not None
        yield bytes([0, 0, 0, 0, 1]) + len(payload).to_bytes(2, "little") + payload + b"\0"
