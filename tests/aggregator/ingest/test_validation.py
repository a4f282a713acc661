"""What a contribution carries: whatever data an honest device has passes, in every encoding; lies do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.ingest.validation import Terms, _slack, check_content, check_sums
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import emptied, held_by, left_of
from protofleet.aggregator.screening.outliers import Traits
from protofleet.contract.errors import StatisticError, WireError
from protofleet.contract.heads.sphere import projection, unit_rows
from protofleet.contract.methods import METHODS
from protofleet.contract.methods import method as method_of
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.privacy.mechanism import RowNoise
from protofleet.contract.sums.plausibility import LARGEST_NORM, improbable, usual_norm
from protofleet.contract.sums.statistics import ClassMeans, FactoredGram, FeatureGram, Rows, Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import ClassRows, Contribution, Encoding

RUN, BUNDLE = b"run1", bytes(32)
ENCODINGS: tuple[Encoding, ...] = ("f64", "int32", "f32", "f16", "int8")


def _message(statistic: Statistic, method: str, encoding: Encoding = "f64") -> Contribution:
    message = Contribution.of(statistic, run=RUN, round=1, method=method, bundle=BUNDLE)
    received = decode(encode(message, encoding))
    assert isinstance(received, Contribution)
    return received


def _check(message: Contribution, statistic: Statistic, terms: Terms = Terms()) -> None:
    check_content(message, terms, bundles=(BUNDLE,), classes=statistic.classes, width=statistic.width)


def _data(seed: int, samples: int, classes: int, width: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, D) of many kinds, and labels (N,) that leave classes out."""
    rng = np.random.default_rng(seed)
    y = rng.choice(rng.permutation(classes)[: rng.integers(1, classes + 1)], samples)
    z = {
        "dense": lambda: rng.normal(size=(samples, width)),
        "positive": lambda: np.abs(rng.normal(size=(samples, width))),
        "sparse": lambda: rng.normal(size=(samples, width)) * (rng.random((samples, width)) < 0.1),
        "constant": lambda: np.tile(rng.normal(size=width), (samples, 1)),
        "by class": lambda: rng.normal(size=(classes, width))[y],
        "one large": lambda: np.concatenate([np.ones((samples, 1)), np.full((samples, width - 1), 0.05)], axis=1),
        "zero": lambda: np.zeros((samples, width)),
        "some zero": lambda: rng.normal(size=(samples, width)) * (rng.random((samples, 1)) < 0.5),
        "wide": lambda: rng.normal(size=(samples, width)) * np.exp(rng.normal(size=width) * 6),
    }[kind]()
    return z, y


KINDS = ("dense", "positive", "sparse", "constant", "by class", "one large", "zero", "some zero", "wide")
shapes = st.tuples(
    st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 12), st.integers(1, 90), st.sampled_from(KINDS)
)


