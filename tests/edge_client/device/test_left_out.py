"""A device that a round left out: what it keeps of that, over restarts and old words, and what it answers by."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from edge_samples import announcement, fashion, graphs_of, releases

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.console.logs import told
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import UsageError
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.joint_heads import joint_kind, kind_and_members
from protofleet.contract.wire.messages import Announcement, Receipt
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.answers.predictor import Predictor
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.evaluation import JOINT, OWN, Heads
from protofleet.edge_client.device.left_out import LeftOut
from protofleet.edge_client.journal.journal import Journal, read_kept
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.policy import Policy, read_policy
from protofleet.edge_client.rounds.round_follower import Follower, Task
from protofleet.edge_client.run.round_work import Line, Own, RoundWork
from protofleet.lab.demo.shipped import BUNDLE

ALL = tuple(range(10))
WHY = "what it calls Bag is like what others call Shirt: contradicted by 7 of 9 devices"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


def inverted(data: LocalData) -> LocalData:
    return LocalData(255 - data.x, data.y)


def of_one(bundle: Bundle, data: LocalData, version: int, number: int, run: bytes) -> GlobalState:
    """What a fleet of a device with these samples is given."""
    device = Device(bundle, data, "other", graphs=graphs_of(bundle))
    device.left_out = "ffc"
    state = device.own_state()
    assert state is not None
    return replace(state, run=run, version=version, round=number)


@dataclass
class Here:
    """A device at work, and what it says."""

    bundle: Bundle
    device: Device
    journal: Journal
    follower: Follower
    work: RoundWork
    said: list[str]

    def take_part(self, number: int, run: bytes = b"run1", *, receipt: bool = True) -> None:
        a = replace(announcement(self.bundle, number), run=run, global_version=0)
        self.follower.announced(a)
        self.work.take_part(Task(a, GlobalState(run, 0, 0)))
        if receipt:
            self.journal.record_receipt(Receipt(run, number, "ffc", "committed"), 100)

    def come_back(self, state: GlobalState) -> None:
        """The round's global state is here; then the device does what is to be done."""
        a: Announcement = replace(
            announcement(self.bundle, state.round), run=state.run, phase="closed", global_version=state.version
        )
        self.follower.announced(a)
        for part in state.parts(60_000):
            self.follower.part(part)
        self.journal.keep_global(state)
        if self.work.unreported is not None:
            self.work.report(self.work.unreported)
        while self.work.compare():
            pass

    def hear(self, number: int, *, counts: bool, run: bytes = b"run1") -> None:
        self.work.judged(Receipt(run, number, "ffc", "duplicate", counts=counts, why="" if counts else WHY))


@contextmanager
def at_work(folder: Path, bundle: Bundle, data: LocalData, test: LocalData | None) -> Iterator[Here]:
    device, said = Device(bundle, data, "pi-1", test=test, graphs=graphs_of(bundle)), list[str]()
    kept = Journal(folder, fleet="fleet", device="pi-1", bundle=bundle.sha256, bundle_path=BUNDLE)
    with kept as journal, told(said.append):
        follower = Follower("pi-1", bundle, is_done=journal.is_done, took_part=journal.took_part)
        work = RoundWork(
            Own(
                device,
                releases(folder, bundle),
                Blinding(bundle.manifest, fleet="fleet", device="pi-1"),
                photos="held-out photos",
            ),
            Line(journal, Outbox(random.Random(0)), follower, "pi-1", 1),
            manager=ServiceManager({}),
        )
        yield Here(bundle, device, journal, follower, work, said)


@pytest.fixture
def own(bundle: Bundle) -> tuple[LocalData, LocalData]:
    """Inverted photos, and some more that it holds out."""
    return inverted(fashion(bundle, 120, ALL)), inverted(fashion(bundle, 20, ALL, seed=5))


@pytest.fixture(scope="module")
def fleet(bundle: Bundle) -> GlobalState:
    return of_one(bundle, fashion(bundle, 200, ALL, seed=9), 1, 1, b"run1")


def sqlite_bytes() -> int:
    """What SQLite has of memory in this process."""
    maps = Path("/proc/self/maps")
    found = re.search(r"/\S*libsqlite3\S*\.so\S*", maps.read_text() if maps.exists() else "")
    if found is None:
        pytest.skip("SQLite is no library of its own here, and nobody tells what it has")
    used = ctypes.CDLL(found[0]).sqlite3_memory_used
    used.restype = ctypes.c_int64
    return int(used())


