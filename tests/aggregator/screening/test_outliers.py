"""Who is left out of a merge, and who counts for less; and that honest fleets are left alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.screening.outliers import OUTLIER, Screened, Screening, Traits
from protofleet.aggregator.screening.outliers import screen as screen_traits
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.privacy.mechanism import RowNoise
from protofleet.contract.sums.merge_rules import Source, merge
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Statistic
from protofleet.contract.wire.messages import Contribution

RUN = b"run1"
NAMES = [f"device-{i}" for i in range(5)]


def screen(source: Source, devices: list[str], **options: float) -> Screened:
    """As the coordinator does: by what each contribution's message shows."""
    made = [Contribution.of(s, run=RUN, round=1, method="fedproto", bundle=bytes(32)) for s in source()]
    traits = {device: Traits.of(message) for device, message in zip(devices, made, strict=True)}
    return screen_traits(source, traits, **options)


def _honest(i: int, classes: int = 4, width: int = 6, count: int = 50) -> ClassMeans:
    rng = np.random.default_rng([7, i])
    centres = np.random.default_rng(7).normal(size=(classes, width))
    return ClassMeans.from_means(centres + 0.1 * rng.normal(size=(classes, width)), np.full(classes, count))


def _fleet(liar: Statistic) -> list[Statistic]:
    return [*(_honest(i) for i in range(4)), liar]


def _merged(fleet: list[Statistic], **options: float) -> Statistic:
    return merge(screen(lambda: fleet, NAMES[: len(fleet)], **options).source)


@pytest.mark.parametrize("factor", [1e10, 1000.0, -10.0, 6.0])
@pytest.mark.parametrize("position", range(5))
def test_a_device_that_scales_its_means_is_left_out_and_named(factor: float, position: int) -> None:
    fleet = [_honest(i) for i in range(5)]
    fleet[position] = ClassMeans.from_means(fleet[position].means * factor, fleet[position].counts)
    screened = screen(lambda: fleet, NAMES)
    assert [(f.device, f.left_out) for f in screened.findings] == [(NAMES[position], True)]
    assert "at most 5 times the usual" in screened.findings[0].reason
    without = [s for i, s in enumerate(fleet) if i != position]
    np.testing.assert_array_equal(merge(screened.source).means, merge(lambda: without).means)


def test_hyper_knowledge_is_screened_as_class_means_are() -> None:
    good = [HyperKnowledge.from_means(_honest(i).means, np.full((4, 4), 0.25), [9] * 4) for i in range(4)]
    liar = HyperKnowledge.from_means(1e5 * np.ones((4, 6)), np.full((4, 4), 0.25), [9] * 4)
    assert [f.device for f in screen(lambda: [*good, liar], NAMES).findings] == ["device-4"]


