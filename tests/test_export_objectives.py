"""The objectives against naive loops written from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.methods import METHODS
from export.objectives import OBJECTIVES, fedproto, spherefed, unit_features

HYPER = {"lambda": 0.7, "distance": "squared", "reading": "sample"}
B, C, D = 7, 4, 6


def _problem(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    f, w, b = torch.randn(B, D, generator=g), torch.randn(C, D, generator=g), torch.randn(C, generator=g)
    y = torch.randint(0, C, (B,), generator=g)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    return f, w, b, y, weight, torch.randn(C, D, generator=g), torch.tensor([1.0, 0.0, 1.0, 1.0])


def _naive_distance(a, b, kind):
    gaps = [float(p) - float(q) for p, q in zip(a, b, strict=True)]
    if kind == "squared":
        return sum(g * g for g in gaps) / len(gaps)
    if kind == "l1":
        return sum(abs(g) for g in gaps) / len(gaps)
    return math.sqrt(sum(g * g for g in gaps))


def _naive_entropy(f, w, b, y):
    logits = [sum(float(p) * float(q) for p, q in zip(f, row, strict=True)) + float(b[j]) for j, row in enumerate(w)]
    return math.log(sum(math.exp(v) for v in logits)) - logits[int(y)]


def _naive_fedproto(f, w, b, y, weight, protos, mask, hyper):
    real = [k for k in range(len(f)) if weight[k] > 0]
    entropy = sum(_naive_entropy(f[k], w, b, y[k]) for k in real) / len(real)
    if hyper["reading"] == "sample":
        pull = sum(float(mask[y[k]]) * _naive_distance(f[k], protos[y[k]], hyper["distance"]) for k in real) / len(real)
    else:
        pull = 0.0
        for j in range(len(protos)):
            rows = [f[k] for k in real if int(y[k]) == j]
            if rows and mask[j]:
                pull += _naive_distance(sum(rows) / len(rows), protos[j], hyper["distance"])
    return entropy + hyper["lambda"] * pull


@pytest.mark.parametrize("reading", ["sample", "class_mean"])
@pytest.mark.parametrize("distance", ["squared", "l2", "l1"])
def test_fedproto_is_eq_5_and_6(distance: str, reading: str):
    hyper = {**HYPER, "distance": distance, "reading": reading}
    problem = _problem()
    assert float(fedproto(*problem, hyper)) == pytest.approx(_naive_fedproto(*problem, hyper), rel=1e-5)


def test_fedproto_with_a_frozen_head_has_no_bias():
    f, w, _, *rest = _problem()
    without = fedproto(f, w, None, *rest, HYPER)
    assert float(without) == pytest.approx(float(fedproto(f, w, torch.zeros(C), *rest, HYPER)))


def test_lambda_zero_is_cross_entropy_alone():
    f, w, b, y, weight, protos, mask = _problem()
    loss = fedproto(f, w, b, y, weight, protos * float("nan"), mask, {**HYPER, "lambda": 0.0})
    wanted = torch.nn.functional.cross_entropy(f[:5] @ w.T + b, y[:5])
    assert float(loss) == pytest.approx(float(wanted))


def test_spherefed_is_eq_5():
    f, w, _, y, weight, protos, mask = _problem()
    total = 0.0
    for k in range(5):
        z = f[k] / f[k].norm()
        total += sum((float(z @ w[j]) - float(j == int(y[k]))) ** 2 for j in range(C)) / C
    assert float(spherefed(f, w, None, y, weight, protos, mask, {})) == pytest.approx(total / 5, rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_of_padding_costs_nothing_and_pulls_nowhere(name: str):
    f, w, b, y, _, protos, mask = _problem()
    f.requires_grad_()
    loss = OBJECTIVES[name](f, w, b, y, torch.zeros(B), protos, mask, HYPER)
    assert loss.item() == 0.0
    loss.backward()
    assert torch.equal(f.grad, torch.zeros_like(f))


def test_l2_has_a_finite_gradient_at_its_prototype():
    f, w, b, y, weight, _, mask = _problem()
    protos = torch.zeros(C, D).index_copy(0, y, f)
    f.requires_grad_()
    fedproto(f, w, b, y, weight, protos, mask, {**HYPER, "distance": "l2"}).backward()
    assert torch.isfinite(f.grad).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), pad=st.integers(0, 5), reading=st.sampled_from(["sample", "class_mean"]))
def test_padding_never_counts(seed: int, pad: int, reading: str):
    """Any batch with any padding costs what the batch alone costs."""
    f, w, b, y, _, protos, mask = _problem(seed)
    hyper = {**HYPER, "reading": reading}
    alone = fedproto(f, w, b, y, torch.ones(B), protos, mask, hyper)
    g = torch.Generator().manual_seed(seed + 1)
    wide = torch.cat([f, 100 * torch.randn(pad, D, generator=g)])
    labels = torch.cat([y, torch.randint(0, C, (pad,), generator=g)])
    weight = torch.cat([torch.ones(B), torch.zeros(pad)])
    assert float(fedproto(wide, w, b, labels, weight, protos, mask, hyper)) == pytest.approx(float(alone), rel=1e-5)


def test_unit_features_have_length_one_and_zero_stays_zero():
    z = unit_features(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(z.numpy(), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_every_method_that_trains_has_its_objective():
    assert {m.objective for m in METHODS.values() if m.objective} <= set(OBJECTIVES)