def test_what_the_journal_read_and_wrote_in_rounds_does_not_stay_in_memory(
    bundle: Bundle, own: tuple[LocalData, LocalData], tmp_path: Path
) -> None:
    """SQLite's cache of the journal would fill with what was sent: 38 kB in each round here, up to 1 MiB."""
    with at_work(tmp_path, bundle, *own) as here:
        here.take_part(1)
        before = sqlite_bytes()
        for receipt, numbers in ((True, range(2, 7)), (False, range(7, 12))):
            for number in numbers:
                here.take_part(number, receipt=receipt)
            assert sqlite_bytes() - before < 60_000, receipt


def test_the_word_may_come_before_the_state_or_after_it(
    bundle: Bundle, own: tuple[LocalData, LocalData], fleet: GlobalState, tmp_path: Path
) -> None:
    lines = set()
    for before in (True, False):
        with at_work(tmp_path / str(before), bundle, *own) as here:
            here.take_part(1)
            if before:
                here.hear(1, counts=False)
            here.come_back(fleet)
            if not before:
                assert not [line for line in here.said if "left this device" in line]
                here.hear(1, counts=False)
                here.come_back(fleet)
            here.hear(1, counts=False)  # again, as at each birth
            here.come_back(fleet)
            lines |= {line for line in here.said if "left this device" in line}
            found = here.journal.left_out()
            assert found is not None
            assert found.answers_alone
            assert sum("left this device" in line for line in here.said) == 1
    (line,) = lines
    assert line == (
        f"the fleet's aggregator left this device's round 1 out: {WHY}; it answers by its own head, right on "
        f"{found.own} of 20 held-out photos, the fleet's head on {found.fleet}"
    )


def test_what_it_tells_of_its_accuracy_is_that_of_its_answers(
    bundle: Bundle, own: tuple[LocalData, LocalData], fleet: GlobalState, tmp_path: Path
) -> None:
    shares = {}
    for counts in (True, False):
        with at_work(tmp_path / str(counts), bundle, *own) as here:
            here.take_part(1)
            here.hear(1, counts=counts)
            here.follower.announced(replace(announcement(bundle, 1), run=b"run1", phase="closed", global_version=1))
            for part in fleet.parts(60_000):
                here.follower.part(part)
            report = here.work.unreported
            assert report is not None
            told = here.work.report(report)
            assert told is not None
            shares[counts], found = told.all_classes, here.journal.left_out()
    assert found is not None
    assert shares == {True: found.fleet / 20, False: found.own / 20}


def test_its_answers_outlive_the_client_and_end_when_it_counts_again(
    bundle: Bundle, own: tuple[LocalData, LocalData], fleet: GlobalState, tmp_path: Path
) -> None:
    asked = inverted(fashion(bundle, 200, ALL, purpose="test"))

    def right() -> tuple[float, str]:
        found, known, _ = Knowledge.of_state(tmp_path)
        predictor = Predictor(found, known)
        return float((predictor(asked.x).classes == asked.y).mean()), f"{predictor.way_in_words}, {predictor.basis}"

    with at_work(tmp_path, bundle, *own) as here:
        here.take_part(1)
        here.come_back(fleet)
        by_fleet, _ = right()
        here.hear(1, counts=False)
        by_the_same, _ = right()
        here.come_back(fleet)
    by_own, basis = right()
    assert by_fleet == by_the_same < 0.3 < by_own
    assert basis.startswith("this device's own linear head (linear), ")
    assert "this device's own head, right on" in basis
    with at_work(tmp_path, bundle, *own) as here:
        assert here.device.left_out == "ffc"
        here.take_part(2)
        here.hear(2, counts=True)
        assert right()[0] == by_fleet
        assert read_kept(tmp_path).own is None
        here.come_back(replace(fleet, version=2, round=2))
        here.hear(1, counts=False)  # an old word, played back
        assert here.journal.left_out() is None


def test_a_tie_and_a_better_fleet_leave_it_as_it_is(bundle: Bundle, fleet: GlobalState, tmp_path: Path) -> None:
    data, test = fashion(bundle, 20, (0, 1)), fashion(bundle, 40, ALL, seed=3)
    with at_work(tmp_path, bundle, data, test) as here:
        here.take_part(1)
        here.hear(1, counts=False)
        here.come_back(fleet)
        found = here.journal.left_out()
        assert found is not None
        assert found.fleet > found.own
        end = f"the fleet's head, right on {found.fleet} of 40 held-out photos, its own on {found.own}"
        assert any(line.endswith(end) for line in here.said)
        assert read_kept(tmp_path).own is None
    assert not replace(found, own=found.fleet).answers_alone


