"""What the fleet wants of a device, and who speaks under its name: the two pure parts of the client."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from contract_samples import small_parts

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import SecondProcessError, UsageError, WireError
from protofleet.contract.methods import method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, ClassRows, GlobalPart, Rival, Status
from protofleet.contract.wire.rollout_messages import APART
from protofleet.contract.wire.sampling import sampled
from protofleet.edge_client.journal.journal import Key
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.messages.status_message import Health
from protofleet.edge_client.rounds.round_follower import Follower

SHA, RUN, OTHER = bytes(32), b"run1", b"run2"
BUNDLE = Bundle(
    msgspec.structs.replace(small_parts()["manifest"], extractor=bytes(range(32)).hex()), SHA, b"features", None, {}
)
ME, THEM, EARLIER = b"instance", b"somebody", b"formerly"


def follower(done: set[Key] | None = None) -> Follower:
    done = set() if done is None else done
    return Follower("pi-1", BUNDLE, is_done=done.__contains__, took_part=lambda run: any(key[0] == run for key in done))


def announced(
    number: int = 1, phase: str = "open", *, run: bytes = RUN, bundle: bytes = SHA, **more: object
) -> Announcement:
    return Announcement(run=run, round=number, phase=phase, method="fedproto", bundle=bundle, **more)  # type: ignore[arg-type]


def parts(version: int, *, run: bytes = RUN, count: int = 3) -> list[GlobalPart]:
    rows = ClassRows(np.arange(6, dtype=np.uint16), np.full((6, 100), float(version), np.float32))
    made = GlobalState(run, version, version, {"prototypes": rows}).parts(128 + (6 // count) * 402)
    assert len(made) == count
    return made


def test_an_open_round_is_a_task_until_it_is_done() -> None:
    done: set[Key] = set()
    fleet = follower(done)
    assert fleet.task() is None
    fleet.announced(announced(1))
    task = fleet.task()
    assert task is not None
    assert (task.key, task.state.version) == ((RUN, 1, "fedproto"), 0)
    done.add(task.key)
    assert fleet.task() is None
    fleet.announced(announced(1, "closed"))
    fleet.announced(announced(0))
    assert fleet.task() is None


def test_a_state_that_was_kept_starts_a_round_until_a_newer_one_comes_and_another_fleets_is_not_ours() -> None:
    fleet = follower()
    fleet.restore(GlobalState(RUN, 2, 2))
    assert fleet.newest_state is None  # no run is announced yet
    fleet.announced(announced(3, global_version=2))
    assert (fleet.task().state.version, fleet.newest_state.version) == (2, 2)
    for part in parts(3):
        fleet.part(part)
    assert fleet.newest_state.version == 3
    assert fleet.task() is None, "the round starts from version 2"
    fleet.announced(announced(9, "finished", bundle=b"x" * 32))
    assert fleet.newest_state is None


def test_a_round_waits_for_exactly_its_global_state() -> None:
    fleet = follower()
    fleet.announced(announced(3, global_version=2))
    assert fleet.is_called
    for part in parts(1):
        fleet.part(part)
    assert fleet.task() is None
    newer = parts(2)
    for part in (newer[2], newer[0], newer[0]):
        fleet.part(part)
        assert fleet.task() is None
    fleet.part(newer[1])
    task = fleet.task()
    assert task is not None
    assert task.state.version == 2
    assert task.state.prototypes is not None
    assert (task.state.prototypes.rows == 2.0).all()


def test_parts_that_a_broker_retains_of_an_older_run_do_no_harm() -> None:
    """The older run had more parts: they arrive between those of the present one."""
    fleet = follower()
    old, new = parts(9, run=OTHER, count=6), parts(1)
    for part in (new[0], old[3], new[1], old[4], new[2], old[5]):
        fleet.part(part)
    state = fleet.state(RUN)
    assert state is not None
    assert state.version == 1
    assert fleet.state(OTHER) is None


def test_many_runs_do_not_fill_the_memory() -> None:
    fleet = follower()
    for number in range(100):
        for part in parts(1, run=number.to_bytes(4, "big")):
            fleet.part(part)
    assert len(fleet._runs) <= 4
    assert fleet.state((99).to_bytes(4, "big")) is not None


def test_contradicting_parts_are_forgotten() -> None:
    fleet = follower()
    fleet.part(parts(1)[0])
    fleet.part(parts(1, count=6)[5])
    assert fleet.state(RUN) is None
    for part in parts(2):
        fleet.part(part)
    assert fleet.state(RUN) is not None


def test_only_the_sampled_take_part() -> None:
    fleet = follower()
    for seed in range(50):
        fleet.announced(announced(1, fraction=0.5, seed=seed))
        assert (fleet.task() is not None) == sampled("pi-1", 1, seed, 0.5)


def test_another_bundle_is_refused_while_a_run_is_under_way() -> None:
    with pytest.raises(UsageError, match=r"the fleet runs another bundle, expected sha256 ffffffffffff…, got 0000"):
        follower().announced(announced(1, bundle=b"\xff" * 32))
    follower().announced(announced(1, "finished", bundle=b"\xff" * 32))  # last week's run: no business of ours


def test_a_run_ends_only_those_that_were_in_it() -> None:
    stranger, member, reborn = follower(), follower(), follower({(RUN, 1, "fedproto")})
    member.announced(announced(2, "closed"))
    for fleet in (stranger, member, reborn):
        fleet.announced(announced(2, "finished"))
    assert [fleet.finished for fleet in (stranger, member, reborn)] == [False, True, True]
    assert [fleet.stale for fleet in (stranger, member, reborn)] == [True, False, False]
    stranger.announced(announced(1, run=OTHER))
    assert not stranger.stale
    assert stranger.task() is not None


def presence() -> Presence:
    return Presence("pi-1", ME, is_own={EARLIER, ME}.__contains__)


def status(instance: bytes, *, online: bool = True) -> Status:
    return Status(online, instance, 1)


def born() -> Presence:
    mine = presence()
    mine.connected(0.0)
    mine.born()
    mine.heard(status(ME), 0.1)
    return mine


def test_a_device_says_why_it_takes_no_part_until_it_fits() -> None:
    fleet = Follower("pi-1", BUNDLE, is_done=bool, took_part=bool, stays=True)
    with pytest.raises(UsageError, match="the fleet runs another bundle"):
        fleet.announced(announced(1, bundle=b"x" * 32))
    health = Health(ME, 1, {})
    health.apart = fleet.apart
    assert health.birth().versions[APART] == "another bundle"
    fleet.announced(announced(1))
    assert fleet.apart == ""


def test_a_device_tells_other_classes_from_another_bundle() -> None:
    """Where the extractor is the fleet's, and only the list of classes is not; an older aggregator names no list."""
    ours, others = BUNDLE.extractor(method("ffc")), (list_digest(["another list"]),)
    foreign = replace(announced(1, bundle=b"x" * 32, extractor=ours, class_lists=others), method="ffc")
    for told, why, refused in (
        (foreign, "other classes", "the fleet has other classes"),
        (replace(foreign, extractor=bytes(32)), "another bundle", "the fleet runs another bundle"),
        (replace(foreign, method="fedproto"), "another bundle", "the fleet runs another bundle"),
    ):
        fleet = Follower("pi-1", BUNDLE, is_done=bool, took_part=bool, stays=True)
        with pytest.raises(UsageError, match=refused):
            fleet.announced(told)
        assert fleet.apart == why
        fleet.announced(replace(foreign, class_lists=()))
        assert fleet.apart == ""


