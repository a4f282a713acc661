"""The objectives against naive loops written from the papers."""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofleet.contract.errors import MethodError
from protofleet.contract.methods import METHODS, Value
from protofleet.export import objectives
from protofleet.export.objectives import Scene, find_objective, unit_features

B, C, D = 7, 4, 6
REAL = 5  # the last two of the batch are padding
HYPER: dict[str, Value] = {"lambda": 0.7, "distance": "squared", "reading": "sample"}
fedproto, fedhp, fedhkd, spherefed = map(find_objective, ("fedproto", "fedhp", "fedhkd", "spherefed"))
HYPERS: dict[str, dict[str, Value]] = {
    "fedproto": HYPER,
    "fedhp": {"lambda": 0.3, "anchor_pull": "sum"},
    "fedhkd": {"lambda": 0.6, "gamma": 0.4, "temperature": 0.5},
    "spherefed": {},
}
CASES = [
    *HYPERS.items(),
    ("fedproto", {**HYPER, "distance": "l2"}),
    ("fedproto", {**HYPER, "reading": "class_mean"}),
    ("fedproto", {**HYPER, "pu_weight": 0.9}),
    ("fedhp", {"lambda": 0.3, "anchor_pull": "mean"}),
]
NAMES = [f"{name}-{index}" for index, (name, _) in enumerate(CASES)]


def _scene(seed: int = 0, *, unlabelled: int = 0) -> Scene:
    """A random step; of its samples the first `unlabelled` have no label."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, C, (B,), generator=g)
    y[:unlabelled] = -1
    return Scene(
        features=torch.randn(B, D, generator=g),
        y=y,
        sample_weight=torch.tensor([1.0] * REAL + [0.0] * (B - REAL)),
        head_weight=torch.randn(C, D, generator=g),
        head_bias=torch.randn(C, generator=g),
        prototypes=torch.randn(C, D, generator=g),
        prototype_mask=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        given={
            "soft_predictions": torch.softmax(torch.randn(C, C, generator=g), dim=1),
            "class_priors": torch.tensor([0.5, 0.3, 0.2, 0.0]),
            "prototypes.learned": torch.randn(C, D, generator=g),
            "prototypes.anchors": unit_features(torch.randn(C, D, generator=g)),
        },
    )


def _padded(scene: Scene, pad: int, seed: int) -> Scene:
    """The same step with `pad` more samples of weight 0, wild features and any label."""
    g = torch.Generator().manual_seed(seed)
    return replace(
        scene,
        features=torch.cat([scene.features, 100 * torch.randn(pad, D, generator=g)]),
        y=torch.cat([scene.y, torch.randint(-1, C, (pad,), generator=g)]),
        sample_weight=torch.cat([scene.sample_weight, torch.zeros(pad)]),
    )


# ── naive: plain Python floats, one loop for each sum sign ──


def _rows(tensor: Tensor | None) -> list[list[float]]:
    assert tensor is not None
    return tensor.tolist()


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


def _norm(a: Sequence[float]) -> float:
    return math.sqrt(_dot(a, a))


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [p - q for p, q in zip(a, b, strict=True)]


def _mean_row(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _distance(a: Sequence[float], b: Sequence[float], kind: str) -> float:
    gap = _minus(a, b)
    if kind == "l1":
        return sum(abs(g) for g in gap) / len(gap)
    return {"squared": _dot(gap, gap) / len(gap), "sum": _dot(gap, gap), "l2": _norm(gap)}[kind]


def _logits(scene: Scene, f: Sequence[float]) -> list[float]:
    bias = [0.0] * C if scene.head_bias is None else scene.head_bias.tolist()
    return [_dot(f, row) + b for row, b in zip(_rows(scene.head_weight), bias, strict=True)]


def _softmax(logits: Sequence[float]) -> list[float]:
    total = sum(math.exp(v) for v in logits)
    return [math.exp(v) / total for v in logits]


def _samples(scene: Scene) -> list[tuple[list[float], int]]:
    """The real samples that have a label."""
    weights = scene.sample_weight.tolist()
    return [
        (f, y)
        for f, y, weight in zip(_rows(scene.features), scene.y.tolist(), weights, strict=True)
        if weight > 0 and y >= 0
    ]


def _mean_entropy(scene: Scene) -> float:
    samples = _samples(scene)
    return sum(-math.log(_softmax(_logits(scene, f))[y]) for f, y in samples) / len(samples)


def _mean_pull(scene: Scene, kind: str) -> float:
    samples, mask, protos = _samples(scene), scene.prototype_mask.tolist(), _rows(scene.prototypes)
    return sum(mask[y] * _distance(f, protos[y], kind) for f, y in samples) / len(samples)


def _class_mean_pull(scene: Scene, kind: str) -> float:
    samples, mask, protos = _samples(scene), scene.prototype_mask.tolist(), _rows(scene.prototypes)
    total = 0.0
    for j in range(C):
        mine = [f for f, y in samples if y == j]
        if mine and mask[j]:
            total += _distance(_mean_row(mine), protos[j], kind)
    return total


def _risk(scene: Scene) -> float:
    """Kiryo et al.'s non-negative risk of each class against the rest, under the logistic loss."""

    def logistic(margin: float) -> float:
        return math.log(1.0 + math.exp(-margin))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    weights, ys = scene.sample_weight.tolist(), scene.y.tolist()
    alone = [f for f, y, weight in zip(_rows(scene.features), ys, weights, strict=True) if weight > 0 and y < 0]
    risks = []
    for j, prior in enumerate(scene.given["class_priors"].tolist()):
        if prior <= 0:
            continue
        positives = [_logits(scene, f)[j] for f, y in _samples(scene) if y == j]
        rest = mean([logistic(-_logits(scene, f)[j]) for f in alone]) - prior * mean([logistic(-g) for g in positives])
        risks.append(prior * mean([logistic(g) for g in positives]) + max(0.0, rest))
    return sum(risks) / len(risks)


