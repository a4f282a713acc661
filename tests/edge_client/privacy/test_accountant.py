"""The Gaussian mechanism's noise, measured; the accountant against another one; what a journal remembers of both."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edge_samples import announcement, fashion, graphs_of, releases, rounds_done
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec import structs

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import PrivacyError
from protofleet.contract.methods import METHODS, Value, method
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.privacy.mechanism import RowNoise
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Contribution, Phase
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.privacy import accountant
from protofleet.edge_client.privacy.accountant import Accountant, cost_of
from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import Cost, Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.training.extractor import Extractor
from tests.edge_client.privacy.test_policy import journal_in, task, work

SECRET, OTHER = bytes(32), bytes([1]) * 32
NOISED = [name for name in METHODS if name.endswith("-dp")]
ONE = np.array([0, 1, 0])  # one sample, whose mean is itself


def _epsilon(deviations: float, delta: float) -> float:
    """Another library's; it takes seconds to load, which a test run without these tests is spared."""
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(deviations, delta))


# ── on a device ──


@pytest.fixture(scope="module")
def noisy(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    """As other tests have it exported, with noise: no graph depends on that."""
    made = read_bundle(mnist_like_bundle("fedhkd", hyper={"epochs": 1, "temperature": 0.7}))
    hyper = {**made.manifest.hyper, "noise": 0.5, "clip": 0.8}
    return replace(made, manifest=structs.replace(made.manifest, hyper=hyper))


def test_a_device_sends_clipped_means_with_its_secrets_noise(noisy: Bundle) -> None:
    data = fashion(noisy, 40, (0, 3))
    device = Device(noisy, data, "pi-1", secret=SECRET, graphs=graphs_of(noisy))
    sent = device.run_round(announcement(noisy), None).contribution
    z = Extractor(noisy, {**noisy.params, **device.state()}).features(data.x).astype(np.float64)
    assert np.linalg.norm(z, axis=1).max() > 0.8
    for row, label in enumerate((0, 3)):
        clipped = [
            f * min(1.0, 0.8 / math.sqrt(sum(v * v for v in f))) for f, y in zip(z, data.y, strict=True) if y == label
        ]
        noise = (sent.body.rows[row] - sum(clipped) / len(clipped)) * len(clipped) / (2 * 0.8)
        assert noise.std() == pytest.approx(0.5, rel=0.25)  # 128 numbers
        assert abs(noise.mean()) < 0.25
    assert np.abs(sent.further[0].sum(axis=1) - 1).max() > 1e-3  # noised: no longer of sum 1


def test_a_repeated_round_has_the_same_noise_and_another_round_or_secret_another(noisy: Bundle) -> None:
    data = fashion(noisy, 24, (0, 3))

    def sent(secret: bytes, number: int) -> bytes:
        result = Device(noisy, data, "pi-1", secret=secret, graphs=graphs_of(noisy)).run_round(
            announcement(noisy, number), None
        )
        return encode(result.contribution, "f64")

    assert sent(SECRET, 1) == sent(SECRET, 1)
    assert len({sent(SECRET, 1), sent(OTHER, 1), sent(SECRET, 2)}) == 3


# ── the accountant ──


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """dp-accounting in this process, which has loaded it: another one takes seconds for that."""
    monkeypatch.setattr(accountant, "_epsilons", _epsilons)
    monkeypatch.setattr(accountant, "_AHEAD", 2)


def _epsilons(delta: float, costs: Sequence[float]) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert accountant._main([json.dumps([delta, *costs])]) == 0
    return list(json.loads(said.getvalue()))


def test_the_accountant_agrees_with_the_analytic_gaussian_mechanism(here: None) -> None:
    """Balle and Wang (ICML 2018), theorem 8: for one round and twenty of noise multiplier 1 on both of its parts."""
    accountant, each = Accountant(1e-5), cost_of(RowNoise(1.0, 1.0, True), ONE).replace
    assert each == pytest.approx(2.0)
    assert accountant.epsilon(0.0) == 0.0
    for rounds in (1, 20):
        mu, epsilon = math.sqrt(2.0 * rounds), accountant.epsilon(rounds * each)
        upper, lower = (0.5 * math.erfc((epsilon / mu + sign * mu / 2) / math.sqrt(2)) for sign in (-1, 1))
        assert upper - math.exp(epsilon) * lower == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.slow
def test_the_accountant_agrees_with_composed_privacy_loss_distributions() -> None:
    """In a process of its own, as on a device."""
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant, mechanism = Accountant(1e-5), RowNoise(1.0, 1.0, True)
    assert accountant.epsilon(0.0) == 0.0
    each = cost_of(mechanism, ONE).replace
    accountant.look_ahead([(0.0, each)])
    for rounds in (1, 20):
        other = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(1.0), rounds * 2))
        assert accountant.epsilon(rounds * each) == pytest.approx(other.get_epsilon(1e-5), rel=0.01)


