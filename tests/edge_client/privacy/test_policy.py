"""A device's policy: what its file may say, what it refuses, and the ledger that no restart and no clock sets back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blinded_samples import PUBLIC, signer
from commands import one_error_line, run
from edge_samples import RUN, announcement, fashion, graphs_of, releases, sums_of

from protofleet.aggregator.monitoring.policy_refusals import PolicyWords, policy_words_in
from protofleet.aggregator.store.schema import KIND as STORE
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.sqlite import Database
from protofleet.contract.methods import METHODS
from protofleet.contract.privacy.blinding import SCALE_BITS
from protofleet.contract.privacy.sealing import make_helper_key
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution, HelperTerms, Receipt
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.status_message import Health
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.elapsed_time import Moment, moment, passed_s
from protofleet.edge_client.privacy.ledger import FILE, Cost, Entry, Ledger, Terms, digest_of, read_ledger
from protofleet.edge_client.privacy.policy import FIGURES, Policy, read_policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.probation import ProbationWatch
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle
from protofleet.edge_client.rollout.rollout_file import RolloutFile
from protofleet.edge_client.rounds.round_follower import Follower, Task
from protofleet.edge_client.run.round_work import Line, Own, RoundWork

FEW = np.array([4, 0, 2])


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_whole_policy_is_read_and_one_without_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        'methods = ["ncm", "ncm-dp"]\nstatistics = ["unit-means"]\nencodings = ["f32"]\nmin_samples = 5\n'
        'releases_per_day = 0.5\nepsilon = 4\ndelta = 1e-6\nneighbours = "replace"\nledger = "/elsewhere/l.sqlite"\n'
    )
    found = read_policy(str(path))
    assert found == Policy(
        methods=("ncm", "ncm-dp"),
        statistics=("unit-means",),
        encodings=("f32",),
        min_samples=5,
        releases_per_day=0.5,
        epsilon=4.0,
        delta=1e-6,
        neighbours="replace",
        ledger="/elsewhere/l.sqlite",
    )
    assert (found.window_s, found.most) == (2 * 86_400.0, 1)
    for empty in ("", "# a policy that was\n"):
        path.write_text(empty)
        with pytest.raises(UsageError, match=r"expected at least one of a policy's keys, got none, try .*no --policy"):
            read_policy(str(path))
    private, names = Policy(epsilon=1.0, delta=1e-6), ("accuracy", "drift", "new-photos")
    assert not any(private.allows_figure(name) for name in names)  # type: ignore[arg-type]
    assert [Policy(figures=("drift",)).allows_figure(name) for name in names] == [False, True, False]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected at least one of a policy's keys, got none"),
        ("methods = [", "expected TOML, got"),
        ("epsilom = 1.0", "unknown key, expected one of a policy's, got epsilom, try one of epsilon"),
        ('methods = ["nmc"]', "methods, expected known names, got nmc, try one of ncm"),
        ('methods = "ncm"', "methods, expected a list"),
        ('statistics = ["weights"]', "statistics, expected known names, got weights"),
        ('encodings = ["f8"]', "encodings, expected known names, got f8"),
        ('figures = ["photos"]', "figures, expected known names, got photos"),
        ('min_samples = "5"', "expected values of the right kind, got Expected `int`"),
        ("min_samples = 0", "min_samples, expected 1 to"),
        ("releases_per_day = 0", "releases_per_day, expected 0.0001 to 1e+06, got 0.0"),
        ("epsilon = nan\ndelta = 1e-6", "epsilon, expected 1e-06 to 1e+06, got nan"),
        ("epsilon = -1.0\ndelta = 1e-6", "epsilon, expected 1e-06 to 1e+06, got -1"),
        ("epsilon = 1.0\ndelta = 0.0", "delta, expected 1e-15 to 0.5, got 0"),
        ("epsilon = 1.0\ndelta = 0.6", "delta, expected 1e-15 to 0.5, got 0.6"),
        ("epsilon = 1.0", "epsilon, expected delta beside it, got none"),
        ("delta = 1e-6", "delta, expected epsilon beside it, got none"),
        ('epsilon = 1.0\ndelta = 1e-6\nfigures = ["accuracy"]', "figures with epsilon, expected none of them"),
        ("epsilon = 1.0\ndelta = 1e-6\nproposals = true", "proposals, expected no epsilon"),
        ('keep_photos_for = "soon"', "keep_photos_for, expected a duration such as 90s, 10m, 6h or 7d, got soon"),
        ('keep_photos_for = "0s"', "keep_photos_for, expected a duration above 0, got 0s"),
        ("blinded = 1", "values of the right kind, got Expected `bool`"),
        ("blinded = true", "blinded, expected --helper-key beside it, got none"),
        ("blinded = true\nepsilon = 1.0\ndelta = 1e-6", "blinded with epsilon, expected one of the two"),
        ('neighbours = "both"', "neighbours, expected add-remove or replace, got both, try one of add-remove"),
        ('ledger = "ledger.sqlite"', "ledger, expected a path that begins with /, got 'ledger.sqlite'"),
        ('ledger = ""', "ledger, expected a path that begins with /, got ''"),
        ('ledger = "/a\\u0000b"', "ledger, expected a path that begins with /, got '/a\\x00b'"),
    ],
)
def test_what_is_wrong_with_a_policy_is_one_line_and_the_client_does_not_start(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    named = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": "d", "state": tmp_path / "state", "policy": path}
    done = run("client", *(word for name, value in named.items() for word in (f"--{name}", value)))
    assert done.returncode == 2
    line = one_error_line(done)
    assert line.startswith(f"error: --policy {path}")
    assert words in line
    assert not (tmp_path / "state").exists()


def test_a_device_that_cannot_sign_is_told_at_once_that_no_helper_will_hear_it(tmp_path: Path) -> None:
    make_helper_key(tmp_path / "helper.key")
    named = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": "d", "state": tmp_path / "state"}
    named["helper-key"] = tmp_path / "helper.key.pub"
    done = run("client", *(word for name, value in named.items() for word in (f"--{name}", value)))
    assert done.returncode == 2
    assert "--helper-key, expected a key to sign with, got none, try client --identity" in one_error_line(done)


def test_the_policy_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "living.md").read_text(encoding="utf-8")
    (tmp_path / "policy.toml").write_text("#" + page.split("```toml\n# /etc/protofleet/policy.toml")[1].split("```")[0])
    found = read_policy(str(tmp_path / "policy.toml"))
    assert (found.epsilon, found.figures, found.most, found.is_private) == (4.0, (), 4, True)
    assert all(getattr(found, name) is not None for name in Policy.__struct_fields__)


def test_a_policy_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"--policy .*, expected a TOML file, got {words}"):
            read_policy(str(path))


# ── what it refuses ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle())


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (Policy(methods=("ncm",)), "method ffc"),
        (Policy(methods=()), "method ffc"),
        (Policy(statistics=("unit-means",)), "statistic feature-gram"),
        (Policy(encodings=("f32", "int8")), "encoding f64"),
        (Policy(blinded=True), "not blinded"),
        (Policy(methods=("ffc",), statistics=("feature-gram",), encodings=("f64",), min_samples=7), None),
        (Policy(), None),
    ],
)
@pytest.mark.parametrize("phase", ["open", "standing"])
def test_what_is_announced_is_held_to_the_policy(
    policy: Policy, word: str | None, phase: str, bundle: Bundle, tmp_path: Path
) -> None:
    asked = announcement(bundle, 1, "ffc", encoding="f64", phase=phase, min_samples=3)
    found = releases(tmp_path, bundle, policy)
    refused = found.refusal(found.narrowed(asked), FEW)
    assert (None if refused is None else refused.word) == word
    assert found.narrowed(asked).min_samples == max(3, policy.min_samples)


def test_noise_is_no_way_around_min_samples(bundle: Bundle, tmp_path: Path) -> None:
    """A bundle with hardly any noise would send every class, however small; with an ε, that bounds it."""
    uncounted = [name for name, found in METHODS.items() if not found.statistic.COUNTED]
    assert uncounted
    for name in uncounted:
        asked = announcement(bundle, 1, name)
        refused = releases(tmp_path, bundle, Policy(min_samples=2)).refusal(asked, FEW)
        assert refused is not None
        assert refused.word == "min_samples"
        assert releases(tmp_path, bundle).refusal(asked, FEW) is None


def test_an_f32_that_is_not_allowed_does_not_stand_in_for_what_overflows(bundle: Bundle, tmp_path: Path) -> None:
    asked = announcement(bundle, encoding="f16")
    for top, allowed, expected in (
        (6e4, ("f16",), ("f16", np.float16)),
        (7e4, ("f16",), None),
        (7e4, ("f16", "f32"), ("f32", np.float32)),
        (7e4, None, ("f32", np.float32)),
    ):
        means = ClassMeans(np.array([[1.0, top]]), np.array([1]))
        made = Contribution.of(means, run=RUN, round=1, method="fedproto", bundle=bytes(32))
        found = releases(tmp_path, bundle, Policy(encodings=allowed)).encoded(made, asked)  # type: ignore[arg-type]
        if found is None or expected is None:
            assert found is expected
            continue
        sent = decode(found[0])
        assert isinstance(sent, Contribution)
        assert (found[1], sent.body.rows.dtype) == expected
        np.testing.assert_allclose(sent.body.rows, means.means, rtol=1e-3)


def test_what_waits_since_an_earlier_start_is_held_to_the_policy_of_this_one(bundle: Bundle, tmp_path: Path) -> None:
    data = fashion(bundle, 12, (0, 3))
    made = Device(bundle, data, "pi-1", graphs=graphs_of(bundle)).run_round(announcement(bundle), None).contribution
    payload, asked = encode(made, "f32"), announcement(bundle, min_samples=2)
    found = releases(tmp_path, bundle)
    found.made(asked, "f32", payload, FEW)
    key = RUN, 1, "fedproto"
    for policy, why in (
        (Policy(methods=("fedproto",), statistics=("class-means",), encodings=("f32",), min_samples=2), ""),
        (Policy(methods=("ncm",)), "fedproto is not in the policy any more"),
        (Policy(statistics=("feature-gram",)), "class-means is not in the policy any more"),
        (Policy(encodings=("f16",)), "f32 is not in the policy any more"),
        (Policy(min_samples=3), "it was made with classes below 3 samples"),
    ):
        found.policy = policy
        assert found.may_send(key) == why
        assert releases(tmp_path, bundle, Policy(encodings=("f16",))).may_send(key)  # which the ledger never had
    found.abstained(replace(asked, round=2), b"nothing")
    assert found.may_send((RUN, 2, "fedproto")) == ""


# ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────────


def entry(number: int, what: str = "round", cost: Cost = Cost(0.5, 1.0)) -> Entry:
    return Entry(what, "fleet", RUN, number, "ncm-dp", "noised", "f32", 1, 9, digest_of(b"%d" % number), cost)  # type: ignore[arg-type]


def test_the_same_bytes_are_one_release_and_what_costs_nothing_adds_nothing(tmp_path: Path) -> None:
    made = (entry(1), entry(2), entry(1), entry(3, "sat-out", Cost(0.0, 0.0)), entry(4, "round", Cost()))
    for new in ([True, True, False, True, True], [False] * 5):
        with Ledger(tmp_path / FILE) as ledger:
            assert [ledger.record(each, moment()) for each in made] == new
            spent = ledger.spent()
            assert (spent.releases, spent.of("add-remove"), spent.of("replace")) == (4, (1.0, 1), (2.0, 1))


def test_the_newest_release_of_a_round_is_the_one_that_counts(tmp_path: Path) -> None:
    with Ledger(tmp_path / FILE) as ledger:
        for payload in (b"first", b"second"):
            ledger.record(replace(entry(1), digest=digest_of(payload)), moment())
        newest = ledger.newest("fleet", RUN, 1, "ncm-dp")
        assert newest is not None
        assert newest.digest == digest_of(b"second")


def test_time_adds_up_over_releases(tmp_path: Path) -> None:
    with Ledger(tmp_path / FILE) as ledger:
        for number in range(4):
            ledger.record(entry(number), Moment("a", 1000.0 * number, 0.0))
        for most, wait_s in ((1, 9000.0), (2, 8000.0), (4, 6000.0), (5, 0.0)):
            assert ledger.free_in_s(most, 10_000.0, Moment("a", 4000.0, 0.0)) == wait_s
        ledger.record(entry(9, "sat-out", Cost(0.0, 0.0)), Moment("a", 4000.0, 0.0))
        assert ledger.free_in_s(1, 10_000.0, Moment("a", 4000.0, 0.0)) == 9000.0  # it says nothing of samples


def test_the_latest_wall_clock_is_remembered_when_it_is_set_back(tmp_path: Path) -> None:
    with Ledger(tmp_path / FILE) as ledger:
        ledger.record(entry(1), Moment("a", 10.0, 50_000.0))
        ledger.record(entry(2), Moment("b", 10.0, 1_000.0))
        assert ledger.free_in_s(1, 9_000.0, Moment("c", 10.0, 50_000.0)) == 9_000.0


def test_a_ledger_is_for_its_owner_alone_and_for_one_process(tmp_path: Path) -> None:
    with Ledger(tmp_path / "new" / FILE):
        assert (tmp_path / "new").stat().st_mode & 0o077 == 0
        assert (tmp_path / "new" / FILE).stat().st_mode & 0o077 == 0
        with pytest.raises(StoreError, match="expected to be its only user"):
            Ledger(tmp_path / "new" / FILE)


def test_time_passes_by_what_nobody_sets() -> None:
    at = Moment("a", 100.0, 5000.0)
    assert passed_s(at, Moment("a", 160.0, 1e9)) == 60.0  # the wall clock was set forward
    assert passed_s(at, Moment("a", 160.0, 0.0)) == 60.0  # and back
    assert passed_s(at, Moment("b", 10.0, 5300.0)) == 300.0  # over a restart of the system only it knows
    assert passed_s(at, Moment("b", 10.0, 4000.0)) == 0.0
    assert passed_s(Moment("", 1.0, 5000.0), Moment("", 9.0, 5002.0)) == 2.0
    assert passed_s(moment(), moment()) < 10.0


def test_a_clock_that_is_set_does_not_bring_the_next_release_nearer(bundle: Bundle, tmp_path: Path) -> None:
    """Two in a day, over restarts of the device and of the system."""
    clock = {"now": Moment("a", 100.0, 1e9)}
    found = releases(tmp_path, bundle, Policy(releases_per_day=2.0), now=lambda: clock["now"])
    for number in (1, 2):
        assert found.wait_s() == 0.0
        found.made(announcement(bundle, number), "f32", b"%d" % number, FEW)
    asked = announcement(bundle, 3)
    for now, hours in (
        (Moment("a", 3700.0, 1e9), 23.0),
        (Moment("a", 3700.0, 2e9), 23.0),
        (Moment("b", 5.0, 1e9 + 7200.0), 22.0),
        (Moment("b", 5.0, 5e8), 24.0),
    ):
        clock["now"] = now
        refused = found.refusal(asked, FEW)
        assert refused is not None
        assert (refused.word, found.wait_s()) == ("releases per day", hours * 3600)
    clock["now"] = Moment("b", 5.0, 1e9 + 86_400.0)
    assert found.refusal(asked, FEW) is None


def test_figures_of_a_status_are_releases_before_they_are_told_and_once(bundle: Bundle, tmp_path: Path) -> None:
    found, health = releases(tmp_path, bundle), Health(bytes(8), 1, {"profile_ms": 1.0})
    found.figures(health.figures)
    assert found._ledger.spent().releases == 0
    health.accuracy, health.samples_new = {"accuracy_all": 0.5}, 3
    for _ in range(2):
        found.figures(health.figures)
    health.samples_new = 4
    found.figures(health.figures)
    spent = found._ledger.spent()
    assert (spent.releases, spent.bare_add_remove, spent.bare_replace) == (2, 2, 2)


def test_noise_that_only_the_announcement_asks_for_is_stated_and_nothing_is_told_beside_it(
    bundle: Bundle, tmp_path: Path
) -> None:
    """With `aggregate --method ncm-dp` on another method's bundle no ε was stated, and accuracy told without noise."""
    made = releases(tmp_path, bundle)
    assert not made.is_private
    assert not made.cost_line()
    made.made(announcement(bundle, method="ncm-dp"), "f32", b"sums", FEW)
    assert made.is_private
    assert made.cost_line().startswith("ε = 1 at δ = 1e-05 for one sample more or fewer after 1 release")
    made.made(announcement(bundle, number=2, method="ncm"), "f32", b"means", FEW)
    assert made.cost_line() == "no ε holds: without noise went out 1 release"


