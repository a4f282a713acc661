"""The device where sums stand: what it sends when, what receipts do, and how it takes itself out."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import Embedded
from edge_peer import FLEET, Peer
from edge_samples import RUN, announcement, fashion, rounds_done, sums_of
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import BundleError, LinkError, MethodError, UsageError
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.samples import sample_keys
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.journal.standing_journal import GENERATIONS_KEPT
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle, activated
from protofleet.edge_client.rollout.rollout_file import RolloutFile
from protofleet.edge_client.run import withdrawal
from protofleet.edge_client.run.withdrawal import withdraw
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.standing.generations import REFUSED_WAIT_S
from protofleet.edge_client.standing.sample_choice import choose, separated
from protofleet.edge_client.standing.standing_sums import is_complete
from protofleet.export.bundles.extend import extend_bundle

# ── what is sent ────────────────────────────────────────────────────────────────────────────────────────────────────

keys = st.lists(st.builds(lambda number, name: b"%016d%02d" % (number, name), st.integers(0, 6), st.integers(0, 2)))


def by_class(found: Counter[bytes]) -> Counter[bytes]:
    counts: Counter[bytes] = Counter()
    for key, times in found.items():
        counts[key[16:]] += times
    return counts


@given(states=st.lists(keys, min_size=1, max_size=5), least=st.integers(1, 4))
def test_between_two_sums_each_class_differs_by_no_sample_or_by_enough(states: list[list[bytes]], least: int) -> None:
    """However the samples of a device come and go; and what is sent is of samples that are there."""
    sent: list[bytes] | None = None
    for here in states:
        choice = choose(here, sent, least)
        small = any(0 < size < least for size in by_class(Counter(sent or ()) - Counter(here)).values())
        if choice.rows is None:
            assert sent is not None
            assert least > 1 or Counter(here) == Counter(sent) or small
            continue
        chosen = [key for key, taken in zip(here, choice.rows, strict=True) if taken]
        assert tuple(chosen) == choice.keys
        now, before = Counter(chosen), Counter(sent or ())
        changed = by_class(now - before) + by_class(before - now)
        assert all(size >= least for size in changed.values())
        assert all(size >= least for size in by_class(now).values())
        if least == 1:
            assert now == Counter(here)
        sent = chosen


def test_what_is_too_little_waits_and_what_is_gone_holds_everything_back() -> None:
    a, b = [b"a%015d00" % n for n in range(8)], [b"b%015d01" % n for n in range(8)]
    sent = a[:4] + b[:4]
    more = choose(a[:5] + b[:7], sent, 3)
    assert (set(more.keys), more.waiting) == (set(a[:4] + b[:7]), 1)
    assert choose(a[1:4] + b[:7], sent, 3).rows is None
    assert set(choose(a[1:7] + b[:7], sent, 3).keys) == set(a[1:7] + b[:7])
    gone = choose(a[:2] + b[:4], sent, 3)  # too few are left of the class: it goes whole
    assert set(gone.keys) == set(b[:4])
    assert choose(sent, sent, 3).rows is None
    assert choose([], None, 3).keys == ()
    assert (choose(a[:3] + b[:2], None, 3).keys, choose(a[:3] + b[:2], None, 3).waiting) == (tuple(a[:3]), 2)


# ── a device that sends it ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def path(mnist_like_bundle: Callable[..., Path]) -> Path:
    return mnist_like_bundle("ncm")


@pytest.fixture(scope="module")
def bundle(path: Path) -> Bundle:
    return read_bundle(path)


def journal(folder: Path, bundle: Bundle) -> Journal:
    return Journal(folder / "state", fleet=FLEET, device="pi-1", bundle=bundle.sha256)


def standing(bundle: Bundle, **fields: object) -> Announcement:
    return announcement(bundle, 0, phase="standing", extractor=bytes(32), **fields)


def test_generations_rise_through_receipts_restarts_and_lost_state(bundle: Bundle, tmp_path: Path) -> None:
    few, more = fashion(bundle, 20, (0, 1)), fashion(bundle, 24, (0, 1))
    a = standing(bundle)
    with journal(tmp_path, bundle) as kept:
        sums = sums_of(Device(bundle, few, "pi-1"), kept)
        made = sums.make(a, 1, 0.0)
        sent = decode(made.payload)
        assert isinstance(sent, Contribution)
        assert (sent.round, sent.standing, sent.samples) == (1, "present", 20)
        assert sums.make(a, 1, 1.0) is None
        sums.take_receipt(Receipt(RUN, 1, "ncm", "committed"), 2.0)
        asked: list[str] = []
        kept.standing._db.set_trace_callback(asked.append)
        for now_s in (3.0, 4.0, 5.0):
            assert sums.make(a, 1, now_s) is None
        kept.standing._db.set_trace_callback(None)
        assert asked
        assert not any("SELECT samples FROM" in each for each in asked)  # 18 bytes a photo, and there is no news
        assert sums.waits_for() == "sums 1 stand: waiting for photos to change"
    with journal(tmp_path, bundle) as kept:  # the same photos, in another order, are no news
        shuffled = LocalData(few.x[::-1], few.y[::-1])
        assert sums_of(Device(bundle, shuffled, "pi-1"), kept).make(a, 2, 0.0) is None
        sums = sums_of(Device(bundle, more, "pi-1"), kept)
        made = sums.make(a, 2, 0.0)
        assert (made.report.key[1], made.older, [p.key[1] for p in kept.pending()]) == (2, [(RUN, 1, "ncm")], [2])
        assert made.line.startswith("sums 2 (ncm): 24 samples, ")
        sums.take_receipt(Receipt(RUN, 1, "ncm", "late", held=9), 1.0)  # of an older one: of no effect
        assert sums.make(a, 2, 2.0) is None
        sums.take_receipt(Receipt(RUN, 2, "ncm", "late", held=7), 3.0)  # another state directory was further
        assert sums.make(a, 2, 4.0).report.key[1] == 8
        sums.take_receipt(Receipt(RUN, 8, "ncm", "rejected", "it was forgotten"), 5.0)
        assert sums.make(a, 2, 5.0 + REFUSED_WAIT_S - 1) is None
        assert sums.waits_for() == "refused by the aggregator: waiting to be admitted again"
        assert sums.make(a, 2, 5.0 + REFUSED_WAIT_S).report.key[1] == 9
        assert sums.make(standing(bundle, run=b"run2"), 2, 9e9).report.key[1] == 1
        with pytest.raises(MethodError, match="expected one whose sums can stand, got fedcof"):
            sums.make(standing(bundle, run=b"run3", method="fedcof"), 2, 9e9)


def forgets(method: str, bundle: Bundle, folder: Path) -> tuple[Journal, Announcement]:
    """Sums of classes 0 and 1 that stand, of a device with a journal that is open."""
    kept = journal(folder, bundle)
    data = fashion(bundle, 20, (0, 1))
    sums = sums_of(Device(bundle, data, "pi-1"), kept)
    a = standing(bundle, method=method, min_samples=3)
    sums.make(a, 1, 0.0)
    sums.take_receipt(Receipt(RUN, 1, method, "committed"), 1.0)
    assert sums.make(a, 1, 2.0) is None
    return sums, kept, a


def test_where_the_aggregator_takes_rows_out_a_device_sends_nothing_until_they_may_come_again(
    bundle: Bundle, tmp_path: Path
) -> None:
    sums, kept, a = forgets("ncm", bundle, tmp_path)
    with kept:
        without = dataclasses.replace(a, withheld=(1,))
        assert [sums.make(without, 1, now_s) for now_s in (3.0, 4.0)] == [None, None]
        assert sums.waits_for().startswith("sums 1 stand, 12 samples of forgotten classes stay here: waiting")
        assert {key[16:] for key in separated(kept.standing.samples(RUN))} == {b"\x00\x00"}
        again = decode(sums.make(a, 1, 5.0).payload)
        assert (again.round, list(again.body.classes)) == (2, [0, 1])


def test_what_was_summed_with_a_forgotten_class_is_sent_again_without_it(bundle: Bundle, tmp_path: Path) -> None:
    sums, kept, a = forgets("ffc", bundle, tmp_path)
    with kept:
        without = dataclasses.replace(a, withheld=(1,))
        again = decode(sums.make(without, 1, 3.0).payload)
        assert (again.round, list(again.body.classes)) == (2, [0])
        sums.take_receipt(Receipt(RUN, 2, "ffc", "committed"), 4.0)
        assert sums.make(without, 1, 5.0) is None
        sums.take_receipt(Receipt(RUN, 2, "ffc", "rejected"), 6.0)
        assert sums.make(without, 1, 7.0) is None
        more = decode(sums.make(dataclasses.replace(a, withheld=(0,)), 1, 8.0).payload)  # at once, since that changed
        assert (more.round, list(more.body.classes)) == (3, [1])


def test_a_removal_that_waits_does_not_hold_back_what_must_be_sent_again() -> None:
    a, b = [b"%016d\x00\x00" % n for n in range(4)], [b"%016d\x00\x01" % n for n in range(4)]
    assert choose(a[:3], a + b, 2, withheld=(1,)).rows is None
    assert choose(a[:3], a + b, 2, withheld=(1,), again=True).keys == tuple(a[:3])


def test_in_rounds_samples_of_a_forgotten_class_stay_at_home(bundle: Bundle) -> None:
    device = Device(bundle, fashion(bundle, 20, (0, 1)), "pi-1")
    for name in ("ncm", "fedcof", "ffc"):
        told = announcement(bundle, 1, method=name, extractor=bytes(32), withheld=(1,))
        sent = device.run_round(told, None).contribution
        assert set(sent.body.classes.tolist()) == {0}


def test_an_admitted_device_sends_at_once_what_was_forgotten(bundle: Bundle, tmp_path: Path) -> None:
    a = standing(bundle)
    with journal(tmp_path, bundle) as kept:
        sums = sums_of(Device(bundle, fashion(bundle, 20, (0, 1)), "pi-1"), kept)
        sums.make(a, 1, 0.0)
        sums.take_receipt(Receipt(RUN, 1, "ncm", "committed"), 1.0)
        assert sums.make(a, 1, 1.0) is None
        sums.take_receipt(Receipt(RUN, 1, "ncm", "rejected", "it was forgotten"), 2.0)
        assert sums.make(a, 1, 3.0) is None
        sums.take_receipt(Receipt(RUN, 1, "ncm", "late", held=1), 4.0)
        assert sums.make(a, 1, 5.0).report.key[1] == 2
        sums.take_receipt(Receipt(RUN, 2, "ncm", "rejected", "it was forgotten"), 6.0)
        sums.take_receipt(Receipt(RUN, 1, "ncm", "late", held=1), 7.0)  # the aggregator never held the second
        assert sums.make(a, 1, 8.0).report.key[1] == 3


def test_a_withdrawal_on_its_way_is_not_overtaken_by_sums(bundle: Bundle, tmp_path: Path) -> None:
    """The command found no aggregator, and the service starts its client again before the second try."""
    a, withdrawn = standing(bundle), {"samples": None, "payload": b"gone", "limit_bytes": 1024}
    with journal(tmp_path, bundle) as kept:
        sums = sums_of(Device(bundle, fashion(bundle, 20, (0, 1)), "pi-1"), kept)
        sums.make(a, 1, 0.0)
        kept.standing.commit((RUN, 2, "ncm"), metrics={"withdrawn": True}, **withdrawn)
        assert sums.make(a, 2, 1.0) is None
        assert sums.waits_for() == "waiting for the receipt of this device's withdrawal"
        assert [p.payload for p in kept.pending()] == [b"gone"]
        kept.record_receipt(Receipt(RUN, 2, "ncm", "committed"), 4)
        assert sums.make(a, 2, 2.0).report.key[1] == 3


def test_a_newer_generation_takes_the_place_of_what_waits_in_its_run_and_old_lines_go(
    bundle: Bundle, tmp_path: Path
) -> None:
    other = b"run2"
    with journal(tmp_path, bundle) as kept:

        def made(number: int, run: bytes = RUN, samples: bytes | None = b"") -> None:
            told = {} if samples is not None else {"withdrawn": True}
            kept.standing.commit((run, number, "ncm"), samples=samples, payload=b"sums", limit_bytes=1024, metrics=told)

        made(1)
        kept.record_receipt(Receipt(RUN, 1, "ncm", "committed"), 4)
        made(1, other)
        made(2)
        assert kept.standing.pending(RUN) == [(RUN, 2, "ncm")]
        made(3)
        assert [pending.key for pending in kept.pending()] == [(other, 1, "ncm"), (RUN, 3, "ncm")]
        assert (kept.outcome((RUN, 1, "ncm")), kept.outcome((RUN, 2, "ncm"))) == (("committed", 4), ("late", 0))
        payloads = dict(kept._db.execute("SELECT round, payload FROM contributions WHERE run = ?", (RUN,)))
        assert payloads == {1: b"sums", 2: None, 3: b"sums"}
        assert [report.key for report in kept.unreported()] == [(other, 1, "ncm"), (RUN, 3, "ncm")]
        for number in range(4, GENERATIONS_KEPT + 3):
            made(number)
        assert rounds_done(kept) == GENERATIONS_KEPT + 1
        made(GENERATIONS_KEPT + 3, samples=None)  # a withdrawal is no line of the history
        assert [report.key for report in kept.unreported()] == [(other, 1, "ncm")]
        assert (kept.standing.withdraws(RUN), kept.standing.withdraws(other)) == (True, False)


def test_above_the_highest_number_nothing_is_sent_and_that_is_said(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path
) -> None:
    with journal(tmp_path, bundle) as kept:
        for run in (RUN, peer.run):
            kept.standing.commit((run, 1, "ncm"), samples=b"", payload=b"sums", limit_bytes=1024, metrics={})
            kept.standing.unsent(run, 2**32 - 1)
            kept.record_receipt(Receipt(run, 1, "ncm", "late"), 4)
        sums = sums_of(Device(bundle, fashion(bundle, 20, (0, 1)), "pi-1"), kept)
        assert sums.make(standing(bundle), 1, 0.0) is None
        assert sums.waits_for().endswith("no higher number is left, give this device another --id")
    peer.announce(0, "ncm", "standing")
    with pytest.raises(UsageError, match="above which there is no number, try protofleet forget"):
        withdraw(settings(path, peer, tmp_path))


def test_a_person_is_told_what_is_held_back(bundle: Bundle, tmp_path: Path) -> None:
    data, a = fashion(bundle, 24, (0, 1)), standing(bundle, min_samples=5)
    with journal(tmp_path, bundle) as kept:
        fewer = LocalData(data.x[:-1], data.y[:-1])
        assert sums_of(Device(bundle, data, "pi-1"), kept).make(a, 1, 0.0) is not None
        sums = sums_of(Device(bundle, fewer, "pi-1"), kept)
        assert sums.make(a, 1, 1.0) is None
        assert sums.make(a, 1, 2.0) is None
        assert sums.waits_for().startswith("sums 1 stand, 1 changes are too few of their class to be told")
        assert sums.make(standing(bundle), 1, 3.0).report.key[1] == 2  # the fleet asks for fewer


def test_what_waits_is_not_taken_for_sent(bundle: Bundle, tmp_path: Path) -> None:
    many, rare = fashion(bundle, 20, (0, 1)), fashion(bundle, 5, (2,))

    def held(count: int) -> LocalData:
        return LocalData(np.concatenate([many.x, rare.x[:count]]), np.concatenate([many.y, rare.y[:count]]))

    device = Device(bundle, held(2), "pi-1")
    with journal(tmp_path, bundle) as kept:
        sums = sums_of(device, kept)
        made = sums.make(standing(bundle, min_samples=5), 1, 0.0)
        assert (made.report.metrics["samples"], made.line[-37:]) == (20, ", 2 wait until there are 5 of a class")
        device.hold(held(5))
        assert sums.make(standing(bundle, min_samples=5), 1, 1.0).report.metrics["samples"] == 25


def test_photos_that_change_while_it_runs_are_seen(bundle: Bundle, tmp_path: Path) -> None:
    data, a = fashion(bundle, 24, (0, 1)), standing(bundle)
    device = Device(bundle, LocalData(data.x[:20], data.y[:20]), "pi-1")
    with journal(tmp_path, bundle) as kept:
        sums = sums_of(device, kept)
        assert sums.make(a, 1, 0.0).report.metrics["samples"] == 20
        assert sums.make(a, 1, 1.0) is None
        device.hold(data)
        assert sums.make(a, 1, 2.0).report.metrics["samples"] == 24


def test_sums_of_chosen_samples_are_those_of_a_device_that_holds_no_others(bundle: Bundle) -> None:
    data = fashion(bundle, 40, (0, 1, 2))
    rows = np.arange(len(data)) % 3 > 0
    chosen = Device(bundle, data, "pi-1").stand(standing(bundle), 5, rows).contribution
    alone = Device(bundle, LocalData(data.x[rows], data.y[rows]), "pi-1")
    whole = alone.stand(standing(bundle), 5, np.ones(rows.sum(), bool)).contribution
    np.testing.assert_array_equal(chosen.counts, whole.counts)
    np.testing.assert_allclose(chosen.body.rows, whole.body.rows, rtol=1e-6, atol=1e-7)  # batches are cut elsewhere
    assert len(set(sample_keys(data))) == len(data)
    corrected = LocalData(data.x, (data.y + 1) % 3)  # the same photos under other labels are other samples
    assert not set(sample_keys(data)) & set(sample_keys(corrected))


def test_a_generation_is_over_when_it_is_answered_and_came_back(bundle: Bundle, tmp_path: Path) -> None:
    from protofleet.contract.wire.global_state import GlobalState

    with journal(tmp_path, bundle) as kept:
        report = sums_of(Device(bundle, fashion(bundle, 20, (0, 1)), "pi-1"), kept).make(
            standing(bundle, global_version=4), 1, 0.0
        ).report  # fmt: skip
    assert not is_complete(report, None, None)
    assert not is_complete(report, ("committed", 1), GlobalState(RUN, 4, 4))
    assert not is_complete(report, ("duplicate", 1), GlobalState(RUN, 4, 4))
    assert is_complete(report, ("committed", 1), GlobalState(RUN, 5, 5))
    assert is_complete(report, ("rejected", 1), None)


# ── --withdraw ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def peer(bundle: Bundle) -> Iterator[Peer]:
    broker = Embedded()
    broker.start()
    with Peer(broker.url, bundle) as made:
        made.url = broker.url  # type: ignore[attr-defined]
        yield made
    broker.stop()


def settings(path: Path, peer: Peer, folder: Path, **changed: object) -> ClientSettings:
    told = {"bundle": str(path), "broker": peer.url, "id": "pi-1", "state": str(folder / "state"), "withdraw": True}
    return read_settings(ClientSettings, {**told, "patience": 10.0, **changed})


def test_a_withdrawal_is_numbered_above_what_was_sent_and_above_what_is_held(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path, said: list[str]
) -> None:
    with journal(tmp_path, bundle) as kept:
        kept.standing.commit((peer.run, 3, "ncm"), samples=b"", payload=b"sums", limit_bytes=1024, metrics={})
    thread = threading.Thread(target=withdraw, args=(settings(path, peer, tmp_path),))
    thread.start()
    peer.announce(0, "ncm", "standing")
    assert peer.contribution(4).standing == "withdrawn"
    peer.announce(0, "ncm", "standing")  # once more: it goes on with what it has begun
    peer.answer(3, "ncm")  # of the sums before: nothing is withdrawn yet
    peer.answer(4, "ncm", "late", held=11)
    assert peer.contribution(12).standing == "withdrawn"
    peer.answer(12, "ncm")
    thread.join(20)
    assert not thread.is_alive()
    assert said[-1].startswith("withdrawn: nothing of this device")
    with journal(tmp_path, bundle) as kept:
        assert kept.pending() == []
        assert kept.standing.newest(peer.run) == (12, False)


def test_a_withdrawal_is_sent_again_and_begins_anew_in_another_run(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withdrawal, "_AGAIN_S", 0.05)
    thread = threading.Thread(target=withdraw, args=(settings(path, peer, tmp_path),))
    thread.start()
    for run in (b"old1", b"new1"):
        peer.run = run
        peer.announce(0, "ncm", "standing")
        for _ in range(2):  # without an answer
            assert peer.contribution(1).standing == "withdrawn"
        peer.publish(topics.round_(FLEET), b"noise")  # which is skipped
    peer.answer(1, "ncm", "duplicate")  # the first receipt was lost
    thread.join(20)
    assert not thread.is_alive()


def test_a_device_of_a_bundle_that_has_grown_since_can_withdraw(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path
) -> None:
    journal(tmp_path, bundle).close()
    extend_bundle(path, ["a class more"], tmp_path / "longer.bundle")
    peer.announce(1, "ncm", "open")
    with pytest.raises(UsageError, match="a fleet whose sums stand"):  # which it asks only with its state in hand
        withdraw(settings(path, peer, tmp_path, bundle=str(tmp_path / "longer.bundle")))


def test_a_device_that_a_roll_out_took_to_another_fleet_withdraws_from_both(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path, said: list[str]
) -> None:
    """Also where nobody serves the other one."""
    told, sha256 = settings(path, peer, tmp_path, patience=1.0), bundle.sha256
    away = InstalledBundle(sha256.hex(), 1, "away", "fleets/away-00000000")
    with RolloutFile(Path(told.state), make=True) as file:
        file.keep(path, sha256.hex())
        file.change(activated, away, InstalledBundle(sha256.hex(), 1, FLEET))
    with Journal(Path(told.state), fleet=FLEET, device="pi-1", bundle=sha256) as kept:
        kept.standing.commit((peer.run, 4, "ncm"), samples=b"", payload=b"sums", limit_bytes=1024, metrics={})
    peer.announce(0, "ncm", "standing")
    threading.Timer(0.0, lambda: (peer.contribution(5), peer.answer(5, "ncm"))).start()
    with pytest.raises(LinkError, match="got no announcement"):
        withdraw(told)
    assert said[-1].startswith(f"withdrawn: nothing of this device is in fleet {FLEET}'s sums any more")


def test_a_withdrawal_trusts_no_bundle_that_somebody_else_signed(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    with pytest.raises(BundleError, match="sign"):
        withdraw(settings(path, peer, tmp_path, trust=str(tmp_path / "key"), patience=0.1))


@pytest.mark.parametrize(
    ("phase", "answer", "error", "words"),
    [
        (
            "open",
            None,
            UsageError,
            "a fleet whose sums stand, got one with rounds .ncm., try protofleet forget",
        ),
        (
            "standing",
            None,
            LinkError,
            "got no receipt, so NOT yet withdrawn, try the same command again: the withdrawal is kept",
        ),
        ("standing", "rejected", LinkError, "got refused: it was forgotten"),
        (None, None, LinkError, "got no announcement, so NOT yet withdrawn, try starting its aggregator"),
    ],
)
def test_a_withdrawal_that_nobody_takes_says_why(
    path: Path, bundle: Bundle, peer: Peer, tmp_path: Path, phase: str, answer: str, error: type, words: str
) -> None:
    if phase is not None:
        peer.announce(0 if phase == "standing" else 1, "ncm", phase)
    if answer is not None:
        threading.Timer(
            0.0, lambda: (peer.contribution(1), peer.answer(1, "ncm", answer, reason="it was forgotten"))
        ).start()
    with pytest.raises(error, match=words):
        withdraw(settings(path, peer, tmp_path, patience=10.0 if answer else 1.0))