def test_epsilon_is_that_of_means_that_can_be_anywhere_in_the_clip(here: None) -> None:
    """Of 3 and 4 samples: 3/σ and 4/σ deviations, 5/σ together, and again for the soft predictions. None of it holds
    where a sample comes or goes, since the counts are told."""
    cost = cost_of(RowNoise(1.0, 50.0, True), np.array([3, 0, 4]))
    assert cost.add_remove is None
    assert Accountant(1e-5).epsilon(cost.replace) == pytest.approx(_epsilon(10.0 / math.sqrt(2), 1e-5), rel=1e-5)


def test_what_goes_out_without_noise_has_no_epsilon_and_neither_has_noise_that_is_none() -> None:
    assert cost_of(None, ONE) == cost_of(RowNoise(1.0, 12.0, False), ONE) == Cost(None, None)
    assert cost_of(RowNoise(1.0, 1e-200, True), ONE) == Cost(None, None)


def test_one_sample_moves_every_class_by_way_of_the_weights_and_epsilon_covers_that(
    noisy: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices whose data differs in one image: what they release differs by no more than ε was counted for.

    By 2ζ/n in that image's class and nothing in the others, as if the network had not been trained on it, is not so.
    """
    released: list[HyperKnowledge] = []
    plain = RowNoise.released

    def watched(self: RowNoise, statistic: HyperKnowledge, rng: np.random.Generator) -> HyperKnowledge:
        released.append(statistic)
        return plain(self, statistic, rng)

    monkeypatch.setattr(RowNoise, "released", watched)
    data = fashion(noisy, 24, (0, 3))
    for x in (data.x, np.concatenate([255 - data.x[:1], data.x[1:]])):
        device = Device(noisy, replace(data, x=x), "pi-1", secret=SECRET, graphs=graphs_of(noisy))
        for number in (1, 2):
            device.run_round(announcement(noisy, number), None)
    mechanism, one, other = RowNoise.of(noisy.manifest.hyper), released[1], released[3]
    counts, sample_class = one.counts, int(data.y[0])
    moved = np.linalg.norm(one.means - other.means, axis=1)
    assert np.delete(moved, sample_class).max() > 1e-4  # not 0
    soft = np.linalg.norm(one.soft_means - other.soft_means, axis=1)
    in_deviations = math.hypot(
        np.linalg.norm(moved * counts) / (2 * mechanism.clip), np.linalg.norm(soft * counts) / math.sqrt(2)
    ) / mechanism.noise  # fmt: skip
    assert Accountant(1e-5).epsilon(cost_of(mechanism, counts).replace) >= _epsilon(1 / in_deviations, 1e-5)


def test_epsilon_is_rounded_up_and_never_less_than_it_is(here: None) -> None:
    for cost in (1e-6, 0.3, 7.0):
        assert Accountant(1e-5).epsilon(cost) > _epsilon(cost**-0.5, 1e-5)


def test_with_an_epsilon_noise_takes_the_place_of_min_samples(here: None, noisy: Bundle, tmp_path: Path) -> None:
    asked = announcement(noisy, 1, "ncm-dp")
    gate = releases(tmp_path, noisy, Policy(min_samples=5, epsilon=1e4, delta=1e-5))
    assert gate.refusal(asked, ONE) is None
    assert releases(tmp_path, noisy).is_private  # figures beside noised rows would tell what the noise hides


def test_releases_are_counted_with_the_samples_that_they_had(here: None, noisy: Bundle, tmp_path: Path) -> None:
    """Two rounds of 30 and 40 samples, then a start with 3 and 4: the first two do not become cheaper by that."""
    few, many = np.array([3, 0, 4]), np.array([30, 0, 40])
    strong = replace(noisy, manifest=structs.replace(noisy.manifest, hyper={**noisy.manifest.hyper, "noise": 500.0}))
    found = releases(tmp_path, strong)
    for number in (1, 2):
        found.made(announcement(strong, number), "f32", b"round %d" % number, many)
    before = found.facts()["epsilon"]
    found.made(announcement(strong, 2), "f32", b"round 2", many)  # the same bytes, sent again
    assert found.facts()["epsilon"] == before
    found.made(announcement(strong, 3), "f32", b"round 3", few)
    facts = found.facts()
    assert facts["epsilon"] == pytest.approx(_epsilon(500.0 / math.sqrt(2 * (2 * 50**2 + 5**2)), 1e-5), rel=1e-5)
    assert facts["epsilon"] == facts["epsilon_replace"] > before
    assert (facts["epsilon_add_remove"], facts["releases"], facts["releases_without_noise"]) == (None, 3, 0)
    which = "for one sample replaced by another of its class after 3 releases"  # since the counts are told
    assert found.cost_line() == f"ε = {facts['epsilon']:.3g} at δ = 1e-05 {which}"
    assert facts["of_its_class"]
    found.made(announcement(strong, 4, "ffc"), "f64", b"sums", few)
    assert found.cost_line() == "no ε holds: without noise went out 1 release"
    assert found.facts()["epsilon"] is None


def test_a_round_that_diverged_is_not_told_without_noise(noisy: Bundle) -> None:
    """That it diverged follows from the samples, too: noised rows go out, of the weights of before the round."""
    data = fashion(noisy, 24, (0, 3))
    asked = announcement(noisy)
    sat_out = Device(noisy, data, "pi-1", secret=SECRET, graphs=graphs_of(noisy)).sit_out(asked).contribution
    held = np.flatnonzero(np.bincount(data.y))
    np.testing.assert_array_equal(sat_out.body.classes, held)
    other = Device(noisy, data, "pi-1", secret=OTHER, graphs=graphs_of(noisy)).sit_out(asked).contribution
    assert np.abs(sat_out.body.rows - other.body.rows).min() > 0


# ── the budget ──


class Owner(RuleBasedStateMachine):
    """Whoever announces what he likes, rolls out what he likes, sets the wall clock back and switches the power off."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.wall_s, self.uptime_s, self.boot, self.true_s = 1e9, 5.0, 0, 0.0
        self.sent: list[tuple[float, str]] = []
        self.payloads: set[bytes] = set()
        self.ledger: Ledger | None = None

    @initialize(
        relation=st.sampled_from(["add-remove", "replace"]),
        epsilon=st.sampled_from([None, 0.5, 3.0]),
        most=st.sampled_from([None, 2.0, 0.5]),
        least=st.sampled_from([1, 5]),
        encodings=st.sampled_from([None, ("f32",)]),
        methods=st.sampled_from([None, ("fedhkd", "fedproto", "ncm-dp")]),
    )
    def owns(self, relation: str, epsilon: float | None, most: float | None, **lists: object) -> None:
        delta = None if epsilon is None else 1e-5
        fields = {"neighbours": relation, "epsilon": epsilon, "delta": delta, "releases_per_day": most}
        least = lists.pop("least")
        self.policy = Policy(**fields, min_samples=least, **lists)  # type: ignore[arg-type]
        self.starts(noise=100.0)

    def now(self) -> Moment:
        return Moment(str(self.boot), self.uptime_s, self.wall_s)

    @rule(noise=st.sampled_from([0.0, 1e-9, 1.0, 100.0, 1e4]))
    def starts(self, noise: float) -> None:
        """A restart, with a bundle that a roll-out may have brought."""
        if self.ledger is not None:
            self.ledger.close()
        self.ledger = Ledger(Path(self.folder.name) / "ledger.sqlite")
        fedhkd = method("fedhkd")
        hyper = fedhkd.resolve({"noise": noise})
        self.releases = Releases(self.policy, self.ledger, fleet="fleet", own=fedhkd, hyper=hyper, now=self.now)

    @rule(
        name=st.sampled_from(["fedhkd", "fedproto", "ffc", "ncm", "spherefed", *NOISED]),
        encoding=st.sampled_from(["f64", "f32"]),
        run=st.binary(min_size=4, max_size=4),
        number=st.integers(1, 3),
        least=st.integers(1, 9),
        standing=st.booleans(),
        counts=st.lists(st.integers(0, 40), min_size=3, max_size=3),
        crashes=st.booleans(),
    )
    def announces(
        self,
        name: str,
        encoding: str,
        run: bytes,
        number: int,
        least: int,
        standing: bool,
        counts: list[int],
        crashes: bool,
    ) -> None:
        phase = "standing" if standing else "open"
        asked = Announcement(run, number, phase, name, bytes(32), encoding=encoding, min_samples=least)  # type: ignore[arg-type]
        asked = self.releases.narrowed(asked)
        if self.releases.refusal(asked, np.array(counts)) is not None or (standing and self.releases.wait_s()):
            return
        payload = f"{asked}{counts}".encode()
        for _ in range(1 + crashes):  # after the ledger has it, and before anything else does: it is made once more
            self.releases.made(asked, asked.encoding, payload, np.array(counts))
        if payload not in self.payloads:  # the same bytes tell nothing more
            self.payloads.add(payload)
            self.sent.append((self.true_s, name))

    @rule(hours=st.floats(0.0, 30.0), reboots=st.booleans(), back_s=st.floats(0.0, 1e6))
    def time_passes(self, hours: float, reboots: bool, back_s: float) -> None:
        self.true_s += 3600 * hours
        self.wall_s += 3600 * hours - back_s
        self.uptime_s = 1.0 if reboots else self.uptime_s + 3600 * hours
        self.boot += reboots

    @invariant()
    def nothing_is_loosened(self) -> None:
        if self.ledger is None:
            return
        spent, policy = self.ledger.spent(), self.policy
        if policy.epsilon is not None:
            cost, bare = spent.of(policy.neighbours)
            assert not bare
            assert not cost or _epsilon(cost**-0.5, 1e-5) <= policy.epsilon
        entries = self.ledger._db.execute("SELECT method, encoding, min_samples FROM release").fetchall()
        for name, encoding, least in entries:
            assert policy.methods is None or name in policy.methods
            assert policy.encodings is None or encoding in policy.encodings
            assert least >= policy.min_samples
        if policy.releases_per_day is not None:
            window_s, most = 86_400 / min(policy.releases_per_day, 1.0), max(int(policy.releases_per_day), 1)
            times = [at for at, _ in self.sent]
            assert all(later - first >= window_s - 1 for first, later in zip(times, times[most:], strict=False))

    def teardown(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
        self.folder.cleanup()


def test_no_sequence_of_announcements_bundles_and_restarts_loosens_a_policy(here: None) -> None:
    run_state_machine_as_test(
        Owner, settings=settings(max_examples=25, stateful_step_count=15, deadline=None, derandomize=True)
    )


def test_a_release_that_would_exceed_the_budget_is_refused_before_it_is_made(here: None, tmp_path: Path) -> None:
    bundle, policy = _strong(), Policy(epsilon=2.5, delta=1e-5, neighbours="replace")
    path, done = tmp_path / "ledger.sqlite", 0
    for _ in range(2):  # the same by a process that starts later
        with Ledger(path) as ledger:
            found = Releases(policy, ledger, fleet="fleet", own=method("fedhkd"), hyper=bundle)
            while (refused := found.refusal(_asked(done + 1), ONE)) is None:
                found.made(_asked(done + 1), "f32", b"%d" % done, ONE)
                done += 1
                assert found.cost_line().startswith(
                    f"ε = {found.facts()['epsilon']:.3g} of 2.5 at δ = 1e-05 for one sample"
                )
            spent = found.facts()["epsilon"]
            assert 0 < spent <= 2.5 < _epsilon(12.0 / math.sqrt(2 * (done + 1)), 1e-5)
            assert refused.word == "epsilon is spent"
            assert refused.line.startswith(f"ε = {spent:.3g} of 2.5 is spent, and it would be ")
    assert done > 1


def test_rounds_of_noised_sums_take_place_until_the_budget_is_spent(
    here: None, noisy: Bundle, tmp_path: Path, said: list[str]
) -> None:
    """On a device, of any bundle: the second round of a budget for one is answered without a row."""
    found = method("ncm-dp")
    cost = cost_of(found.mechanism(found.resolved_in(noisy.manifest.hyper)), ONE)
    assert cost.add_remove is not None
    policy = Policy(epsilon=1.01 * _epsilon(cost.add_remove**-0.5, 1e-5), delta=1e-5)
    gate = releases(tmp_path, noisy, policy)
    with journal_in(tmp_path / "state", noisy) as journal:
        gate.begin(journal)
        done = work(noisy, journal, gate)
        for number, rows, refused in ((1, 10, ""), (2, 0, "round 2 (ncm-dp): epsilon is spent")):
            done.take_part(task(noisy, number, method="ncm-dp"))
            sent = decode(journal.pending()[-1].payload)
            assert isinstance(sent, Contribution)
            assert (len(sent.counts), done.refused) == (rows, refused)
    spent = gate._ledger.spent()
    assert (spent.releases, spent.add_remove, spent.bare_add_remove) == (2, cost.add_remove, 0)
    assert " for one sample more or fewer after 1 release" in said[0]


@pytest.mark.parametrize(
    ("name", "relation", "why"),
    [
        ("ffc", "replace", "the policy asks an ε of every release, ffc adds no noise"),
        ("fedhkd", "add-remove", "the policy asks an ε of every release, fedhkd has none for one sample more or fewer"),
    ],
)
def test_with_a_budget_what_has_no_epsilon_is_refused(name: str, relation: str, why: str, tmp_path: Path) -> None:
    policy = Policy(epsilon=2.5, delta=1e-5, neighbours=relation)  # type: ignore[arg-type]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        found = Releases(policy, ledger, fleet="fleet", own=method("fedhkd"), hyper=_strong())
        for phase in ("open", "standing"):
            refused = found.refusal(_asked(1, name, phase), ONE)
            assert refused is not None
            assert (refused.word, refused.line) == ("no epsilon", why)
        assert found.refusal(_asked(1, "spherefed"), ONE) is None  # it sends nothing of the samples


@pytest.mark.parametrize("own", ["fedproto", "fedhkd"])
def test_with_a_budget_noise_is_what_a_bundle_has_of_it(own: str, tmp_path: Path) -> None:
    """FedHKD adds none unless its bundle says so; `ffc-dp` and `ncm-dp` add theirs on any."""
    policy = Policy(epsilon=2.5, delta=1e-5, neighbours="replace")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        found = Releases(policy, ledger, fleet="fleet", own=method(own), hyper=method(own).resolve({}))
        refused = found.refusal(_asked(1), ONE)
        assert refused is not None
        assert refused.line == "the policy asks an ε of every release, fedhkd adds no noise, as this bundle has it"
        assert found._cost(method("ffc-dp"), ONE).replace is not None


def test_a_budget_does_not_hold_over_what_left_before_it_or_beside_the_ledger(here: None, tmp_path: Path) -> None:
    """A ledger that was lost, or restored from an older copy, is found out by what the journal holds."""
    policy = Policy(epsilon=2.5, delta=1e-5, neighbours="replace")
    with _journal(tmp_path) as journal:
        journal.commit_round((b"run1", 1, "fedhkd"), weights={}, payload=b"x", limit_bytes=1000, metrics={})
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            found = Releases(policy, ledger, fleet="fleet", own=method("fedhkd"), hyper=_strong())
            for _ in range(2):
                with pytest.raises(
                    PrivacyError, match=r"epsilon = 2.5 in the policy cannot hold, .* got 1 release without"
                ):
                    found.begin(journal)


def _strong() -> dict[str, Value]:
    return method("fedhkd").resolve({"noise": 12.0})


def _asked(number: int, name: str = "fedhkd", phase: Phase = "open") -> Announcement:
    return Announcement(b"run1", number, phase, name, bytes(32))


# ── the journal ──


def _journal(directory: Path) -> Journal:
    return Journal(directory, fleet="fleet", device="pi-1", bundle=bytes(32))


def test_a_secret_is_the_state_directorys_own_and_stays(tmp_path: Path) -> None:
    secrets = []
    for directory in ("a", "a", "b"):
        with _journal(tmp_path / directory) as journal:
            secrets += [journal.secret(), journal.secret()]
    assert len(secrets[0]) == 32
    assert len(set(secrets[:4])) == 1
    assert secrets[4] != secrets[0]


def test_rounds_done_counts_each_method_over_all_runs(tmp_path: Path) -> None:
    with _journal(tmp_path) as journal:
        assert rounds_done(journal, "fedhkd") == 0
        for key in ((b"run1", 1, "fedhkd"), (b"run1", 2, "fedhkd"), (b"run1", 3, "ffc"), (b"run2", 1, "fedhkd")):
            journal.commit_round(key, weights={}, payload=b"x", limit_bytes=1000, metrics={})
    with _journal(tmp_path) as journal:
        assert (rounds_done(journal, "fedhkd"), rounds_done(journal, "ffc")) == (3, 1)
        assert rounds_done(journal) == 4
