"""The Gaussian mechanism's noise, measured; the accountant against another one; what a journal remembers of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from edge_samples import announcement, fashion

import edge_client.privacy
from contract.bundle import Bundle, read_bundle
from contract.errors import PrivacyError, UsageError
from contract.mechanism import RowNoise
from contract.methods import method
from contract.methods.fedhkd import HyperKnowledge
from contract.wire import encode
from edge_client.device import Device
from edge_client.extractor import Extractor
from edge_client.journal import Journal
from edge_client.privacy import Accountant
from edge_client.service import _accountant

SECRET, OTHER = bytes(32), bytes([1]) * 32
ONE = np.array([0, 1, 0])  # one sample, whose mean is itself


def _epsilon(deviations: float, delta: float) -> float:
    """Another library's; it takes seconds to load, which a test run without these tests is spared."""
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(deviations, delta))


# ── on a device ──


@pytest.fixture(scope="module")
def noisy(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle("fedhkd", hyper={"noise": 0.5, "clip": 0.8, "epochs": 1}))


def test_a_device_sends_clipped_means_with_its_secrets_noise(noisy: Bundle) -> None:
    data = fashion(noisy, 40, (0, 3))
    device = Device(noisy, data, "pi-1", secret=SECRET)
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
        result = Device(noisy, data, "pi-1", secret=secret).run_round(announcement(noisy, number), None)
        return encode(result.contribution, "f64")

    assert sent(SECRET, 1) == sent(SECRET, 1)
    assert len({sent(SECRET, 1), sent(OTHER, 1), sent(SECRET, 2)}) == 3


# ── the accountant ──


@pytest.mark.parametrize(("noise", "predictions", "delta"), [(1.0, True, 1e-5), (4.0, False, 1e-6)])
def test_the_accountant_agrees_with_composed_privacy_loss_distributions(
    noise: float, predictions: bool, delta: float
) -> None:
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    mechanism = RowNoise(1.0, noise, predictions)
    accountant = Accountant(mechanism, delta, None, 0, method="fedhkd", counts=ONE)
    assert accountant.epsilon() == 0.0
    for rounds in (1, 20):
        other = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(noise), rounds * (1 + predictions)))
        assert accountant.epsilon(rounds) == pytest.approx(other.get_epsilon(delta), rel=0.01)


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
        device = Device(noisy, replace(data, x=x), "pi-1", secret=SECRET)
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
    accountant = Accountant(mechanism, 1e-5, None, 0, method="fedhkd", counts=counts)
    assert accountant.epsilon(1) >= _epsilon(1 / in_deviations, 1e-5)


def test_epsilon_is_that_of_means_that_can_be_anywhere_in_the_clip() -> None:
    """Of 3 and 4 samples: 3/σ and 4/σ deviations, 5/σ together, and again for the soft predictions."""
    accountant = Accountant(RowNoise(1.0, 50.0, True), 1e-5, None, 0, method="fedhkd", counts=np.array([3, 0, 4]))
    assert accountant.epsilon(1) == pytest.approx(_epsilon(10.0 / math.sqrt(2), 1e-5))


def test_rounds_are_counted_with_the_samples_that_they_had() -> None:
    """Two rounds of 30 and 40 samples, then a start with 3 and 4: the first two do not become cheaper by that."""
    few, many = np.array([3, 0, 4]), np.array([30, 0, 40])
    mechanism = RowNoise(1.0, 500.0, True)
    first = Accountant(mechanism, 1e-5, None, 0, method="fedhkd", counts=many)
    for _ in range(2):
        first.count("fedhkd")
    earlier = 2 * first.cost
    then = Accountant(mechanism, 1e-5, None, 2, method="fedhkd", counts=few, earlier=earlier)
    assert then.epsilon() == pytest.approx(first.epsilon())
    assert then.epsilon(1) == pytest.approx(_epsilon(500.0 / math.sqrt(2 * (2 * 50**2 + 5**2)), 1e-5))
    then.count("fedhkd")
    assert then.epsilon() == then.epsilon(0) > first.epsilon()


def test_photos_that_come_weigh_in_from_then_on() -> None:
    mechanism = RowNoise(1.0, 500.0, True)
    now = Accountant(mechanism, 1e-5, None, 1, method="fedhkd", counts=np.array([50, 50, 5]))
    now.count("fedhkd")
    before = now.epsilon()
    now.hold(np.array([50, 60, 5]))
    assert now.epsilon() == pytest.approx(before)
    sums = 2 * (2 * (2 * 50**2 + 5**2) + 50**2 + 60**2 + 5**2)  # of two rounds, and of the third
    assert now.epsilon(1) == pytest.approx(_epsilon(500.0 / math.sqrt(sums), 1e-5))


def test_a_device_that_has_fewer_samples_than_before_does_not_forget_what_it_told(tmp_path: Path) -> None:
    """What the service makes of a journal with a round over many samples."""
    manifest = SimpleNamespace(method="fedhkd", hyper=method("fedhkd").settle({"noise": 500.0}), classes=3)
    many, few = (SimpleNamespace(counts=lambda classes, n=n: np.array([n, 0, n])) for n in (40, 3))
    settings = SimpleNamespace(epsilon=None)
    with _journal(tmp_path) as journal:
        before = _accountant(settings, manifest, journal, many)
        told = {"noise_cost": before.cost}
        journal.commit_round((b"run1", 1, "fedhkd"), weights={}, payload=b"x", limit_bytes=1000, metrics=told)
        before.count("fedhkd")
        now = _accountant(settings, manifest, journal, few)
        assert now.epsilon() == pytest.approx(before.epsilon())
        assert now.cost == pytest.approx(2 * 18.0 / 500.0**2)