@given(st.integers(0, 10_000), st.floats(0.05, 10.0), st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_class_of_one_sample_under_much_noise_is_no_outlier(seed: int, multiplier: float, length: float) -> None:
    """Noise on a mean goes with one over its samples: honest devices of few and of many must both stay."""
    rng, mechanism = np.random.default_rng(seed), RowNoise(1.0, multiplier, True)
    centres = length * unit_rows(rng.normal(size=(6, 64)))
    traits: dict[str, Traits] = {}
    for name in NAMES:
        counts = rng.integers(50, 200, 6) * (rng.random(6) < 0.6)
        counts[rng.integers(6)] = 1 if name == NAMES[0] else 50
        sent = mechanism.released(HyperKnowledge.from_means(centres, np.full((6, 6), 1 / 6), counts), rng)
        message = Contribution.of(sent, run=RUN, round=1, method="fedhkd", bundle=bytes(32))
        traits[name] = Traits.of(message, mechanism)
    assert not screen_traits(list, traits, max_share=1.0).findings
    loud = ClassMeans.from_means(np.full((6, 64), 1e4), np.full(6, 10_000))
    message = Contribution.of(loud, run=RUN, round=1, method="fedhkd", bundle=bytes(32))
    traits["liar"] = Traits.of(message, mechanism)
    assert [f.device for f in screen_traits(list, traits).findings if f.left_out] == ["liar"]


def test_less_than_half_of_the_devices_cannot_shift_what_is_usual() -> None:
    liars = [ClassMeans.from_means(1e4 * np.ones((4, 6)), [50] * 4) for _ in range(2)]
    fleet = [*liars, *(_honest(i) for i in range(3))]
    assert [f.device for f in screen(lambda: fleet, NAMES).findings] == NAMES[:2]


def test_of_two_the_longer_is_left_out_and_one_alone_never() -> None:
    long = ClassMeans.from_means(1e4 * np.ones((4, 6)), [50] * 4)
    assert [f.device for f in screen(lambda: [long, _honest(0)], NAMES[:2]).findings] == ["device-0"]
    assert not screen(lambda: [long], NAMES[:1]).findings
    assert not screen(lambda: [ClassMeans.zero(4, 6)], NAMES[:1]).findings


@given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.floats(1e-6, 1e6),
    st.floats(0.0, np.log(OUTLIER) / 2 - 0.01),
)
@settings(max_examples=80, deadline=None)
def test_devices_that_differ_by_less_than_the_factor_all_stay(seed, devices, scale, spread) -> None:
    rng = np.random.default_rng(seed)
    fleet = []
    for _ in range(devices):
        counts = rng.integers(0, 9, 4)
        lengths = scale * np.exp(rng.uniform(-spread, spread, (4, 1)))
        fleet.append(ClassMeans.from_means(unit_rows(rng.normal(size=(4, 6))) * lengths, counts))
    screened = screen(lambda: fleet, [f"d{i}" for i in range(devices)], max_share=1.0)
    assert not screened.findings
    np.testing.assert_array_equal(merge(screened.source).sums, merge(lambda: fleet).sums)


@pytest.mark.parametrize("count", [900, 10_000, 2**32 - 1])
def test_a_claim_counts_as_no_more_than_all_others_together(count: int) -> None:
    """The others have 4 × 4 × 50 samples; a liar's rows weigh half, whatever it claims."""
    lie = ClassMeans.from_means(-_honest(4).means, [count] * 4)
    screened = screen(lambda: _fleet(lie), NAMES)
    assert [(f.device, f.left_out) for f in screened.findings] == [("device-4", False)]
    assert f"{4 * count:,} samples, more than the others allow, count as 800" in screened.findings[0].reason
    merged, others = merge(screened.source), merge(lambda: [_honest(i) for i in range(4)])
    np.testing.assert_allclose(merged.means, (others.means + lie.means) / 2)


def test_a_share_of_one_weighs_as_the_devices_say_and_an_even_fleet_is_exact() -> None:
    lie = ClassMeans.from_means(_honest(4).means, [10_000] * 4)
    np.testing.assert_array_equal(_merged(_fleet(lie), max_share=1.0).sums, merge(lambda: _fleet(lie)).sums)
    even = _fleet(_honest(4))
    np.testing.assert_array_equal(_merged(even).sums, merge(lambda: even).sums)
    two = [_honest(0), lie]  # of two nobody can say who lies
    np.testing.assert_array_equal(_merged(two).sums, merge(lambda: two).sums)
    long = ClassMeans.from_means(1e4 * np.ones((4, 6)), [50] * 4)  # left out, which leaves two
    np.testing.assert_array_equal(_merged([*two, long]).sums, merge(lambda: two).sums)