def test_without_photos_held_out_it_says_so(
    bundle: Bundle, own: tuple[LocalData, LocalData], fleet: GlobalState, tmp_path: Path
) -> None:
    with at_work(tmp_path, bundle, own[0], None) as here:
        here.take_part(1)
        here.hear(1, counts=False)
        here.come_back(fleet)
        end = "it answers by the fleet's head: it has no held-out photos to compare its own with"
        assert any(line.endswith(end) for line in here.said)


def test_words_of_what_it_never_sent_and_of_older_rounds_change_nothing(
    bundle: Bundle, own: tuple[LocalData, LocalData], fleet: GlobalState, tmp_path: Path
) -> None:
    with at_work(tmp_path, bundle, *own) as here:
        here.take_part(1)
        here.take_part(2)
        here.hear(3, counts=False)
        here.hear(1, counts=False, run=b"run2")
        assert here.journal.left_out() is None
        here.hear(2, counts=False)
        here.hear(1, counts=True)
        here.hear(1, counts=False)
        found = here.journal.left_out()
        assert found is not None
        assert (found.round, found.why) == (2, WHY)


def test_another_run_that_takes_its_round_says_nothing_of_it_and_ends_it(
    bundle: Bundle, own: tuple[LocalData, LocalData], fleet: GlobalState, tmp_path: Path
) -> None:
    with at_work(tmp_path, bundle, *own) as here:
        here.take_part(1)
        here.hear(1, counts=False)
        here.come_back(fleet)
        assert here.journal.left_out() is not None
        here.take_part(1, run=b"run2")
        here.come_back(replace(fleet, run=b"run2"))
        assert here.journal.left_out() is None
        assert "run 72756e32 counts round 1 of this device: it answers by the fleet's head" in here.said