# ── FedProto, FedPR ──


@pytest.mark.parametrize("reading", ["sample", "class_mean"])
@pytest.mark.parametrize("distance", ["squared", "l2", "l1", "sum"])
def test_fedproto_is_eq_5_and_6(distance: str, reading: str) -> None:
    scene, hyper = _scene(), {**HYPER, "distance": distance, "reading": reading}
    pull = (_mean_pull if reading == "sample" else _class_mean_pull)(scene, distance)
    assert float(fedproto(scene, hyper)) == pytest.approx(_mean_entropy(scene) + 0.7 * pull, rel=1e-5)


@pytest.mark.parametrize("distance", METHODS["fedpr"].hyper["distance"].choices)
def test_fedpr_is_eq_4_under_its_own_settings(distance: str) -> None:
    """FedPR's row has neither a reading nor a weight of unlabelled samples: the objective must do without them."""
    scene, hyper = _scene(), METHODS["fedpr"].resolve({"distance": distance, "lambda": 0.2})
    assert inspect.unwrap(find_objective(str(METHODS["fedpr"].objective))) is inspect.unwrap(fedproto)
    wanted = _mean_entropy(scene) + 0.2 * _mean_pull(scene, distance)
    assert float(fedproto(scene, hyper)) == pytest.approx(wanted, rel=1e-5)


def test_the_sum_is_d_times_the_mean_square() -> None:
    scene = _scene()
    mean, total = (float(fedproto(scene, {**HYPER, "distance": d}) - _mean_entropy(scene)) for d in ("squared", "sum"))
    assert total == pytest.approx(D * mean, rel=1e-4)


def test_fedproto_with_a_frozen_head_has_no_bias() -> None:
    without, zero = (fedproto(replace(_scene(), head_bias=bias), HYPER) for bias in (None, torch.zeros(C)))
    assert float(without) == pytest.approx(float(zero))


def test_lambda_zero_is_cross_entropy_alone() -> None:
    scene = _scene()
    loss = fedproto(replace(scene, prototypes=scene.prototypes * float("nan")), {**HYPER, "lambda": 0.0})
    wanted = torch.nn.functional.cross_entropy(scene.logits[:REAL], scene.y[:REAL])
    assert float(loss) == pytest.approx(float(wanted))


# ── samples without a label ──


@given(seed=st.integers(0, 10_000), unlabelled=st.integers(0, REAL - 1), weight=st.floats(0.1, 3.0))
@settings(max_examples=40, deadline=None)
def test_unlabelled_samples_add_the_non_negative_risk(seed: int, unlabelled: int, weight: float) -> None:
    scene = _scene(seed, unlabelled=unlabelled)
    wanted = _mean_entropy(scene) + 0.7 * _mean_pull(scene, "squared") + weight * _risk(scene)
    assert float(fedproto(scene, {**HYPER, "pu_weight": weight})) == pytest.approx(wanted, rel=1e-4)


