"""Decisions on whatever arrives: standing, content, chunks, and that nothing hostile raises."""

from __future__ import annotations

import dataclasses
import hashlib
import time

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, RUN, WIDTH, contribution, gram, means
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.ingest import ingest as ingest_module
from protofleet.aggregator.ingest.ingest import Decision, Ingest, View, largest_contribution_bytes
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.contract.wire.chunks import in_bitmap, split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Chunk, ClassRows, Contribution
from protofleet.contract.wire.sampling import sampled

VIEW = View(RUN, BUNDLE, CLASSES, WIDTH, round=1, method="fedproto", open=True)
FFC = dataclasses.replace(VIEW, method="ffc")


def _ingest(held: set[tuple[int, str, str]] | None = None) -> Ingest:
    return Ingest(lambda *key: key in (held or set()))


def _everyone(device: str) -> bool:
    return True


def _decide(message: object, view: View = VIEW, ingest: Ingest | None = None, device: str = "d1") -> Decision:
    payload = message if isinstance(message, bytes) else encode(message, "f64")
    return (ingest or _ingest()).decide(device, payload, view, now=0.0)


def test_a_good_contribution_is_accepted_with_its_bytes_as_they_came() -> None:
    payload = encode(contribution(), "f16")
    decision = _decide(payload)
    assert decision.outcome == decision.receipt.status == "committed"
    assert (decision.accepted.payload, decision.accepted.received_bytes) == (payload, len(payload))
    assert (decision.accepted.round, decision.accepted.method, decision.accepted.device) == (1, "fedproto", "d1")


def test_ffc_sums_are_accepted_in_an_ffc_round() -> None:
    for encoding in ("f64", "f32", "f16"):
        assert _decide(encode(contribution(gram(), method="ffc"), encoding), FFC).outcome == "committed"


def test_a_duplicate_is_seen_in_the_store_and_within_a_batch() -> None:
    assert _decide(contribution(), ingest=_ingest({(1, "fedproto", "d1")})).outcome == "duplicate"
    ingest = _ingest()
    assert [_decide(contribution(), ingest=ingest).outcome for _ in range(2)] == ["committed", "duplicate"]
    assert _decide(contribution(), ingest=ingest, device="d2").outcome == "committed"


def test_a_committed_contribution_of_a_closed_round_is_a_duplicate_and_another_is_late() -> None:
    ingest = _ingest({(1, "fedproto", "d1")})
    closed = dataclasses.replace(VIEW, open=False)
    later = dataclasses.replace(VIEW, round=4)
    for view in (closed, later):
        assert _decide(contribution(), view, ingest).outcome == "duplicate"
        assert _decide(contribution(), view, ingest, "d2").outcome == "late"


@pytest.mark.parametrize(
    ("message", "view", "reason"),
    [
        (contribution(run=b"old!"), VIEW, "of run"),
        (contribution(round=2), VIEW, "round 2 is not open"),
        (contribution(method="ffc"), VIEW, "runs fedproto, not ffc"),
        (contribution(bundle=bytes(32)), VIEW, "bundle, expected sha256 00010203"),
        (contribution(ClassMeans.from_means(np.ones((3, 5)), [1, 1, 1])), VIEW, "width 5"),
        (contribution(ClassMeans.from_means(np.ones((4, 4)), [1, 1, 1, 1])), VIEW, "class 3"),
        (
            contribution(ClassMeans.from_means(np.full((3, 4), 1e30), [1, 1, 1])),
            VIEW,
            "of at most 1.01e+06, got 2e+30",
        ),
        (contribution(gram()), VIEW, "expected class-means, got another statistic"),
        (contribution(means(), method="ffc"), FFC, "expected feature-gram, got another statistic"),
    ],
)
def test_what_does_not_fit_the_round_is_rejected_with_its_reason(
    message: Contribution, view: View, reason: str
) -> None:
    decision = _decide(message, view)
    assert decision.outcome == decision.receipt.status == "rejected"
    assert reason in decision.receipt.reason
    assert (decision.receipt.run, decision.receipt.round) == (message.run, message.round)
    assert decision.accepted is None