@pytest.mark.parametrize(
    "written", ["5", "{}", '{"run": 1, "round": 1, "method": "ffc", "why": ""}', "nonsense",
                '{"run": "", "round": 0, "method": "ffc", "why": ""}',
                '{"run": "", "round": 1, "method": "ffc", "why": "", "own": 4, "photos": 3}'],
)  # fmt: skip
def test_what_no_device_wrote_is_refused(written: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        LeftOut.read(written)


def test_what_is_kept_comes_back_as_it_was(bundle: Bundle, fleet: GlobalState, tmp_path: Path) -> None:
    found = LeftOut("72756e31", 4, "ffc", WHY, 20, 3, 11)
    with Journal(tmp_path, fleet="fleet", device="pi-1", bundle=bundle.sha256) as journal:
        journal.keep_left_out(found, fleet)
    kept = read_kept(tmp_path)
    assert kept.left_out == found == LeftOut.read(found.written())
    assert kept.own is not None
    assert kept.own.head is not None
    assert fleet.head is not None
    np.testing.assert_array_equal(kept.own.head.rows, fleet.head.rows)


def test_of_a_head_that_it_no_longer_answers_by_nothing_is_kept(
    bundle: Bundle, fleet: GlobalState, tmp_path: Path
) -> None:
    better, worse = (LeftOut("72756e31", 4, "ffc", WHY, 20, 8, own) for own in (11, 3))
    with Journal(tmp_path, fleet="fleet", device="pi-1", bundle=bundle.sha256) as journal:
        journal.keep_left_out(better, fleet, fleet)
        assert read_kept(tmp_path).own is not None
        journal.keep_left_out(worse)
        kept = read_kept(tmp_path)
        assert (kept.left_out, kept.own, journal.joint_head()) == (worse, None, None)


OF_ALL = "its head together with 2 others that agree with it"


def _allow(here: Here, folder: Path, bundle: Bundle) -> None:
    here.work._releases = releases(folder, bundle, Policy(joint_head=True))


def _given(here: Here, joint: GlobalState, number: int, run: bytes = b"run1") -> None:
    for part in replace(joint, run=run, version=number, round=number).parts(60_000):
        here.work.joint_part(part, 3)


def test_a_joint_head_is_answered_by_where_it_is_better_and_outlives_the_client(
    bundle: Bundle, fleet: GlobalState, tmp_path: Path
) -> None:
    few, test = inverted(fashion(bundle, 20, ALL)), inverted(fashion(bundle, 60, ALL, seed=5))
    joint = of_one(bundle, inverted(fashion(bundle, 600, ALL, seed=6)), 1, 1, b"run1")
    asked = inverted(fashion(bundle, 200, ALL, purpose="test"))
    right = {}
    for allowed in (False, True):
        with at_work(tmp_path / str(allowed), bundle, few, test) as here:
            if allowed:
                _allow(here, tmp_path / str(allowed), bundle)
            here.take_part(1)
            here.hear(1, counts=False)
            here.come_back(fleet)
            _given(here, joint, 2)  # of a round that nothing was heard of
            _given(here, joint, 1, run=b"run2")
            here.come_back(fleet)
            assert here.device.joint is None
            _given(here, joint, 1)
            here.come_back(fleet)
            found = here.journal.left_out()
            assert found is not None
            assert (found.answers_together, found.others) == ((True, 2) if allowed else (False, 0))
            assert any(OF_ALL in line for line in here.said) == allowed
        bundle_, known, _ = Knowledge.of_state(tmp_path / str(allowed))
        predictor = Predictor(bundle_, known)
        assert (OF_ALL[4:] in predictor.basis) == allowed
        assert "agree with it" not in Predictor(bundle_, known, way=predictor.way).basis  # which is the fleet's
        right[allowed] = float((predictor(asked.x).classes == asked.y).mean())
    assert right[True] > right[False] + 0.05
    with at_work(tmp_path / "True", bundle, few, test) as here:  # its owner allows it no more
        kept = read_kept(tmp_path / "True")  # from the start on, before the heads are compared again
        assert kept.left_out is not None
        assert (kept.left_out.leaves_fleet, kept.left_out.others, kept.own) == (False, 0, None)
        here.come_back(fleet)
        found = here.journal.left_out()
        assert found is not None
        assert (found.answers_alone, found.others, here.journal.joint_head()) == (True, 0, None)
    assert OF_ALL[4:] not in Predictor(*Knowledge.of_state(tmp_path / "True")[:2]).basis


@pytest.mark.parametrize(
    ("heads", "chosen"),
    [  # right of 25 photos: the fleet's head, its own, the joint one
        ((5, 5, 5), ""),
        ((4, 5, 0), OWN),
        ((5, 4, 5), ""),
        ((5, 9, 5), OWN),
        ((4, 4, 5), JOINT),
        ((4, 5, 6), JOINT),
        ((4, 8, 8), JOINT),
        ((4, 11, 8), JOINT),  # ahead by 3; a standard error is 3.4 photos
        ((4, 12, 8), OWN),
        ((22, 25, 24), JOINT),  # ahead by one photo; a standard error is 0.98
        ((22, 25, 23), OWN),
    ],
)
def test_the_joint_head_is_taken_unless_the_own_is_clearly_ahead(heads: tuple[int, int, int], chosen: str) -> None:
    assert Heads(25, *heads).best == chosen
    found = LeftOut("72756e31", 1, "ffc", WHY, 25, *heads, others=2)
    assert (found.answers_alone, found.answers_together) == (chosen == OWN, chosen == JOINT)
    without = replace(found, joint=0, others=0)
    assert (without.answers_alone, without.answers_together) == (heads[1] > heads[0], False)


def test_more_photos_tell_the_own_head_from_the_joint_one() -> None:
    assert [Heads(25 * times, 4 * times, 11 * times, 8 * times).best for times in (1, 2, 4)] == [JOINT, OWN, OWN]


def test_it_says_where_its_own_head_is_ahead_by_chance() -> None:
    found = LeftOut("72756e31", 1, "ffc", WHY, 25, 4, 9, 8, others=2)
    said = "right on 8 of 25 held-out photos, the fleet's head on 4, its own on 9"
    assert found.in_words().endswith(f"it answers by {OF_ALL}, {said}, which so few photos do not tell apart")
    assert "tell apart" not in replace(found, own=8).in_words()


@pytest.mark.parametrize("kind", ["head", "head of 2", "head of 1", "head of", "of 3"])
def test_rows_of_fewer_than_three_are_no_joint_head(kind: str) -> None:
    assert kind_and_members(kind) is None
    assert kind_and_members(joint_kind("head", 3)) == ("head", 3)


@pytest.mark.parametrize("beside", ["epsilon = 1.0\ndelta = 1e-6", "blinded = true"])
def test_no_leave_goes_with_what_compares_nobody(beside: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f"joint_head = true\n{beside}\n")
    with pytest.raises(UsageError, match="joint_head, expected neither epsilon nor blinded"):
        read_policy(str(file))
    file.write_text("joint_head = true\n")
    assert read_policy(str(file)).joint_head
    assert not Policy().joint_head
