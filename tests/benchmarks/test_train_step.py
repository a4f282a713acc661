"""The benchmarks of a training step: what they count, and that they run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.device import step_forms, train_step

CASE = "small_cnn:12x12x1:4:fedproto"


@pytest.mark.parametrize(("groups", "trains_input"), [(1, True), (1, False), (3, True), (12, True), (12, False)])
def test_operations_of_a_convolution_by_hand(groups: int, trains_input: bool):
    conv = nn.Conv2d(12, 24, 3, padding=1, groups=groups)
    x = torch.zeros(2, 12, 8, 8, requires_grad=trains_input)
    product = 2 * (2 * 24 * 8 * 8) * (12 // groups) * 9
    assert train_step.operations(lambda: conv(x).sum().backward()) == product * (3 if trains_input else 2)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux counts the machine's work there")
def test_other_work_is_what_other_processes_use():
    others = train_step.OtherWork()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    assert others.cores() > 0


def test_a_step_in_all_its_forms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "forms.json"
    monkeypatch.setattr(sys, "argv", ["step_forms", "--case", CASE, "--repeats", "1", "--json", str(out)])
    assert step_forms.main() == 0
    assert {"portable", "torch", "channels_last"} <= set(json.loads(out.read_text())["rows"][0]["ms"])
    assert "of torch" in capsys.readouterr().out


def test_beside_other_work_only_one_thread_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    before, out = torch.get_num_threads(), tmp_path / "step.json"
    monkeypatch.setattr(train_step.OtherWork, "cores", lambda _: 1.5)
    threads = ["--threads", "1", "--threads", "2"]
    monkeypatch.setattr(sys, "argv", ["train_step", "--case", CASE, "--repeats", "1", *threads, "--json", str(out)])
    try:
        assert train_step.main() == 0
    finally:
        torch.set_num_threads(before)
    one, two = json.loads(out.read_text())["rows"]
    assert one["ratio"] > 0
    assert one["ratio_by_clock"] is two["ratio"] is two["ratio_by_clock"] is None
    assert "–" in capsys.readouterr().out