@pytest.mark.parametrize("what", ["gram", "cross", "trace", "empty"])
def test_sums_that_no_unit_features_can_have_are_rejected(what: str) -> None:
    good = gram()
    triangle, cross = good.gram.copy(), good.cross.copy()
    if what == "gram":
        triangle[1] = 31.0
    elif what == "cross":
        cross[0] *= 1e6
    elif what == "trace":
        triangle *= 3.0
    else:
        triangle *= 1e-9
    rows = ClassRows(np.arange(CLASSES, dtype=np.uint16), cross)
    forged = Contribution(RUN, 1, "ffc", BUNDLE[:4], rows, good.counts.astype(np.uint64), triangle)
    decision = _decide(forged, FFC)
    assert decision.outcome == "rejected"
    assert ("cross" if what == "cross" else "gram") in decision.receipt.reason


def test_a_device_that_was_not_sampled_is_rejected() -> None:
    view = dataclasses.replace(VIEW, fraction=0.5, seed=9)
    for device in (f"d{i}" for i in range(20)):
        expected = "committed" if sampled(device, 1, 9, 0.5) else "rejected"
        assert _decide(contribution(), view, device=device).outcome == expected


def test_garbage_is_answered_with_a_digest_that_no_good_contribution_has() -> None:
    """Anyone may have sent it: the answer is for the open round, and only for whoever sent these very bytes."""
    announcement = encode(Announcement(RUN, 0, "open", "fedproto", BUNDLE))
    for payload, reason in (
        (b"", "CBOR"),
        (b"\xff" * 40, "CBOR"),
        (announcement, "expected a contribution, got announcement"),
        (bytes(70_000), "at most 65536 bytes"),
    ):
        decision = _decide(payload)
        assert (decision.outcome, decision.round) == ("malformed", 0)
        assert reason in decision.reason
        receipt = decision.receipt
        assert (receipt.run, receipt.round, receipt.method, receipt.status) == (RUN, 1, "fedproto", "rejected")
        assert receipt.digest == hashlib.sha256(payload).digest()[:8]


def test_garbage_before_the_first_round_gets_no_receipt_since_none_can_name_a_round() -> None:
    decision = _decide(b"garbage", dataclasses.replace(VIEW, round=0, open=False))
    assert (decision.outcome, decision.receipt) == ("malformed", None)


def test_a_contribution_made_for_a_larger_limit_is_taken_whole() -> None:
    """A restart with a smaller limit must not strand what a device holds already."""
    statistic = ClassMeans.from_means(np.ones((CLASSES, 400)), [1, 2, 3])
    view = dataclasses.replace(VIEW, width=400, limit_bytes=1024)
    payload = encode(contribution(statistic), "f64")
    assert len(payload) > 4 * view.limit_bytes
    assert _decide(payload, view).outcome == "committed"


def _chunks(limit_bytes: int = 1024, view: View = FFC) -> tuple[bytes, list[bytes], View]:
    width = 40
    rng = np.random.default_rng(0)
    z = rng.normal(size=(50, width))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    whole = encode(contribution(FeatureGram.of(z, rng.integers(0, CLASSES, 50), CLASSES), method="ffc"), "f64")
    made = split(whole, limit_bytes, run=RUN, round=1, method="ffc")
    return whole, [encode(chunk) for chunk in made], dataclasses.replace(view, width=width)