def test_the_first_birth_is_due_at_once() -> None:
    mine = presence()
    assert not mine.birth_due(0.0)
    mine.connected(5.0)
    assert mine.birth_due(5.0)
    mine.born()
    assert not mine.birth_due(100.0)
    mine.connected(200.0)
    mine.disconnected()
    assert (mine.birth_due(300.0), mine.wait_s(300.0)) == (False, None)


def test_what_is_retained_of_others_before_our_birth_is_history() -> None:
    mine = presence()
    mine.connected(0.0)
    for online in (True, False):
        mine.heard(status(THEM, online=online), 0.0)
    assert mine.birth_due(0.0)


def answer(instance: bytes, *, age_s: int, to: bytes = ME) -> Status:
    return replace(status(instance), rival=Rival(to, age_s, 1))


def test_the_first_answers_a_second_process_and_stays() -> None:
    mine = born()
    mine.heard(replace(status(THEM), boot=7, profile="a board"), 90.1)
    assert mine.birth_due(90.1)
    assert mine.rival(90.1) == Rival(THEM, 90, 7, "a board")
    mine.born()
    assert mine.rival(91.0) is None
    for second in range(92, 99):
        mine.heard(status(b"another%d" % (second % 10)), second)
        assert not mine.birth_due(second)  # a flood of births makes it speak now and then
    assert mine.birth_due(101.0)