@given(st.integers(0, 10_000), st.floats(0.5, 0.95))
@settings(max_examples=60, deadline=None)
def test_no_device_has_more_than_the_share_where_there_are_three(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    fleet = [
        ClassMeans.from_means(np.ones((4, 6)), (rng.pareto(0.3, 4) * rng.integers(0, 2, 4)).clip(0, 1e9).astype(int))
        for _ in range(5)
    ]
    before = np.array([s.counts for s in fleet])  # (devices, C)
    after = np.array([s.counts for s in screen(lambda: fleet, NAMES, max_share=share).source()])
    assert ((after > 0) == (before > 0)).all()
    if (before.sum(axis=1) > 0).sum() < 3:
        np.testing.assert_array_equal(after, before)
    else:  # no class is lost, which may leave a sample for each
        assert after.sum(axis=1).max() <= share * after.sum() + 4


def test_a_heavy_devices_ffc_sums_are_scaled_as_a_whole() -> None:
    rng = np.random.default_rng(3)
    z, y = unit_rows(rng.normal(size=(900, 5))), rng.integers(0, 3, 900)
    parts = [FeatureGram.of(z[a:b], y[a:b], 3) for a, b in ((0, 100), (100, 200), (200, 900))]
    screened = screen(lambda: parts, NAMES[:3])
    assert "700 samples, more than the others allow, count as 200" in screened.findings[0].reason
    *light, heavy = screened.source()
    np.testing.assert_allclose(heavy.gram, parts[2].gram * 2 / 7)
    np.testing.assert_allclose(heavy.cross, parts[2].cross * 2 / 7)
    assert (heavy.counts > 0).all()
    assert heavy.counts.sum() <= 200
    for before, after in zip(parts, light, strict=False):
        np.testing.assert_array_equal(after.gram, before.gram)


@pytest.mark.parametrize(("devices", "share"), [(3, 0.5), (6, 0.5), (7, 3 / 7), (20, 0.15), (100, 0.03)])
def test_by_itself_nobody_counts_for_more_than_half_or_three_even_shares(devices: int, share: float) -> None:
    counts = [10**6, *[100] * (devices - 1)]
    fleet = [ClassMeans.from_means(np.ones((1, 1)), [count]) for count in counts]
    traits = {f"d{at}": Traits(1.0, count, 1.0) for at, count in enumerate(counts)}
    after = [int(s.counts.sum()) for s in screen(lambda: iter(fleet), traits).source()]
    assert after[1:] == counts[1:]
    assert after[0] / sum(after) == pytest.approx(share, abs=0.01)
    sure = [int(s.counts.sum()) for s in screen(lambda: iter(fleet), traits, vouched=["d0"]).source()]
    assert sure[0] / sum(sure) == pytest.approx(0.5, abs=0.01)


def test_beside_who_is_vouched_for_the_others_share_what_is_left() -> None:
    """Three even shares are of all samples, those of devices that are vouched for and of gateways among them."""
    counts = [4_000, 5_000, *[100] * 8]
    fleet = [ClassMeans.from_means(np.ones((1, 1)), [count]) for count in counts]
    traits = {f"d{at}": Traits(1.0, count, 1.0) for at, count in enumerate(counts)}
    after = [int(s.counts.sum()) for s in screen(lambda: iter(fleet), traits, vouched=["d0"]).source()]
    assert after[0] == 4_000
    assert after[1] / sum(after) == pytest.approx(0.3, abs=0.001)
    gateway = Traits(0.0, 10_000, 0.0, 90)
    beside = [int(s.counts.sum()) for s in screen(lambda: iter(fleet), traits, beside=[gateway]).source()]
    assert max(beside) / (sum(beside) + 10_000) == pytest.approx(0.03, abs=0.001)


def test_even_shares_are_of_devices_that_have_samples() -> None:
    """Who refuses, or has no photos yet, makes nobody else's share smaller."""
    counts = [10**6, *[100] * 8, *[0] * 20]
    fleet = [ClassMeans.from_means(np.ones((1, 1)), [count]) for count in counts]
    traits = {f"d{at}": Traits(1.0, count, 1.0) for at, count in enumerate(counts)}
    after = [int(s.counts.sum()) for s in screen(lambda: iter(fleet), traits).source()]
    assert after[0] / sum(after) == pytest.approx(3 / 9, abs=0.001)


def test_how_a_round_was_screened_is_kept_also_as_earlier_stores_have_it() -> None:
    for how in (Screening(), Screening(0.5, "name", ("porch",)), Screening(vouched=("porch", "attic"))):
        assert Screening.read(how.written()) == how
    assert Screening.read(b"0.5 leave-out") == Screening(0.5)
    assert Screening.read(b"0.5") == Screening(0.5, "ignore")