@given(st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_chunks_in_any_order_any_number_of_times_make_one_contribution(random: object) -> None:
    whole, chunks, view = _chunks()
    sent = chunks + random.choices(chunks, k=4)
    random.shuffle(sent)
    ingest = _ingest()
    made = [ingest.decide("d1", payload, view, 0.0) for payload in sent]
    accepted = [d.accepted for d in made if d.accepted]
    assert [a.payload for a in accepted] == [whole]
    first = next(i for i, d in enumerate(made) if d.accepted)
    assert accepted[0].received_bytes == sum(len(p) for p in sent[: first + 1])
    assert all(d.outcome == "duplicate" for d in made[first + 1 :])


def test_a_lost_chunk_is_asked_for_when_the_last_one_comes() -> None:
    whole, chunks, view = _chunks()
    ingest = _ingest()
    for index, payload in enumerate(chunks[:-1]):
        if index != 2:
            assert ingest.decide("d1", payload, view, 0.0).outcome == "partial"
    asked = ingest.decide("d1", chunks[-1], view, 0.0)
    assert asked.outcome == "need-chunks"
    assert [i for i in range(len(chunks)) if in_bitmap(i, asked.receipt.missing)] == [2]
    done = ingest.decide("d1", chunks[2], view, 0.0)
    assert done.outcome == "committed"
    assert done.accepted.payload == whole


def test_a_stall_asks_for_what_is_missing_and_not_again_at_once() -> None:
    _, chunks, view = _chunks()
    ingest = _ingest()
    ingest.decide("d1", chunks[0], view, now=0.0)
    assert ingest.stalled(4.9, view, _everyone) == []
    (asked,) = ingest.stalled(5.0, view, _everyone)
    assert (asked.device, asked.outcome) == ("d1", "need-chunks")
    assert not in_bitmap(0, asked.receipt.missing)
    assert in_bitmap(1, asked.receipt.missing)
    assert ingest.stalled(10.0, view, _everyone) == []
    assert len(ingest.stalled(15.0, view, _everyone)) == 1


def test_a_day_of_silence_is_asked_about_a_few_times_and_not_at_all_when_offline() -> None:
    _, chunks, view = _chunks()
    ingest = _ingest()
    ingest.decide("d1", chunks[0], view, now=0.0)
    offline = [ingest.stalled(float(second), view, lambda device: False) for second in range(0, 86_400, 5)]
    assert not any(offline)
    assert sum(len(ingest.stalled(float(second), view, _everyone)) for second in range(0, 86_400, 5)) == 6
    ingest.decide("d1", chunks[1], view, now=90_000.0)  # it speaks again, so it is worth asking again
    assert len(ingest.stalled(90_005.0, view, _everyone)) == 1


@pytest.mark.parametrize("change", [{"open": False}, {"round": 2}])
def test_chunks_of_a_round_that_is_not_open_are_dropped_and_not_asked_for(change: dict[str, object]) -> None:
    _, chunks, view = _chunks()
    ingest = _ingest()
    ingest.decide("d1", chunks[0], view, now=0.0)
    assert ingest.assembler.held_bytes > 0
    assert ingest.stalled(60.0, dataclasses.replace(view, **change), _everyone) == []
    assert (ingest.assembler.held_bytes, len(ingest.assembler)) == (0, 0)


@pytest.mark.parametrize("wrong", ["digest", "length"])
def test_a_wrong_hash_or_length_is_asked_for_once_more_and_then_rejected_with_a_reason(wrong: str) -> None:
    _, chunks, view = _chunks()
    decoded = [decode(chunk) for chunk in chunks]
    if wrong == "digest":
        sent = [dataclasses.replace(chunk, digest=bytes(8)) for chunk in decoded]
    else:
        sent = [dataclasses.replace(chunk, total_bytes=chunk.total_bytes - 100) for chunk in decoded]
    ingest, outcomes, reason = _ingest(), [], ""
    for _ in range(2):
        for chunk in sent:
            decision = ingest.decide("d1", encode(chunk), view, 0.0)
            if decision.outcome not in ("partial",):
                outcomes.append(decision.outcome)
                reason = decision.receipt.reason
                assert decision.outcome != "rejected" or decision.receipt.digest == chunk.digest
    assert outcomes[0] == "need-chunks"
    assert "rejected" in outcomes
    assert ("digest" in reason) if wrong == "digest" else ("bytes" in reason)


def test_a_chunk_costs_the_same_however_many_there_are() -> None:
    """What is missing was listed for each of them: 2.4 ms for 600 bytes, from anybody who likes to keep us busy."""
    view = dataclasses.replace(FFC, width=1280)
    total = 12_000 * 512
    sent = [encode(Chunk(RUN, 1, "ffc", index, 12_000, total, bytes(8), bytes(512))) for index in range(1_000)]
    ingest, began_s = _ingest(), time.thread_time()  # this thread's own, however busy the machine; 0.1 s
    assert {ingest.decide("d1", payload, view, 0.0).outcome for payload in sent} == {"partial"}
    assert time.thread_time() - began_s < 1.0


def test_a_damaged_chunk_makes_all_of_them_be_sent_again() -> None:
    whole, chunks, view = _chunks()
    forged = split(bytes(len(whole)), 1024, run=RUN, round=1, method="ffc")[0]
    true_digest = split(whole, 1024, run=RUN, round=1, method="ffc")[0].digest
    ingest = _ingest()
    ingest.decide("d1", encode(dataclasses.replace(forged, digest=true_digest)), view, 0.0)
    last = [ingest.decide("d1", payload, view, 0.0) for payload in chunks[1:]][-1]
    assert last.outcome == "need-chunks"
    assert all(in_bitmap(i, last.receipt.missing) for i in range(len(chunks)))
    assert [ingest.decide("d1", payload, view, 0.0).outcome for payload in chunks][-1] == "committed"


def test_chunks_of_something_else_or_of_too_much_are_rejected() -> None:
    _, _, view = _chunks()
    inner = encode(contribution(means(), round=1, method="fedproto"))
    for payload in (inner, b"no contribution at all" * 40):
        ingest = _ingest()
        made = [ingest.decide("d1", encode(c), view, 0.0) for c in split(payload, 600, run=RUN, round=1, method="ffc")]
        assert made[-1].outcome == "rejected"
    huge = Chunk(RUN, 1, "ffc", 0, 9, largest_contribution_bytes(view) + 1, bytes(8), bytes(600))
    assert "at most" in _decide(huge, view).receipt.reason
    dust = Chunk(RUN, 1, "ffc", 0, 60_000, 8_000, bytes(8), b"x")
    assert "chunks of less than" in _decide(dust, view).receipt.reason
    alien = Chunk(b"old!", 1, "ffc", 0, 2, 2000, bytes(8), bytes(600))
    assert _decide(alien, view).outcome == "rejected"


def test_contributions_in_progress_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_module, "MAX_IN_PROGRESS", 8)
    _, chunks, view = _chunks()
    ingest = _ingest()
    for i in range(100):
        ingest.decide(f"d{i}", chunks[0], view, now=float(i))
    waiting = [d.device for d in ingest.stalled(1e6, view, _everyone)]
    assert waiting == [f"d{i}" for i in range(92, 100)]
    assert ingest.assembler.missing("d0", "ffc") is None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise(data: st.DataObject) -> None:
    """Mutations of good messages, and pure noise: every one ends in a decision, and never in an acceptance of a
    contribution that the store could not merge."""
    _, chunks, view = _chunks()
    seeds = [encode(contribution(), "f32"), encode(contribution(gram(), method="ffc"), "f64"), chunks[0]]
    payload = bytearray(data.draw(st.sampled_from(seeds)))
    for _ in range(data.draw(st.integers(0, 6))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    payload = bytes(payload[:cut] if data.draw(st.booleans()) else payload) + data.draw(st.binary(max_size=4))
    for at in (VIEW, FFC, view):
        decision = _ingest().decide("d1", payload, at, 0.0)
        assert decision.outcome in ("committed", "late", "rejected", "malformed", "partial", "need-chunks")
        assert (decision.accepted is not None) == (decision.outcome == "committed")