@pytest.mark.parametrize("is_clone", [False, True], ids=["of another directory", "of a copy made while the first ran"])
def test_the_second_process_ends_when_the_first_answers(is_clone: bool) -> None:
    first = EARLIER if is_clone else THEM
    mine = presence()
    mine.connected(0.0)
    mine.heard(status(first), 0.0)
    mine.born()
    mine.heard(status(ME), 0.1)
    with pytest.raises(SecondProcessError, match=r"another process runs as device pi-1, expected one process for each"):
        mine.heard(answer(first, age_s=0), 9.0)


def test_who_was_here_for_longer_does_not_leave() -> None:
    mine = born()
    mine.heard(answer(THEM, age_s=3), 60.0)
    assert mine.rival(60.0) == Rival(THEM, 59, 1)  # and says so
    with pytest.raises(SecondProcessError):
        mine.heard(answer(THEM, age_s=600), 60.0)
    born().heard(answer(THEM, age_s=600, to=EARLIER), 60.0)  # another is meant
    signed = Presence("pi-1", ME, 200, is_own=lambda instance: False, is_signed=True)
    signed.connected(0.0)
    signed.born(5)
    signed.heard(replace(status(ME), issued=5), 0.1)
    signed.heard(answer(THEM, age_s=600, to=EARLIER), 60.0)  # recorded at an earlier start
    assert signed.rival(60.0) is None
    copied = Presence("pi-1", ME, 200, is_own={EARLIER, ME}.__contains__, is_signed=True)
    copied.connected(0.0)
    copied.born(5)
    copied.heard(replace(status(ME), issued=5), 0.1)
    copied.heard(answer(EARLIER, age_s=3), 60.0)  # of a copy of its state, which bears an instance of its own
    assert copied.rival(60.0) == Rival(EARLIER, 59, 1)


@pytest.mark.parametrize("seed", range(40))
def test_of_two_that_start_whenever_and_hear_however_late_exactly_one_stays(seed: int) -> None:
    rng = random.Random(seed)
    names = (ME, THEM)
    starts = dict(zip(names, (0.0, rng.choice([0.0, 0.3, 4.9, 5.0, 5.1, 40.0]) + rng.random() / 10), strict=True))
    at: list[tuple[float, int, bytes, Status]] = []  # when who hears what; the broker has one order for both
    here: dict[bytes, Presence] = {}
    ended, retained, heard_at, now, count = set[bytes](), None, dict.fromkeys(names, 0.0), 0.0, 0
    while now < 150.0:
        for name in names:
            if name not in here and now >= starts[name]:
                here[name] = Presence("pi-1", name, is_own=lambda instance: False)
                here[name].connected(now)
                if retained is not None:
                    at.append((now + 0.05, -1, name, retained))
            mine = here.get(name)
            if mine is not None and name not in ended and mine.birth_due(now):
                retained = replace(status(name), rival=mine.rival(now))
                mine.born()
                for other in names:
                    heard_at[other] = max(heard_at[other], now + rng.random())
                    count += 1
                    if other in here:
                        at.append((heard_at[other], count, other, retained))
        for each in sorted(each for each in at if each[0] <= now):
            at.remove(each)
            if each[2] not in ended:
                try:
                    here[each[2]].heard(each[3], now)
                except SecondProcessError:
                    ended.add(each[2])
        now += 0.05
    assert len(ended) == 1
    if starts[THEM] > 30.0:
        assert ended == {THEM}


@pytest.mark.parametrize("instance", [THEM, EARLIER])
def test_the_late_death_of_another_process_is_answered_with_a_birth(instance: bytes) -> None:
    """The broker found out only now that a process is gone, and retains its death where our birth stood."""
    mine = born()
    mine.heard(status(instance, online=False), 1.0)
    assert mine.birth_due(1.0)


@pytest.mark.parametrize("throws_out", [True, False])
def test_who_is_thrown_out_by_another_says_who_that_was(throws_out: bool) -> None:
    """Where a broker has one session for each certificate, a return makes it publish the other's death."""
    mine = born()
    if throws_out:
        mine.disconnected()
        mine.connected(60.0)
    mine.heard(status(THEM, online=False), 60.1)
    assert mine.birth_due(60.1)
    assert mine.rival(60.1) == (Rival(THEM, 60, 1) if throws_out else None)


