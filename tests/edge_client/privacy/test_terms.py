"""A ledger that is lost and a policy that got looser: neither lets anything out before the owner has said so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from edge_samples import announcement

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import PrivacyError, UsageError
from protofleet.contract.methods import method
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import FILE, Ledger
from protofleet.edge_client.privacy.policy import Policy, Recorded, looser, read_record
from protofleet.edge_client.privacy.releases import Releases, ledger_path
from protofleet.edge_client.settings import ClientSettings
from tests.edge_client.privacy.test_policy import FEW, journal_in

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle())


@dataclass
class Board:
    """A device whose process starts, makes releases, and ends; time passes as the test says."""

    state: Path
    bundle: Bundle
    seconds: float = 100.0
    rounds: int = 0
    said: list[str] = field(default_factory=list)

    def start(self, policy: Policy, *, accepts_looser: bool = False, releases: int = 0) -> list[str]:
        """Whether the round after each of so many releases is refused, and why; and that of a new start."""
        words = []
        with journal_in(self.state, self.bundle) as journal, Ledger(ledger_path(self.state, policy)) as ledger:
            found = Releases(
                policy,
                ledger,
                fleet="fleet",
                own=method("fedproto"),
                hyper=self.bundle.manifest.hyper,
                now=lambda: Moment("boot", self.seconds, self.seconds),
            )
            found.begin(journal, accepts_looser=accepts_looser)
            self.said.append(found.warning())
            for _ in range(releases):
                self.rounds += 1
                asked, payload = announcement(self.bundle, self.rounds), f"{self.rounds}".encode()
                found.made(asked, "f32", payload, FEW)
                key = asked.run, asked.round, asked.method
                journal.commit_round(key, weights={}, payload=payload, limit_bytes=1 << 20, metrics={})
            refusal = found.refusal(announcement(self.bundle, self.rounds + 1), FEW)
            words.append("" if refusal is None else refusal.word)
        return words


@pytest.mark.parametrize("lost", ["deleted", "empty"])
def test_a_ledger_that_is_lost_lets_no_release_out_before_its_time(lost: str, bundle: Bundle, tmp_path: Path) -> None:
    once = Policy(releases_per_day=1.0)
    board = Board(tmp_path, bundle)
    assert board.start(once, releases=1) == ["releases per day"]
    board.seconds += DAY_S / 2
    (tmp_path / FILE).unlink()
    if lost == "empty":
        (tmp_path / FILE).touch()
    assert board.start(once) == ["releases per day"]
    line = (
        "the ledger lacks 1 release that the journal has: releases_per_day counts them as made now, the next in 24.0 h"
    )
    assert board.said[-1] == line
    board.seconds += DAY_S / 2
    assert board.start(once) == ["releases per day"]  # when it was made nobody knows any more
    board.seconds += DAY_S / 2
    assert board.start(once) == [""]


@pytest.mark.parametrize("lost", ["deleted", "empty", "older"])
@pytest.mark.parametrize("moved", [False, True], ids=["here", "in another fleet"])
def test_a_ledger_that_is_lost_forgets_no_figure(lost: str, moved: bool, bundle: Bundle, tmp_path: Path) -> None:
    """What a status has told without noise no ε covers, also where no contribution was made; and no rate counts it."""
    state = tmp_path / "fleets" / "first" if moved else tmp_path
    state.mkdir(parents=True, exist_ok=True)
    about = {"own": method("ncm-dp"), "hyper": {**bundle.manifest.hyper, **method("ncm-dp").resolve({})}}
    with journal_in(state, bundle) as journal, Ledger(tmp_path / FILE) as ledger:
        told = Releases(Policy(releases_per_day=1.0), ledger, fleet="fleet", own=method("ncm"), hyper={})
        told.begin(journal)
        kept = (tmp_path / FILE).read_bytes()
        told.figures({"accuracy_all": 0.5})
    (tmp_path / FILE).unlink()
    if lost != "deleted":
        (tmp_path / FILE).write_bytes(kept if lost == "older" else b"")
    others = [state] if moved else []
    with journal_in(tmp_path, bundle) as journal, Ledger(tmp_path / FILE) as ledger:
        found = Releases(Policy(releases_per_day=1.0), ledger, fleet="another" if moved else "fleet", **about)
        found.begin(journal, others=others, accepts_looser=True)
        assert found.cost_line() == "no ε holds: without noise went out 1 release"
        assert (found.warning(), found.wait_s()) == ("", 0.0)
        found.begin(journal, others=others)
        assert ledger.spent().releases == 1
        private = Releases(Policy(releases_per_day=1.0, epsilon=9.0, delta=1e-6), ledger, fleet="fleet", **about)
        with pytest.raises(PrivacyError, match="got 1 release without"):
            private.begin(journal, others=others)


STRICT = Policy(
    methods=("ncm", "ncm-dp"),
    statistics=("unit-means", "noised-means"),
    encodings=("f32",),
    min_samples=5,
    releases_per_day=2.0,
    figures=("drift",),
    blinded=True,
)
PRIVATE = Policy(epsilon=4.0, delta=1e-6)


@pytest.mark.parametrize(
    ("before", "changed", "words"),
    [
        (STRICT, {}, ()),
        (STRICT, {"methods": ("ncm",), "min_samples": 6, "releases_per_day": 1.0, "figures": ()}, ()),
        (STRICT, {"methods": None}, ("methods",)),
        (STRICT, {"methods": ("ncm", "ffc")}, ("methods",)),
        (STRICT, {"statistics": None}, ("statistics",)),
        (STRICT, {"encodings": ("f32", "f64")}, ("encodings",)),
        (STRICT, {"min_samples": 4}, ("min_samples",)),
        (STRICT, {"releases_per_day": None}, ("releases_per_day",)),
        (STRICT, {"releases_per_day": 2.5}, ("releases_per_day",)),
        (STRICT, {"figures": None}, ("figures",)),
        (STRICT, {"blinded": False}, ("blinded",)),
        (STRICT, {"ledger": "/elsewhere/l.sqlite"}, ("ledger",)),
        (Policy(), {"joint_head": True}, ("joint_head",)),
        (Policy(joint_head=True), {"joint_head": False}, ()),
        (Policy(), {"page": True}, ("page",)),
        (Policy(page=True), {"page": False}, ()),
        (Policy(), {"answers": True}, ("answers",)),
        (Policy(answers=True), {"answers": False}, ()),
        (Policy(), {"proposals": True}, ("proposals",)),
        (Policy(proposals=True), {"proposals": False}, ()),
        (Policy(keep_photos=False), {"keep_photos": True}, ("keep_photos",)),
        (Policy(), {"keep_photos": False}, ()),
        (Policy(keep_photos_for="7d"), {"keep_photos_for": "200h"}, ("keep_photos_for",)),
        (Policy(keep_photos_for="7d"), {"keep_photos_for": "6d"}, ()),
        (PRIVATE, {"epsilon": 2.0, "delta": 1e-7}, ()),
        (PRIVATE, {"figures": ()}, ()),
        (PRIVATE, {"epsilon": 4.5}, ("epsilon",)),
        (PRIVATE, {"delta": 1e-5}, ("delta",)),
        (PRIVATE, {"neighbours": "replace"}, ("neighbours",)),
        (PRIVATE, {"epsilon": None, "delta": None}, ("figures", "epsilon", "delta")),
        (Policy(), {"ledger": "/elsewhere/l.sqlite"}, ()),
        (Policy(), {"epsilon": 1.0, "delta": 1e-6}, ()),
    ],
)
def test_what_is_looser_is_known_for_each_key(before: Policy, changed: dict, words: tuple[str, ...]) -> None:
    assert looser(msgspec.structs.replace(before, **changed), before) == words
    record = Recorded(3, before)
    assert read_record(record.text()) == record
    assert record.followed_by(before) == record
    assert record.followed_by(Policy(min_samples=7)).change == 4


def test_every_key_of_a_policy_is_compared() -> None:
    """A key that comes later must not be forgotten."""
    strictest = Policy(
        methods=(), statistics=(), encodings=(), min_samples=9, releases_per_day=1.0, blinded=True, figures=(),
        epsilon=1.0, delta=1e-9, neighbours="replace", ledger="/a", keep_photos=False, keep_photos_for="1d",
    )  # fmt: skip
    assert set(looser(Policy(), strictest)) == set(Policy.__struct_fields__) - {
        "joint_head",
        "page",
        "answers",
        "proposals",
    }  # which it gave up


@pytest.mark.parametrize("lost", [(), ("ledger.sqlite",), ("journal.sqlite",)])
def test_a_looser_policy_is_refused_until_the_owner_says_so(
    lost: tuple[str, ...], bundle: Bundle, tmp_path: Path
) -> None:
    """Also where ledger or journal is gone: each has the terms. None at all is the loosest."""
    board, strict = Board(tmp_path, bundle), Policy(releases_per_day=1.0, min_samples=5)
    board.start(strict)
    for name in lost:
        for file in tmp_path.glob(f"{name}*"):
            file.unlink()
    for looser_one in (Policy(), Policy(releases_per_day=1.0)):
        with pytest.raises(UsageError, match="the policy is looser than when this device last started, expected") as e:
            board.start(looser_one)
        assert "min_samples 5" in e.value.expected
        assert "min_samples 1" in str(e.value.got)
        assert "--accept-looser-policy" in str(e.value.hint)
    assert board.start(strict) == [""]
    assert board.start(Policy(), accepts_looser=True) == [""]
    assert board.start(Policy()) == [""]  # from then on these are the terms
    assert board.start(strict) == [""]
    with pytest.raises(UsageError):
        board.start(Policy())


def test_terms_elsewhere_hold_for_a_state_directory_that_is_new(bundle: Bundle, tmp_path: Path) -> None:
    """And where the file that names that ledger is gone, the journal has them."""
    strict = Policy(min_samples=5, ledger=str(tmp_path / "kept" / "l.sqlite"))
    Board(tmp_path / "state", bundle).start(strict)
    with pytest.raises(UsageError, match="min_samples 5"):
        Board(tmp_path / "new", bundle).start(msgspec.structs.replace(strict, min_samples=1))
    with pytest.raises(UsageError, match="min_samples 5, ledger "):
        Board(tmp_path / "state", bundle).start(Policy())
    assert Board(tmp_path / "fresh", bundle).start(Policy()) == [""]  # of nothing nothing is known


def test_of_two_records_the_later_one_counts(bundle: Bundle, tmp_path: Path) -> None:
    """The journal of a fleet to which a device comes back is older than the ledger, and a ledger that is put back from
    a copy older than the journal."""
    board, strict, loose = Board(tmp_path, bundle), Policy(min_samples=5), Policy(min_samples=2)
    board.start(loose)
    with journal_in(tmp_path, bundle) as journal:
        older = journal.policy()
        assert older is not None
    board.start(loose)
    with journal_in(tmp_path, bundle) as journal:
        assert journal.policy() == older  # what is counted are changes, not starts
    board.start(strict)
    with Ledger(tmp_path / FILE) as ledger:
        ledger.put_policy(older)
    with pytest.raises(UsageError, match="min_samples 5"):
        board.start(loose)
    board.start(loose, accepts_looser=True)
    with journal_in(tmp_path, bundle) as journal:
        journal.put_policy(Recorded(2, strict).text())
    assert board.start(loose) == [""]


@pytest.mark.parametrize("lies_in", ["ledger", "journal"])
def test_where_no_record_is_later_the_looser_one_excuses_nothing(lies_in: str, bundle: Bundle, tmp_path: Path) -> None:
    """The ledger, or the journal, of another device was put there."""
    board, loose = Board(tmp_path, bundle), Policy(min_samples=2)
    board.start(Policy(min_samples=5))
    with journal_in(tmp_path, bundle) as journal, Ledger(tmp_path / FILE) as ledger:
        (ledger if lies_in == "ledger" else journal).put_policy(Recorded(1, loose).text())
    with pytest.raises(UsageError, match="min_samples 5"):
        board.start(loose)
    assert board.start(loose, accepts_looser=True) == [""]
    assert board.start(loose) == [""]


def test_what_the_journal_of_another_fleet_knows_counts_too(bundle: Bundle, tmp_path: Path) -> None:
    """A roll-out took the device to another fleet, and then its ledger was lost."""
    once = Policy(releases_per_day=1.0)
    Board(tmp_path / "state" / "fleets" / "first", bundle).start(once, releases=1)
    with journal_in(tmp_path / "state", bundle) as journal, Ledger(tmp_path / "state" / FILE) as ledger:
        found = Releases(once, ledger, fleet="second", own=method("fedproto"), hyper=bundle.manifest.hyper)
        found.begin(journal, others=[tmp_path / "state" / "fleets" / "first"])
        refused = found.refusal(announcement(bundle, 9), FEW)
        assert refused is not None
        assert refused.word == "releases per day"


def test_the_terms_in_the_journal_of_another_fleet_hold_where_the_ledger_is_lost(
    bundle: Bundle, tmp_path: Path
) -> None:
    """Whether the device comes to a fleet for the first time or comes back to one with older terms."""
    strict, loose, state = Policy(min_samples=5), Policy(min_samples=2), tmp_path / "state"
    first, about = state / "fleets" / "first", {"own": method("fedproto"), "hyper": bundle.manifest.hyper}
    Board(first, bundle).start(strict)
    for known in (None, Recorded(1, loose).text()):
        (state / FILE).unlink(missing_ok=True)
        with journal_in(state, bundle) as journal, Ledger(state / FILE) as ledger:
            if known is not None:
                journal.put_policy(known)
            found = Releases(loose, ledger, fleet="second", **about)
            with pytest.raises(UsageError, match="min_samples 5"):
                found.begin(journal, others=[first])
    with journal_in(state, bundle) as journal, Ledger(state / FILE) as ledger:
        found = Releases(loose, ledger, fleet="second", **about)
        found.begin(journal, others=iter([first]), accepts_looser=True)
        found.begin(journal, others=[first])


def test_terms_that_nobody_can_read_hold_until_the_owner_says_so(bundle: Bundle, tmp_path: Path) -> None:
    board = Board(tmp_path, bundle)
    board.start(Policy())
    with journal_in(tmp_path, bundle) as journal:
        journal.put_policy('{"min_samples": 0.5}')
    with pytest.raises(UsageError, match="terms on record, expected terms that this program knows"):
        board.start(Policy())
    assert board.start(Policy(), accepts_looser=True) == [""]


def test_what_is_said_once_is_not_said_by_a_file_for_ever(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("accept_looser_policy = true")
    with pytest.raises(UsageError, match="expected --accept-looser-policy on the command line, once, got"):
        read_settings(ClientSettings, {}, file=str(tmp_path / "c.toml"))
    named = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": "d", "state": "s"}
    assert read_settings(ClientSettings, {**named, "accept_looser_policy": True}).accept_looser_policy