@given(shapes, st.sampled_from(ENCODINGS), st.booleans())
@settings(max_examples=250, deadline=None)
def test_sums_of_any_data_pass_in_every_encoding(shape, encoding: Encoding, projected: bool) -> None:
    z, y = _data(*shape)
    z = unit_rows(z)
    if projected:
        z = z @ projection(z.shape[1], max(1, z.shape[1] // 2), 3)
    statistic = FeatureGram.of(z, y, shape[2])
    terms = Terms(encoding=encoding)
    _check(_message(statistic, "ffc", encoding), statistic, terms)
    if encoding != "int8":  # made before a restart that announced a finer one
        _check(_message(statistic, "ffc", encoding), statistic, Terms(encoding="f64"))


@given(shapes, st.sampled_from(["f64", "f32", "f16"]))
@settings(max_examples=60, deadline=None)
def test_a_device_that_computes_in_float32_or_sends_a_finer_encoding_passes(shape, encoding: Encoding) -> None:
    z, y = _data(*shape)
    statistic = FeatureGram.of(unit_rows(z.astype(np.float32)), y, shape[2])
    _check(_message(statistic, "ffc", encoding), statistic, Terms(encoding="f16"))


@pytest.mark.parametrize("width", [128, 512])
def test_sums_of_a_wide_extractor_pass_in_float16(width: int) -> None:
    rng = np.random.default_rng(width)
    z = unit_rows(np.maximum(rng.normal(size=(3 * width, width)) + 0.3, 0))
    statistic = FeatureGram.of(z, rng.integers(0, 10, len(z)), 10)
    _check(_message(statistic, "ffc", "f16"), statistic, Terms(encoding="f16"))


def _good(seed: int = 0, samples: int = 400, width: int = 32) -> FeatureGram:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 5, samples)
    z = unit_rows(np.maximum(rng.normal(size=(5, width))[y] + rng.normal(size=(samples, width)), 0))
    return FeatureGram.of(z, y, 5)


def _packed(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(len(matrix))]


def _indefinite(good: FeatureGram) -> FeatureGram:
    """The same diagonal and entries of the same size, whose signs are drawn."""
    signs = np.triu(np.random.default_rng(1).choice([-1.0, 1.0], (good.width, good.width)), 1)
    return replace(good, gram=_packed(good.matrix * (signs + signs.T + np.eye(good.width))))


LIES = {
    "indefinite": _indefinite,
    "cross sums at their limit": lambda g: replace(g, cross=np.tile(g.counts[:, None], (1, g.width)).astype(float)),
    "cross sums twice as large": lambda g: replace(g, cross=2.0 * g.cross),
    "sums three times as large": lambda g: replace(g, gram=3.0 * g.gram, cross=3.0 * g.cross),
    "half the count": lambda g: replace(g, counts=g.counts // 2),
    "a Gram that is too small": lambda g: replace(g, gram=1e-3 * g.gram),
    "no Gram at all": lambda g: replace(g, gram=0.0 * g.gram),
    "a class moved to another": lambda g: replace(g, cross=np.roll(g.cross, 1, axis=0) * 1.4),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("encoding", ["f64", "int32", "f32", "f16"])
def test_sums_that_no_unit_features_have_are_refused(lie: str, encoding: Encoding) -> None:
    good = _good()
    _check(_message(good, "ffc", encoding), good, Terms(encoding=encoding))
    forged = LIES[lie](good)
    with pytest.raises(WireError, match="gram"):
        _check(_message(forged, "ffc", encoding), forged, Terms(encoding=encoding))


@pytest.mark.parametrize(("encoding", "rounded"), [("f64", 1e-6), ("f32", 1.2e-6), ("f16", 1e-3), ("int8", 0.018)])
def test_a_trace_above_the_samples_by_more_than_is_rounded_is_refused(encoding: Encoding, rounded: float) -> None:
    """Each feature has length 1. `rounded` is what the encoding may have changed, a share of the samples."""
    good = _good()
    check_sums(replace(good, gram=good.gram * (1 + 0.5 * rounded)), encoding)
    with pytest.raises(WireError, match="a trace of at most 400"):
        check_sums(replace(good, gram=good.gram * (1 + 1.5 * rounded)), encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_schur_complement_judges_as_the_whole_matrix_does(encoding: Encoding) -> None:
    """Cross sums are scaled up to where an eigenvalue of M itself falls below −τ, and a little less or more."""
    for seed in range(15):
        good = _good(seed, samples=20, width=8)
        whole = np.block([[good.matrix, good.cross.T], [good.cross, np.diag(good.counts)]])

        def fits(factor: float, good: FeatureGram = good, whole: np.ndarray = whole) -> bool:
            scaled = whole.copy()
            scaled[:8, 8:] *= factor
            scaled[8:, :8] *= factor
            slack = _slack(replace(good, cross=good.cross * factor), encoding)
            return bool(np.linalg.eigvalsh(scaled)[0] >= -slack)

        low, high = 1.0, 4.0
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        check_sums(replace(good, cross=good.cross * low * (1 - 1e-5)), encoding)
        with pytest.raises(WireError, match="an eigenvalue that no data can have"):
            check_sums(replace(good, cross=good.cross * high * (1 + 1e-5)), encoding)


@given(shapes, st.sampled_from(ENCODINGS), st.sampled_from(["fedproto", "fedpr", "fedhp"]), st.integers(-3, 3))
@settings(max_examples=120, deadline=None)
def test_class_means_of_any_features_pass(shape, encoding: Encoding, method: str, magnitude: int) -> None:
    seed, samples, classes, width, kind = shape
    if kind == "wide":
        kind = "dense"
    z, y = _data(seed, samples, classes, width, kind)
    statistic = ClassMeans.of(z * 10.0**magnitude, y, classes)
    _check(_message(statistic, method, encoding), statistic)


@given(shapes, st.sampled_from(ENCODINGS), st.sampled_from([0.01, 1.0, 20.0]))
@settings(max_examples=120, deadline=None)
def test_soft_predictions_of_any_network_pass(shape, encoding: Encoding, sharpness: float) -> None:
    z, y = _data(*shape)
    logits = np.random.default_rng(shape[0]).normal(size=(len(y), shape[2])) * sharpness
    soft = np.exp(logits - logits.max(axis=1, keepdims=True))
    statistic = HyperKnowledge.of(np.clip(z, -1e3, 1e3), soft / soft.sum(axis=1, keepdims=True), y, shape[2])
    _check(_message(statistic, "fedhkd", encoding), statistic)


@given(shapes, st.sampled_from(["f64", "f32", "f16"]), st.sampled_from([0.1, 1.0, 8.0]), st.sampled_from([0.5, 30.0]))
@settings(max_examples=120, deadline=None)
def test_declared_noise_passes(shape, encoding: Encoding, multiplier: float, clip: float) -> None:
    z, y = _data(*shape)
    hyper = {"noise": multiplier, "clip": clip, "noise_on": "all"}
    mechanism, soft = RowNoise.of(hyper), np.full((len(y), shape[2]), 1.0 / shape[2])
    plain = HyperKnowledge.of(mechanism.clipped(z), soft, y, shape[2])
    statistic = mechanism.released(plain, np.random.default_rng(shape[0]))
    _check(_message(statistic, "fedhkd", encoding), statistic, Terms(noise=mechanism))


def _knowledge(soft: np.ndarray, scale: float = 1.0) -> HyperKnowledge:
    classes = len(soft)
    return HyperKnowledge.from_means(scale * np.ones((classes, 4)), soft, np.full(classes, 10))


@pytest.mark.parametrize(
    "soft",
    [np.full((3, 3), -1e20), np.full((3, 3), 0.5), np.eye(3) * 2 - 0.5, np.eye(3) * 0.0, 1.5 * np.eye(3) - 0.25],
)
def test_soft_predictions_that_are_no_probabilities_are_refused(soft: np.ndarray) -> None:
    good = _knowledge(np.full((3, 3), 1 / 3))
    for encoding in ENCODINGS:
        _check(_message(good, "fedhkd", encoding), good)
    forged = _knowledge(soft)
    for encoding in ("f64", "f32"):
        with pytest.raises(WireError, match="soft predictions of class 0, expected probabilities"):
            _check(_message(forged, "fedhkd", encoding), forged)


def test_noise_excuses_no_more_than_it_explains() -> None:
    loud = _knowledge(np.full((3, 3), 5.0), scale=0.2)
    little = Terms(noise=RowNoise(clip=1.0, noise=0.01, predictions=True))
    with pytest.raises(WireError, match="soft predictions"):
        _check(_message(loud, "fedhkd"), loud, little)
    long = _knowledge(np.full((3, 3), 1 / 3), scale=100.0)
    with pytest.raises(WireError, match="the mean of class 0"):
        _check(_message(long, "fedhkd"), long, little)
    _check(_message(long, "fedhkd"), long)  # without clipping nobody says how long features are
    endless = _knowledge(np.full((3, 3), 1 / 3), scale=1e8)
    with pytest.raises(WireError, match="the mean of class 0"):  # whatever a bundle declares
        _check(_message(endless, "fedhkd"), endless, Terms(noise=RowNoise(clip=1e9, noise=1.0, predictions=True)))
    features_only = Terms(noise=RowNoise(clip=1e3, noise=50.0, predictions=False))
    with pytest.raises(WireError, match="soft predictions"):
        _check(_message(loud, "fedhkd"), loud, features_only)


@pytest.mark.parametrize("row", [[-0.5, 0.75, 0.75], [1.2, 0.0, 0.0], [0.4, 0.4, 0.4]])
def test_below_zero_above_one_and_another_sum_are_each_improbable(row: list[float]) -> None:
    assert improbable(np.array([[0.5, 0.25, 0.25], row]), np.zeros(2)).tolist() == [False, True]


@pytest.mark.parametrize("deviations", [4.0, 30.0])
def test_noise_explains_soft_predictions_by_its_own_deviation(deviations: float) -> None:
    noise = RowNoise(clip=10.0, noise=1.0, predictions=True)
    off = deviations * np.sqrt(2.0) / 10  # √2 σ/n, over the 10 samples of each class
    moved = _knowledge(np.tile([1 / 3 + off, 1 / 3 - off, 1 / 3], (3, 1)))
    if deviations < 10:
        _check(_message(moved, "fedhkd"), moved, Terms(noise=noise))
        return
    with pytest.raises(WireError, match="soft predictions of class 0"):
        _check(_message(moved, "fedhkd"), moved, Terms(noise=noise))


@pytest.mark.parametrize("method", ["fedproto", "fedhp", "fedpr"])
def test_means_that_would_end_training_are_refused(method: str) -> None:
    forged = ClassMeans.from_means(np.full((3, 4), 1e15), [10, 10, 10])
    with pytest.raises(WireError, match=r"the mean of class 0, expected a norm of at most 1.01e\+06, got 2e\+15"):
        _check(_message(forged, method), forged)
    assert LARGEST_NORM == 1e6


@pytest.mark.parametrize("method", ["ncm", "fedcof"])
def test_who_forgot_to_scale_features_to_length_1_is_told_so(method: str) -> None:
    kind = method_of(method).statistic
    means = ClassMeans.from_means(np.full((3 * kind.GROUPS, 4), 1.5), np.full(3 * kind.GROUPS, 10))
    forged = kind(means.sums, means.counts)
    with pytest.raises(WireError, match=r"the mean of class 0, .*, since its features have length 1, got 3"):
        _check(_message(forged, method), forged)


@pytest.mark.parametrize("method", ["fedproto", "fedhkd", "ffc"])
def test_a_class_below_min_samples_is_refused(method: str) -> None:
    z, y = unit_rows(np.random.default_rng(0).normal(size=(23, 4))), np.repeat([0, 2], [20, 3])
    made: dict[str, Statistic] = {
        "fedproto": ClassMeans.of(z, y, 3),
        "fedhkd": HyperKnowledge.of(z, np.full((23, 3), 1 / 3), y, 3),
        "ffc": FeatureGram.of(z, y, 3),
    }
    statistic = made[method]
    _check(_message(statistic, method), statistic, Terms(min_samples=3))
    with pytest.raises(WireError, match="class 2, expected at least 4 examples, as announced, got 3"):
        _check(_message(statistic, method), statistic, Terms(min_samples=4))


def test_a_count_that_no_device_has_is_refused() -> None:
    forged = ClassMeans.from_means(np.ones((3, 4)), [10, 2**32 - 1, 10])
    with pytest.raises(WireError, match="at most 1,000,000 samples of one device, got 4,294,967,315"):
        _check(_message(forged, "fedproto"), forged)
    _check(_message(forged, "fedproto"), forged, Terms(max_samples=2**33))


def test_nothing_at_all_passes() -> None:
    """A device whose classes are all withheld, or whose training diverged, says that it took part."""
    for statistic, method in (
        (ClassMeans.zero(3, 4), "fedproto"),
        (HyperKnowledge.zero(3, 4), "fedhkd"),
        (FeatureGram.zero(3, 4), "ffc"),
    ):
        _check(_message(statistic, method), statistic, Terms(min_samples=50))


@pytest.mark.parametrize("diagonal", [1.0, 0.0])
def test_a_gram_without_rows_is_refused(diagonal: float) -> None:
    """Sums of no samples are zero, also beside a diagonal that is: its trace says nothing of the rest."""
    rows, gram = ClassRows(np.zeros(0, np.uint16), np.zeros((0, 4))), np.full((4, 4), 1e30)
    gram[np.diag_indices(4)] = diagonal
    forged = Contribution(RUN, 1, "ffc", BUNDLE[:4], rows, np.zeros(0, np.uint64), _packed(gram))
    with pytest.raises(WireError, match="gram, expected zeros, as the sum of no samples"):
        check_content(forged, Terms(), bundles=(BUNDLE,), classes=3, width=4)


def test_the_usual_norm_is_the_lower_middle_one() -> None:
    assert usual_norm([]) == usual_norm([0.0]) == 0.0
    assert usual_norm([5.0, 0.0, 1.0]) == 1.0
    assert usual_norm([5.0, 1e9, 1.0]) == 5.0


# ── one extractor ──


EXTRACTOR, OTHER = bytes(range(32)), bytes(range(100, 132))


def _sums(*, extractor: bytes = EXTRACTOR, bundle: bytes = BUNDLE) -> Contribution:
    made = Contribution.of(_good(), run=RUN, round=1, method="ffc", bundle=bundle, extractor=extractor)
    received = decode(encode(made, "f64"))
    assert isinstance(received, Contribution)
    return received


def test_another_bundle_with_the_rounds_extractor_is_accepted() -> None:
    """Sums add up over one extractor, whatever else a device's bundle holds; without one the bundle must be known."""
    terms = Terms(extractor=EXTRACTOR)
    for bundle in (BUNDLE, OTHER):
        _check(_sums(bundle=bundle), _good(), terms)
    with pytest.raises(WireError, match=r"bundle, expected sha256 00000000…, got 64656667…"):
        _check(_sums(extractor=b"", bundle=OTHER), _good())


@pytest.mark.parametrize("bundle", [BUNDLE, OTHER])
@pytest.mark.parametrize(("extractor", "got"), [(OTHER, "64656667…"), (b"", "none")])
def test_sums_over_a_wrong_extractor_or_an_unnamed_one_are_refused(bundle: bytes, extractor: bytes, got: str) -> None:
    with pytest.raises(WireError, match=f"extractor, expected sha256 00010203…, got {got}"):
        _check(_sums(extractor=extractor, bundle=bundle), _good(), Terms(extractor=EXTRACTOR))


def test_an_extractor_is_refused_where_each_device_has_its_own() -> None:
    statistic = ClassMeans.from_means(np.ones((3, 4)), [10, 10, 10])
    made = Contribution.of(statistic, run=RUN, round=1, method="fedproto", bundle=BUNDLE, extractor=EXTRACTOR)
    with pytest.raises(WireError, match="extractor, expected none in a round of fedproto, got 00010203…"):
        _check(made, statistic)


# ── a statistic with checks of its own ──


@dataclass(frozen=True, eq=False)
class _Short(ClassMeans):
    """Class means that say of themselves what they may be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if np.abs(self.sums).max(initial=0.0) > 100.0:
            raise StatisticError("short means", expected="sums of at most 100", got="more")


def test_what_a_statistic_asks_of_itself_is_asked_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be refused first where a round's contributions merge, and end the aggregator."""
    assert not ClassMeans.has_checks()
    monkeypatch.setattr(type(method_of("fedproto")), "statistic", _Short)
    for length in (1.0, 20.0):
        made = ClassMeans.from_means(np.full((3, 4), length), [10, 10, 10])
        if length < 10:
            _check(_message(made, "fedproto"), made)
            continue
        with pytest.raises(WireError, match="short means, expected sums of at most 100"):
            _check(_message(made, "fedproto"), made)


# ── a statistic whose rows travel as sums, as any method may declare ──


@dataclass(frozen=True, eq=False)
class _Travelling(Statistic):
    """Sums of features, of unit features and of probabilities, and no means."""

    NAME: ClassVar[str] = "sums"
    FIELDS: ClassVar = (
        Rows("far", travels="sums"),
        Rows("near", travels="sums", holds="unit-features"),
        Rows("soft", "classes", travels="sums", holds="probabilities"),
    )
    far: np.ndarray
    near: np.ndarray
    soft: np.ndarray
    counts: np.ndarray


@pytest.fixture
def summing(monkeypatch: pytest.MonkeyPatch) -> str:
    method = type("Summing", (FedProto,), {"name": "summing", "statistic": _Travelling})()
    monkeypatch.setitem(METHODS._known, method.name, method)  # type: ignore[attr-defined]
    return method.name


def _travelling(counts: list[int], *, far: float = 1e4, near: float = 1.0, soft: float = 1.0) -> _Travelling:
    """Sums over so many samples, each of these norms, or of that sum."""
    rng, n = np.random.default_rng(0), np.array(counts)
    rows = [unit_rows(rng.normal(size=(len(n), 6))) for _ in range(2)]
    said = rng.dirichlet(np.ones(len(n)), len(n))
    return _Travelling(
        *(row * n[:, None] * size for row, size in zip((*rows, said), (far, near, soft), strict=True)), n
    )


@pytest.mark.parametrize("encoding", ["f64", "f32", "int8"])
def test_sums_over_many_samples_are_held_to_what_their_means_can_be(summing: str, encoding: Encoding) -> None:
    honest = _travelling([1, 90_000, 0, 300])
    _check(_message(honest, summing, encoding), honest, Terms(encoding=encoding))
    for lie in ({"far": 2 * LARGEST_NORM}, {"near": 1.5}, {"soft": 3.0}):
        with pytest.raises(WireError):
            _check(_message(_travelling([1, 90_000, 0, 300], **lie), summing), honest)


def test_devices_are_compared_by_their_means_where_sums_travel(summing: str) -> None:
    few, many = (Traits.of(_message(_travelling(counts), summing)) for counts in ([1, 2, 0, 3], [9_000, 1, 0, 7]))
    assert few.longest == pytest.approx(1e4)
    assert many.longest == pytest.approx(1e4)
    assert many.certain == pytest.approx(1e4)


@given(shapes, st.sampled_from(ENCODINGS[:4]))
def test_a_factor_of_any_data_passes(shape, encoding: Encoding) -> None:
    seed, samples, classes, width, kind = shape
    z, y = _data(seed, min(samples, width), classes, width, kind)
    unit = np.asarray(unit_rows(z), dtype=np.float64)
    sent = FactoredGram.of(unit, y, classes, np.random.default_rng(seed))
    if sent is None:  # then a device sends the triangle
        return
    message = _message(sent, "ffc", encoding)
    _check(message, sent, Terms(encoding=encoding))
    found = message.statistic(FeatureGram, classes, width)
    assert (found.gram == sent.whole.gram).all()
    assert message.triangle is None


def _by_factor(samples: int = 20, width: int = 32) -> tuple[Contribution, FactoredGram]:
    z, y = _data(0, samples, 5, width, "by class")
    sent = FactoredGram.of(np.asarray(unit_rows(z), dtype=np.float64), y, 5, np.random.default_rng(0))
    assert sent is not None
    return _message(sent, "ffc"), sent


FACTOR_LIES = {
    "coarse units, by which a trace may be any": (lambda c: replace(c, factor_bits=2), "finer one, or the triangle"),
    "rows that are longer than the samples allow": (
        lambda c: replace(c, factor=np.clip(c.factor.astype(np.int32) * 2, -32768, 32767).astype(np.int16)),
        "trace of at most 20",
    ),
    "no rows, but sums of classes": (lambda c: replace(c, factor=c.factor[:0]), "an eigenvalue that no data can have"),
    "sums beyond the rows": (
        lambda c: replace(c, body=ClassRows(c.body.classes, c.body.rows * 1.5)),
        "an eigenvalue that no data can have",
    ),
    "fewer samples than there are": (lambda c: replace(c, counts=np.ones_like(c.counts)), "gram"),
    "rows for another width": (
        lambda c: replace(c, factor=c.factor[:, :16], body=ClassRows(c.body.classes, c.body.rows[:, :16])),
        "width",
    ),
    "for class means": (lambda c: replace(c, method="ncm"), "another statistic"),
    "for noised sums": (
        lambda c: replace(c, method="ffc-dp", further=(np.ones((len(c.counts), 1)),)),
        "expected a triangle, got a factor",
    ),
}


@pytest.mark.parametrize("lie", FACTOR_LIES)
def test_a_factor_that_no_samples_have_is_refused(lie: str) -> None:
    message, sent = _by_factor()
    _check(message, sent)
    forged, why = FACTOR_LIES[lie]
    with pytest.raises(WireError, match=why):
        _check(forged(message), sent)


@pytest.mark.parametrize(
    "fields",
    [
        {"factor": np.ones((33, 32), np.int16)},
        {"factor": np.ones((2, 31), np.int16)},
        {"factor_bits": 21},
        {"factor": None},
        {"triangle": np.zeros(32 * 33 // 2)},
        {"devices": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_factor_beside_what_it_cannot_be_beside_is_no_message(fields: dict) -> None:
    message, _ = _by_factor()
    with pytest.raises(WireError):
        replace(message, **fields)


def test_a_gateway_of_devices_that_send_factors_may_have_their_rounding() -> None:
    """The trace of a device's rounded rows may be above its samples, and so may that of the sum of such devices."""
    sums = [_by_factor(samples)[0].statistic(FeatureGram, 5, 32) for samples in range(5, 25)]
    traces = np.array([np.trace(each.matrix) / each.counts.sum() for each in sums])
    assert (traces > 1 + 1e-6).any()  # else this shows nothing
    nothing = decode(emptied(encode(_by_factor()[0], "f64")))
    nothing = replace(nothing, factor=None, factor_bits=0, body=nothing.body, triangle=None)
    for devices in ([sums[int(traces.argmax())]], sums):
        total = ExactSum.zero(FeatureGram, 5, 32)
        for each in devices:
            total = total.add(ExactSum.of(each))
        _check(total.for_others(FeatureGram, 32, len(devices), nothing), sums[0])
    loud = ExactSum.of(replace(sums[0], gram=sums[0].gram * 1.01))
    with pytest.raises(WireError, match="a trace of at most"):
        _check(loud.for_others(FeatureGram, 32, 1, nothing), sums[0])


def test_a_forgotten_class_cannot_be_taken_out_of_a_factor() -> None:
    message, sent = _by_factor()
    held = int(message.body.classes[0])
    assert left_of(message, (held,)) is None
    with pytest.raises(WireError, match="forgotten"):
        _check(message, sent, Terms(withheld=(held,)))
    nothing = held_by(emptied(encode(message, "f64")))
    assert nothing.factor is not None
    assert nothing.factor.shape == (0, 32)
    assert nothing.samples == 0
    assert not nothing.statistic(FeatureGram, 5, 32).gram.any()