def test_who_was_here_before_never_leaves_for_deaths_of_its_own_earlier_processes() -> None:
    """A line that comes and goes, and a broker that finds out late who is gone, throw nobody out."""
    mine = born()
    for turn in range(20):
        mine.disconnected()
        mine.connected(60.0 + turn)
        mine.heard(status(EARLIER, online=False), 60.1 + turn)


def test_an_earlier_process_of_this_directory_is_no_stranger() -> None:
    """A broker that comes back from an old snapshot still retains the birth of a process that is long dead."""
    born().heard(status(EARLIER), 1.0)


def test_after_a_reconnection_it_listens_before_it_speaks() -> None:
    mine = born()
    mine.disconnected()
    mine.connected(10.0)
    assert not mine.birth_due(10.0)
    assert mine.wait_s(10.0) == 2.0
    assert mine.birth_due(12.0)


@pytest.mark.parametrize("online", [True, False])
def test_its_own_retained_status_ends_the_listening(online: bool) -> None:
    mine = born()
    mine.disconnected()
    mine.connected(10.0)
    mine.heard(status(ME, online=online), 10.1)
    assert mine.birth_due(10.1)


def test_its_own_last_will_while_alive_is_contradicted() -> None:
    """The broker noticed the end of an old connection of ours late, and announced our death."""
    mine = born()
    mine.heard(status(ME, online=False), 3.0)
    assert mine.birth_due(3.0)


def test_a_death_in_our_name_is_answered_and_so_is_the_late_will_of_our_earlier_process() -> None:
    for instance in (ME, EARLIER):
        presence = born()
        presence.heard(Status(False, instance, 0), 5.0)
        assert presence.birth_due(5.0)


def test_what_is_waited_for_is_named() -> None:
    done: set[Key] = set()
    fleet = follower(done)
    assert "no round has been announced" in fleet.waits_for()
    fleet.announced(announced(0, "closed"))
    assert fleet.waits_for() == "waiting for round 1 to open"
    fleet.announced(announced(1))
    assert fleet.waits_for() == ""  # there is something to do
    done.add((RUN, 1, "fedproto"))
    assert fleet.waits_for() == "round 1 (fedproto) is open and done here: waiting for the next round"
    refused = Follower("pi-1", BUNDLE, is_done=done.__contains__, took_part=bool, was_rejected=done.__contains__)
    refused.announced(announced(1))
    assert refused.waits_for().startswith("round 1 (fedproto) is open but what this device sent was rejected: ")
    fleet.announced(announced(2, fraction=1e-9))
    assert "not sampled" in fleet.waits_for()
    fleet.announced(announced(2, global_version=3))
    assert fleet.waits_for() == "round 2 (fedproto) is open: waiting for global version 3"
    for part in parts(5):
        fleet.part(part)
    assert "this device has version 5 already: was the aggregator's store restored" in fleet.waits_for()
    fleet.announced(announced(2, "finished"))
    assert fleet.waits_for() == ""


def test_a_round_over_the_extractor_it_shares_is_for_it_whatever_the_bundle() -> None:
    ours = BUNDLE.extractor(method("ffc"))
    ffc = replace(announced(1, bundle=bytes([7]) * 32, extractor=ours), method="ffc")
    fleet = follower()
    fleet.announced(ffc)
    assert fleet.task() is not None
    others = (
        replace(ffc, extractor=b""),
        replace(ffc, extractor=bytes(32)),
        replace(ffc, method="fedproto"),  # trained features are the bundle's own
        replace(ffc, method="no method of ours"),
    )
    for other in others:
        with pytest.raises(UsageError, match="the fleet runs another bundle"):
            follower().announced(other)


def test_a_version_far_above_the_announced_one_keeps_no_true_one_out() -> None:
    """Of 2^32 − 1, above which none can come: before the announcement is known, and after."""
    fleet, highest = follower(), parts(2**32 - 1, count=1)[0]
    fleet.part(highest)
    fleet.announced(announced(2, global_version=1))
    assert fleet.state(RUN) is None
    with pytest.raises(WireError, match="version 1, as announced"):
        fleet.part(highest)
    fleet.part(parts(1, count=1)[0])
    state = fleet.state(RUN)
    assert state is not None
    assert state.version == 1