def test_with_an_epsilon_a_status_says_nothing_that_follows_from_samples() -> None:
    open_, private = (
        Health(bytes(8), 1, {"profile_ms": 1.0}, is_private=lambda said=is_private: said)
        for is_private in (False, True)
    )
    for health in (open_, private):
        health.step_ms, health.unknown_share, health.proposed = 5.0, 0.25, {"owl": 7}
    measured = {"profile_ms", "peak_rss_bytes", "rss_bytes", "train_step_ms"}
    assert set(open_.birth().metrics) == {*measured, "unknown_share"}
    assert open_.birth().proposed == {"owl": 7}
    assert open_.released == {"unknown_share": 0.25, "proposed_classes": '{"owl": 7}'}
    assert dict(private.birth().metrics) == {"profile_ms": 1.0}
    assert (private.birth().proposed, private.released) == (None, {})
    held, asked = Policy(epsilon=1.0, delta=1e-6), Policy()
    assert not any(map(held.allows_figure, FIGURES))
    assert all(map(asked.allows_figure, FIGURES))


# ── a round ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def work(
    bundle: Bundle,
    journal: Journal,
    found: Releases,
    device: Device | None = None,
    *,
    follower: Follower | None = None,
    probation: ProbationWatch | None = None,
    blinding: Blinding | None = None,
) -> RoundWork:
    own = Follower("pi-1", bundle, is_done=journal.is_done, took_part=journal.took_part)
    device = device or Device(bundle, fashion(bundle, 12, (0, 3)), "pi-1", graphs=graphs_of(bundle))
    blinding = blinding or Blinding(bundle.manifest, fleet="fleet", device="pi-1")
    return RoundWork(
        Own(device, found, blinding, photos="photos"),
        Line(journal, Outbox(random.Random(0)), follower or own, "pi-1", 1),
        manager=ServiceManager({}),
        probation=probation,
    )