def test_the_risk_is_never_negative_and_cut_where_it_would_be() -> None:
    """Unlabelled samples that the head is sure to be of no class, labelled ones that it is sure of: rest < 0."""
    scene = _scene(unlabelled=2)
    features = torch.zeros(B, D)
    features[2:, :C] = 20.0
    sure = replace(scene, features=features, head_weight=torch.eye(C, D), head_bias=torch.full((C,), -9.0))
    risk = float(fedproto(sure, {**HYPER, "pu_weight": 1.0}) - fedproto(sure, HYPER))
    assert risk == pytest.approx(_risk(sure), abs=1e-5)
    assert 0.0 <= risk < 1e-3


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=NAMES)
def test_an_unlabelled_sample_enters_nothing_but_the_risk(name: str, hyper: Mapping[str, Value]) -> None:
    """Without the risk, a batch with unlabelled samples costs what its labelled ones cost, and pulls on no other."""
    scene = _scene(unlabelled=2)
    scene = replace(scene, features=scene.features.requires_grad_())
    without_risk = {**hyper, "pu_weight": 0.0}
    labelled = replace(scene, sample_weight=scene.sample_weight * (scene.y >= 0))
    loss = find_objective(name)(scene, without_risk)
    wanted = find_objective(name)(labelled, without_risk)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0.0)
    loss.backward()
    assert not scene.features.grad[:2].any()
    if hyper.get("pu_weight"):
        scene.features.grad = None
        find_objective(name)(scene, hyper).backward()
        assert scene.features.grad[:2].any()


# ── FedHP ──


@given(seed=st.integers(0, 10_000), pull=st.sampled_from(["sum", "mean"]))
@settings(max_examples=30, deadline=None)
def test_fedhp_is_eq_1_2_and_4(seed: int, pull: str) -> None:
    scene = _scene(seed)
    learned, anchors = _rows(scene.given["prototypes.learned"]), _rows(scene.given["prototypes.anchors"])
    samples = _samples(scene)
    entropy = 0.0
    for f, y in samples:  # eq. 1
        entropy -= math.log(_softmax([-_norm(_minus(f, row)) for row in learned])[y]) / len(samples)
    apart = [1.0 - _dot(p, a) / (_norm(p) * _norm(a)) for p, a in zip(learned, anchors, strict=True)]  # eq. 2
    wanted = entropy + 0.3 * (sum(apart) if pull == "sum" else sum(apart) / C)  # eq. 4
    assert float(fedhp(scene, {"lambda": 0.3, "anchor_pull": pull})) == pytest.approx(wanted, rel=1e-4)


def test_fedhp_reads_no_global_prototype_and_no_head() -> None:
    scene, hyper = _scene(), HYPERS["fedhp"]
    other = replace(scene, prototypes=scene.prototypes * float("nan"), head_weight=None, head_bias=None)
    assert float(fedhp(other, hyper)) == float(fedhp(scene, hyper))


# ── FedHKD ──


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 3.0))
@settings(max_examples=30, deadline=None)
def test_fedhkd_distils_the_classes_that_have_knowledge(seed: int, temperature: float) -> None:
    scene = _scene(seed)
    mask, soft = scene.prototype_mask.tolist(), _rows(scene.given["soft_predictions"])
    apart = 0.0
    for j, centre in enumerate(_rows(scene.prototypes)):
        said = _softmax([logit / temperature for logit in _logits(scene, centre)])
        apart += mask[j] * _norm(_minus(said, soft[j])) / C
    wanted = _mean_entropy(scene) + 0.6 * apart + 0.4 * _mean_pull(scene, "l2")
    hyper = {**HYPERS["fedhkd"], "temperature": temperature}
    assert float(fedhkd(scene, hyper)) == pytest.approx(wanted, rel=1e-4)


def test_fedhkd_without_knowledge_is_cross_entropy() -> None:
    scene = replace(_scene(), prototype_mask=torch.zeros(C), prototypes=torch.zeros(C, D))
    assert float(fedhkd(scene, HYPERS["fedhkd"])) == pytest.approx(_mean_entropy(scene), rel=1e-5)


# ── SphereFed ──


def test_spherefed_is_eq_5() -> None:
    scene, total = _scene(), 0.0
    for f, y in _samples(scene):
        z = [value / _norm(f) for value in f]
        total += sum((_dot(z, row) - float(j == y)) ** 2 for j, row in enumerate(_rows(scene.head_weight))) / C
    assert float(spherefed(scene, {})) == pytest.approx(total / REAL, rel=1e-5)