def test_a_round_that_diverged_is_not_told_without_noise(noisy: Bundle) -> None:
    """That it diverged follows from the samples, too: noised rows go out, of the weights of before the round."""
    data = fashion(noisy, 24, (0, 3))
    asked = announcement(noisy)
    sat_out = Device(noisy, data, "pi-1", secret=SECRET).sit_out(asked).contribution
    held = np.flatnonzero(np.bincount(data.y))
    np.testing.assert_array_equal(sat_out.body.classes, held)
    other = Device(noisy, data, "pi-1", secret=OTHER).sit_out(asked).contribution
    assert np.abs(sat_out.body.rows - other.body.rows).min() > 0


def test_a_round_that_would_exceed_the_budget_is_refused_before_it_is_done() -> None:
    mechanism, budget = RowNoise(1.0, 12.0, True), 2.5
    accountant, done = Accountant(mechanism, 1e-5, budget, 0, method="fedhkd", counts=ONE), 0
    while accountant.epsilon(1) <= budget:
        accountant.check("fedhkd")
        accountant.count("fedhkd")
        assert accountant.told().startswith(f"ε = {accountant.epsilon():.3g} of 2.5 at δ = 1e-05 after {done + 1} ")
        done += 1
    assert done > 1
    assert 0 < accountant.epsilon() <= budget
    facts = {"epsilon": accountant.epsilon(), "delta": 1e-5, "budget": budget, "rounds": done}
    assert accountant.facts() == {**facts, "rounds_without_noise": 0}
    for spent in (
        accountant,
        Accountant(mechanism, 1e-5, budget, done, method="fedhkd", counts=ONE),
    ):  # and by a process that starts later
        with pytest.raises(PrivacyError) as refused:
            spent.check("fedhkd")
        line = str(refused.value)
        assert line.startswith(f"the privacy budget is spent: ε = {accountant.epsilon():.3g}, δ = 1e-05, {done} rounds")
        assert f"expected at most ε = 2.5, got {accountant.epsilon(1):.3g} with another round" in line
        assert "\n" not in line
        assert refused.value.exit_code == 1


def test_the_accountant_goes_on_beyond_its_first_table() -> None:
    accountant = Accountant(RowNoise(1.0, 200.0, True), 1e-5, None, 0, method="fedhkd", counts=ONE)
    last = edge_client.privacy._ROUNDS_AT_ONCE - 1  # that was computed at the start
    before = accountant.epsilon(last)
    for _ in range(last):
        accountant.count("fedhkd")
    assert accountant.epsilon() == before
    assert accountant.epsilon(1) == pytest.approx(_epsilon(200.0 / math.sqrt((last + 1) * 2), 1e-5))


def test_with_a_budget_a_round_without_noise_is_refused() -> None:
    accountant = Accountant(RowNoise(1.0, 12.0, True), 1e-5, 2.5, 0, method="fedhkd", counts=ONE)
    for other in ("ffc", "fedproto", "anything"):
        with pytest.raises(PrivacyError) as refused:
            accountant.check(other)
        assert str(refused.value) == (
            "--epsilon 2.5: nothing is released without noise, expected a round of fedhkd, which adds it, "
            f"got a round of {other}, which adds none, try aggregate --no-calibrate, or this client without --epsilon"
        )
    accountant.check("fedhkd")
    with pytest.raises(PrivacyError, match="the fleet's sums stand, expected rounds of fedhkd"):
        accountant.check_standing()


@pytest.mark.parametrize(("predictions", "bare"), [(True, 1), (False, 0)])
def test_no_epsilon_is_stated_where_something_went_out_without_noise(predictions: bool, bare: int) -> None:
    mechanism = RowNoise(1.0, 12.0, predictions)
    accountant = Accountant(mechanism, 1e-5, None, 1, method="fedhkd", counts=ONE, bare=bare)
    accountant.count("fedhkd")
    assert accountant.told().startswith("no ε holds: ")
    assert accountant.facts()["epsilon"] is None
    assert (accountant.facts()["rounds"], accountant.facts()["rounds_without_noise"]) == (2, bare)
    with pytest.raises(PrivacyError if bare else UsageError) as refused:
        Accountant(mechanism, 1e-5, 2.5, 1, method="fedhkd", counts=ONE, bare=bare)
    assert str(refused.value).startswith("--epsilon 2.5")


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
        assert journal.rounds_done("fedhkd") == 0
        for key in ((b"run1", 1, "fedhkd"), (b"run1", 2, "fedhkd"), (b"run1", 3, "ffc"), (b"run2", 1, "fedhkd")):
            journal.commit_round(key, weights={}, payload=b"x", limit_bytes=1000, metrics={})
    with _journal(tmp_path) as journal:
        assert (journal.rounds_done("fedhkd"), journal.rounds_done("ffc")) == (3, 1)
        assert journal.rounds_done() == 4
