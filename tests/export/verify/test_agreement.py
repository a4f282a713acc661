"""What counts as equal to torch, and what does not, on any processor."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from protofleet.contract.errors import ExportError
from protofleet.export.steps.optimizers import BETAS, _bias_correction
from protofleet.export.verify.agreement import Agreement, distances, uneven, worst_agreement

EPSILON = float(np.finfo(np.float32).eps)


def _right(*tensors: str) -> list[Agreement]:
    return [Agreement(1e-6, 1e-6, name) for name in tensors]


def _wrong(*tensors: str) -> list[Agreement]:
    return [Agreement(1e-3, 1e-6, name) for name in tensors]


def test_torchs_own_rounding_sets_the_bound():
    for torch_error in (0.0, 1e-6, 1e-2):
        bound = 16 * (torch_error + 4 * EPSILON)
        assert Agreement(0.99 * bound, torch_error, "w").holds
        assert not Agreement(1.01 * bound, torch_error, "w").holds


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_not_finite_never_holds(strange: float):
    """Also where torch itself overflows: then nothing is known of the graph."""
    assert not Agreement(strange, 1e-6, "w").holds
    assert not Agreement(1e-6, strange, "w").holds
    assert not Agreement(strange, strange, "w").holds


def test_a_turned_relu_spoils_one_batch_a_wrong_formula_each():
    batches = iter([_wrong("a", "b") + _right("c"), _wrong("b", "c") + _right("a"), _wrong("c") + _right("a", "b")])
    assert worst_agreement(lambda: next(batches), "graph").error == 1e-6
    assert next(batches, None) is None  # after two batches `b` was still suspected

    tried = []
    with pytest.raises(ExportError, match=r"graph disagrees with torch at b; .* got 1.0e-03"):
        worst_agreement(lambda: tried.append(1) or (_wrong("b") + _right("a", "c")), "graph")
    assert len(tried) == 6


def test_a_change_is_judged_by_its_own_size_and_a_small_one_by_the_steps():
    before = {"large": np.ones(4), "small": np.ones(4)}
    exact = {"large": np.full(4, 2.0), "small": np.ones(4) + 1e-12, "loss": np.array(8.0)}
    ours = {"large": np.full(4, 2.1), "small": np.ones(4) + 3e-4, "loss": np.array(9.0)}
    found = {each.tensor: each for each in distances(ours, exact, exact, before)}
    assert found["large"].error == pytest.approx(0.1)
    assert found["small"].error == pytest.approx(0.3)  # of a thousandth of the step's change
    assert found["loss"].error == pytest.approx(1 / 8)
    assert [each.torch_error for each in found.values()] == [0.0] * 3


def test_only_tensors_that_hold_one_number_are_moved():
    state = {"scale": np.ones(5, np.float32), "shift": np.zeros(5, np.float32), "w": np.arange(5, dtype=np.float32)}
    moved = uneven(state, state, 0)
    assert moved["w"] is state["w"]
    assert len(np.unique(moved["scale"])) == len(np.unique(moved["shift"])) == 5
    assert (moved["scale"] > 0).all()  # a variance stays one
    assert uneven(state, ["shift"], 0)["scale"] is state["scale"]


def test_adams_bias_correction_loses_no_digits():
    """1 − βᵗ subtracted in float32 is off by 100 epsilons at the first step, and every prototype's move with it."""
    steps = torch.arange(1, 10_001, dtype=torch.float32)
    for beta in BETAS:
        exact = -np.expm1(steps.double().numpy() * math.log(beta))
        found = _bias_correction(beta, steps).double().numpy()
        assert np.abs(found / exact - 1).max() < 4 * EPSILON


def test_tensors_are_compared_on_one_thread():
    """BLAS would share a sum of squares out to threads that wait for each other: many times the processor time."""
    code = """
import time
import numpy as np
from protofleet.export.verify.agreement import distances
exact = np.ones(1 << 22)
ours = {"w": exact.astype(np.float32)}
time.sleep(0.5)  # by then no thread looks for work any more
process, thread = time.process_time(), time.thread_time()
for _ in range(4):
    distances(ours, {"w": exact}, ours, ours)
print(time.process_time() - process, time.thread_time() - thread)
"""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    everywhere, here = map(float, run.stdout.split())
    assert everywhere < 1.3 * here