def test_unit_features_have_length_one_and_zero_stays_zero() -> None:
    z = unit_features(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(z.numpy(), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


# ── what holds for each ──


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=NAMES)
def test_a_batch_of_padding_costs_nothing_and_pulls_nowhere(name: str, hyper: Mapping[str, Value]) -> None:
    scene = replace(_scene(), sample_weight=torch.zeros(B))
    pulled = [scene.features, scene.head_weight, scene.given["prototypes.learned"]]
    for tensor in pulled:
        tensor.requires_grad_()
    loss = find_objective(name)(scene, hyper)
    assert loss.item() == 0.0
    loss.backward()
    assert not any(tensor.grad.any() for tensor in pulled if tensor.grad is not None)


@given(
    seed=st.integers(0, 10_000),
    pad=st.integers(0, 5),
    unlabelled=st.integers(0, 3),
    case=st.integers(0, len(CASES) - 1),
)
@settings(max_examples=80, deadline=None)
def test_padding_never_counts(seed: int, pad: int, unlabelled: int, case: int) -> None:
    """Any batch with any padding costs, and pulls, what the batch alone does."""
    name, hyper = CASES[case]
    alone = _scene(seed, unlabelled=unlabelled)
    alone = replace(alone, features=alone.features.requires_grad_())
    wide = _padded(alone, pad, seed + 1)
    losses = [find_objective(name)(scene, hyper) for scene in (alone, wide)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-7)
    one, other = (torch.autograd.grad(loss, alone.features)[0] for loss in losses)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=NAMES)
def test_gradients_are_finite_where_distances_are_zero(name: str, hyper: Mapping[str, Value]) -> None:
    """Each feature stands on its class's prototype, learned or global; one is zero; Q is what the head says."""
    scene = _scene()
    protos = torch.zeros(C, D).index_copy(0, scene.y, scene.features)
    protos[scene.y[0]] = 0.0
    features = protos[scene.y].clone().requires_grad_()
    learned, head = protos.clone().requires_grad_(), scene.head_weight.clone().requires_grad_()
    scene = replace(scene, features=features, prototypes=protos, head_weight=head)
    said = torch.softmax(scene.answers(protos) / 0.5, dim=1).detach()
    given = {**scene.given, "prototypes.learned": learned, "soft_predictions": said}
    loss = find_objective(name)(replace(scene, given=given), hyper)
    loss.backward()
    assert torch.isfinite(loss)
    for tensor in (features, learned, head):
        assert tensor.grad is None or torch.isfinite(tensor.grad).all()


def test_every_method_that_trains_has_its_objective() -> None:
    names = {found.name for found in pkgutil.iter_modules(objectives.__path__)} - {"loss_terms"}
    assert {m.objective for m in METHODS.values() if m.objective} == names
    for name in names:
        assert callable(find_objective(name))


def test_an_objective_of_another_package_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_objective.py").write_text("def half(scene, hyper):\n    return 0.5 * scene.features.sum()\n")
    (tmp_path / "broken_objective.py").write_text("raise RuntimeError('no such board')\n")
    monkeypatch.syspath_prepend(tmp_path)
    scene = _scene()
    assert find_objective("foreign_objective:half")(scene, {}) == 0.5 * scene.features.sum()
    for name, words in (
        (
            "unheard",
            "objective unheard, expected a file of export/objectives or package.module:function, got ModuleNot",
        ),
        ("loss_terms", "objective loss_terms, expected a file .* got AttributeError"),
        ("foreign_objective:third", "objective foreign_objective:third, expected .* got AttributeError"),
        ("broken_objective:loss", "objective broken_objective:loss, .* got RuntimeError: no such board"),
    ):
        with pytest.raises(MethodError, match=words):
            find_objective(name)


def test_a_hyper_parameter_that_a_loss_reads_and_its_method_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the backbone, which `export` was about to record, nor a KeyError of somebody's loss."""
    with pytest.raises(MethodError, match=r"objective fedproto, expected .*`lambda`.* got pull, scale, try .*`hyper`"):
        find_objective("fedproto")(_scene(), {"scale": 1.0, "pull": 2.0})
    (tmp_path / "other_key.py").write_text("def loss(scene, hyper):\n    return {}[hyper['rate']]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError):  # a dictionary of its own
        find_objective("other_key:loss")(_scene(), {"rate": 0.1})