def journal_in(folder: Path, bundle: Bundle) -> Journal:
    return Journal(folder, fleet="fleet", device="pi-1", bundle=bundle.sha256)


def task(bundle: Bundle, number: int, **fields: object) -> Task:
    return Task(announcement(bundle, number, **fields), GlobalState(RUN, 0, 0))  # type: ignore[arg-type]


def test_a_round_that_is_refused_is_answered_before_anything_is_computed(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def computes(self: Device, *args: object, **named: object) -> None:
        raise AssertionError("something was computed of a sample")

    for name in ("run_round", "sit_out", "_summarise"):
        monkeypatch.setattr(Device, name, computes)
    with journal_in(tmp_path / "state", bundle) as journal:
        done = work(bundle, journal, releases(tmp_path, bundle, Policy(encodings=("f32",))))
        done.take_part(task(bundle, 1, encoding="int8"))
        (waits,) = journal.pending()
        assert journal.weights() == {}
    sent = decode(waits.payload)
    assert isinstance(sent, Contribution)
    assert (sent.round, len(sent.counts), sent.body.rows.size) == (1, 0, 0)
    assert done.refused == "round 1 (fedproto): encoding int8"
    assert said == [
        "round 1 (fedproto) is refused: its encoding is int8, the policy allows f32; nothing of the photos is sent"
    ]


def test_who_is_given_a_helper_sends_shares_alone_and_others_send_none(bundle: Bundle, tmp_path: Path) -> None:
    terms, device = HelperTerms(PUBLIC.seal, 2, SCALE_BITS), Device(bundle, fashion(bundle, 12, (0, 3)), "pi-1")
    own = Blinding(bundle.manifest, fleet="fleet", device="pi-1", helper=PUBLIC, signer=signer("pi-1"))
    with journal_in(tmp_path / "state", bundle) as journal:
        found = releases(tmp_path, bundle)
        for number, blinding, helper, refused in (
            (1, own, terms, ""),
            (2, own, None, "round 2 (ncm): not blinded"),
            (3, None, terms, "round 3 (ncm): blinded"),
        ):
            done = work(bundle, journal, found, device, blinding=blinding)
            done.take_part(task(bundle, number, method="ncm", helper=helper))
            sent = decode(journal.pending()[-1].payload)
            assert isinstance(sent, Contribution)
            assert (done.refused, sent.share is None) == (refused, bool(refused))
            assert (len(sent.counts), sent.body.rows.size, sent.triangle) == (0, 0, None)


def test_a_round_holds_no_class_with_fewer_than_the_policy_asks_for(bundle: Bundle, tmp_path: Path) -> None:
    data = fashion(bundle, 12, (0, 3))
    counts = sorted(int(count) for count in np.bincount(data.y) if count)
    with journal_in(tmp_path / "state", bundle) as journal:
        found = releases(tmp_path, bundle, Policy(min_samples=counts[-1]))
        done = work(bundle, journal, found, Device(bundle, data, "pi-1"))
        done.take_part(task(bundle, 1, method="ncm"))
        sent = decode(journal.pending()[-1].payload)
        assert isinstance(sent, Contribution)
        assert sorted(sent.counts) == [count for count in counts if count == counts[-1]]
        kept = found._ledger.newest("fleet", RUN, 1, "ncm")
        assert kept is not None
        assert kept.min_samples == counts[-1]


def test_sums_that_stand_hold_no_class_with_fewer_than_the_policy_asks_for(bundle: Bundle, tmp_path: Path) -> None:
    asked = announcement(bundle, 0, "ncm", phase="standing", extractor=bytes(32))
    data = fashion(bundle, 12, (0, 3))
    most = int(np.bincount(data.y).max())
    for least in (most, most + 1):
        with journal_in(tmp_path / str(least), bundle) as journal:
            found = releases(tmp_path, bundle, Policy(min_samples=least))
            done = work(bundle, journal, found, Device(bundle, data, "pi-1"))
            assert done.stand(asked)
            sent = decode(journal.pending()[-1].payload)
            assert isinstance(sent, Contribution)
            assert sorted(sent.counts) == [count for count in sorted(np.bincount(data.y)) if count >= least]


def test_nothing_waits_to_be_sent_that_is_not_in_the_ledger_and_a_repeated_round_counts_once(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power goes between the two: the ledger has it, the journal has not, and the round is done once more."""

    def off(self: Journal, *args: object, **named: object) -> None:
        raise StoreError("the power is off")

    with journal_in(tmp_path / "state", bundle) as journal:
        found = releases(tmp_path, bundle)
        for where, name, number in ((Journal, "commit_round", 1), (Ledger, "record", 2)):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, off)
                with pytest.raises(StoreError):
                    work(bundle, journal, found).take_part(task(bundle, number))
            assert (found._ledger.spent().releases, journal.pending()) == (1, [])
        work(bundle, journal, found).take_part(task(bundle, 1))
        (waits,) = journal.pending()
        assert found._ledger.spent().releases == 1
        kept = found._ledger.newest("fleet", *waits.key)
        assert kept is not None
        assert kept.digest == digest_of(waits.payload)


def test_a_state_directory_that_is_restored_does_not_take_its_ledger_back(bundle: Bundle, tmp_path: Path) -> None:
    """The policy names a ledger elsewhere: an older journal then repeats a round, which counts once more."""
    policy, data = Policy(releases_per_day=2.0), fashion(bundle, 13, (0, 3))
    found, words = releases(tmp_path, bundle, policy), list[str]()
    for copy, count in (("first", 12), ("an older copy", 13), ("an older copy again", 11)):
        with journal_in(tmp_path / copy, bundle) as journal:
            device = Device(bundle, replace(data, x=data.x[:count], y=data.y[:count]), "pi-1", graphs=graphs_of(bundle))
            done = work(bundle, journal, found, device)
            done.take_part(task(bundle, 1))
            words.append(done.refused)
    assert words == ["", "", "round 1 (fedproto): releases per day"]


@pytest.mark.parametrize("is_private", [False, True])
def test_with_an_epsilon_photos_do_not_decide_whether_a_rolled_out_bundle_stays(
    is_private: bool, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out photos of which all were named right before, and now are not: that is told by going back."""
    monkeypatch.setattr(Releases, "refusal", lambda self, asked, counts: None)  # of a method with an ε
    data, state = fashion(bundle, 12, (0, 3)), tmp_path / "state"
    policy = Policy(epsilon=4.0, delta=1e-6) if is_private else Policy()
    before, seat = InstalledBundle("1" * 64, 1, "fleet"), InstalledBundle("2" * 64, 2, "fleet")
    with journal_in(state, bundle) as journal, RolloutFile(state, make=True) as file:
        file.change(rollout_decisions.with_accuracy, 1.0)
        file.change(rollout_decisions.activated, seat, before)
        follower = Follower("pi-1", bundle, is_done=journal.is_done, took_part=journal.took_part)
        follower.restore(GlobalState(RUN, 1, 1))
        device = Device(bundle, data, "pi-1", test=fashion(bundle, 200, tuple(range(10))), graphs=graphs_of(bundle))
        found, watch = releases(tmp_path, bundle, policy), ProbationWatch(file)
        done = work(bundle, journal, found, device, follower=follower, probation=watch)
        done.take_part(task(bundle, 1))
        receipt = Receipt(RUN, 1, "fedproto", "committed")
        journal.record_receipt(receipt, 9)
        done.on_final_receipt(receipt)
        assert file.known.probation is not None
        assert done.unreported is not None
        done.report(done.unreported)
        assert watch.is_over != is_private
        assert file.known.active == (seat if is_private else before)


def test_sums_that_stand_wait_for_their_time_and_are_in_the_ledger(bundle: Bundle, tmp_path: Path) -> None:
    asked = announcement(bundle, 0, "ncm", phase="standing", extractor=bytes(32))
    first, second = fashion(bundle, 20, (0, 1)), fashion(bundle, 24, (0, 1))
    clock = {"now": Moment("a", 1.0, 1e9)}
    with journal_in(tmp_path / "state", bundle) as journal:
        sums = sums_of(Device(bundle, first, "pi-1", graphs=graphs_of(bundle)), journal)
        sums._releases = found = releases(tmp_path, bundle, Policy(releases_per_day=1.0), now=lambda: clock["now"])
        made = sums.make(asked, 1, 0.0)
        assert made is not None
        kept = found._ledger.newest("fleet", *made.report.key)
        assert kept is not None
        assert (kept.what, kept.round, kept.method, kept.cost) == ("standing", 1, "ncm", Cost())
        sums._device = Device(bundle, second, "pi-1", graphs=graphs_of(bundle))
        for hours in (0.0, 23.0):
            clock["now"] = Moment("a", 1.0 + 3600 * hours, 0.0)
            assert sums.make(asked, 1, 0.0) is None
            assert sums.waits_for() == "sums 2 wait until the policy allows another release"
        clock["now"] = Moment("a", 90_000.0, 0.0)
        assert sums.make(asked, 1, 0.0) is not None


# ── shown and told ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_its_owner_sees_what_has_left_a_device(tmp_path: Path) -> None:
    with Ledger(tmp_path / FILE) as ledger:
        ledger.put_terms(Terms(4.0, None, "replace"))
        ledger.record(entry(7), moment())
        ledger.record(entry(8, cost=Cost(None, 1.0)), moment())
        done = run("inspect", tmp_path, "--json", tmp_path / "told.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0badcafe 7" in done.stdout
    assert "2 releases, 18 bytes" in done.stdout
    assert "for one sample more or fewer: no ε holds, 1 release without" in done.stdout
    told = json.loads((tmp_path / "told.json").read_text())
    assert [(each["round"], each["cost"]) for each in told["releases"]] == [
        (7, {"add_remove": 0.5, "replace": 1.0}),
        (8, {"add_remove": None, "replace": 1.0}),
    ]
    assert told["spent"]["replace"] == 2.0
    assert read_ledger(tmp_path / FILE)[2] == Terms(4.0, None, "replace")
    (tmp_path / "empty").mkdir()
    assert "expected a state directory, with ledger.sqlite in it, got a folder without" in one_error_line(
        run("inspect", tmp_path / "empty")
    )


def test_the_operator_sees_the_newest_word_of_each_device_until_it_says_none(tmp_path: Path) -> None:
    store = Database(tmp_path / "store.sqlite", STORE)
    words, said = PolicyWords(store), {"policy": "round 3 (ffc): method ffc"}
    for versions in (said, said, {"policy": "round 4 (ffc): method ffc"}):
        words.hear("kitchen", versions)
        words.hear("porch", {"python": "3.11"})
    assert [event.word for event in words.commit_heard(1.0)] == ["round 4 (ffc): method ffc"]
    words.hear("kitchen", {"policy": "round 4 (ffc): method ffc"})
    words.hear("kitchen", {})  # a last will
    assert words.commit_heard(2.0) == []
    assert PolicyWords(store)._words == policy_words_in(store.connection) == {"kitchen": "round 4 (ffc): method ffc"}
    words.hear("kitchen", {"python": "3.11"})
    assert (words.commit_heard(3.0), dict(policy_words_in(store.connection))) == ([], {})
    store.close()


def test_what_shows_single_photos_is_said_to_the_owner_once(bundle: Bundle, tmp_path: Path, said: list[str]) -> None:
    with journal_in(tmp_path / "state", bundle) as journal:
        done = work(bundle, journal, releases(tmp_path, bundle))
        for number in (1, 2):
            done.take_part(task(bundle, number, method="ffc"))
    (line,) = (line for line in said if "single photos" in line)
    assert line.startswith("what is sent shows single photos: 12 samples: of fewer than")


_FIRST_READERS = """
import sys, threading
from protofleet.edge_client.privacy.policy import Policy, Recorded, read_record
sys.setswitchinterval(1e-6)
text, barrier = Recorded(1, Policy()).text(), threading.Barrier(8)
def read():
    barrier.wait()
    assert read_record(text).change == 1
readers = [threading.Thread(target=read) for _ in range(8)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
"""


def test_threads_that_are_the_first_to_read_a_record_at_once_do_not_end_the_process() -> None:
    """Two devices of one program. Where a decoder was made at the first use, one process of three ended by SIGSEGV."""
    codes = [subprocess.run([sys.executable, "-c", _FIRST_READERS], timeout=60).returncode for _ in range(8)]
    assert codes == [0] * 8
