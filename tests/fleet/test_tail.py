"""A fleet that trains only the tail of its networks, in real processes over the embedded broker, one of them killed.

SphereFed, so that the run closes with FFC over the bundle's extractor, and each device has a head of its own besides.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from fleets import bundle, fleet_in, run, share

import protofleet
from protofleet.contract.bundle.bundle_file import read_bundle

HELD = ((0, 1, 2), (2, 3, 4))


def test_a_tail_is_trained_killed_resumed_and_asked(tmp_path: Path) -> None:
    path = bundle(tmp_path / "f.bundle", "spherefed", trainable_blocks=1, hyper={"epochs": 2, "lr": 0.05})
    with fleet_in(tmp_path) as fleet:
        fleet.aggregator([path], "--rounds", 2, "--min-clients", 2, "--deadline", 300)
        for index, held in enumerate(HELD):
            fleet.client(f"d{index}", path, share(index, held, 60), "--hold-out", 0.2)
        fleet.wait_for("d0", r"round 1 \(spherefed\): .*loss")
        fleet.processes["d0"].kill()
        fleet.processes.pop("d0").wait()
        kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "state-d0" / "activations").iterdir()}
        fleet.client("d0", path, share(0, HELD[0], 60), "--hold-out", 0.2)
        assert set(fleet.finish(120.0).values()) == {0}, fleet.log("d0")
        log = fleet.log("d0")
    assert sorted(name.partition("-")[0] for name in kept) == ["held", "train"]
    again = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "state-d0" / "activations").iterdir()}
    assert again == kept  # the second process took them as they were
    assert log.count("running the trunk once over") == 2
    assert log.count("personal head ") == 3  # each round, the closing one too
    _assert_the_personal_head_answers(tmp_path, path)


def _assert_the_personal_head_answers(folder: Path, path: Path) -> None:
    """From the state directory alone, as the device measured it; the fleet's head answers beside it."""
    lines = [json.loads(line) for line in (folder / "state-d0" / "history.jsonl").read_text().splitlines()]
    assert {"held_photos", "frozen_right", "trained_right", "left_out"} <= set(lines[0])
    m = read_bundle(path).manifest
    assert m.cut
    x, y = share(0, HELD[0], 60)
    for way in ("personal", "linear"):
        answers = protofleet.Predictor(folder / "state-d0", way=way)(x)
        assert (answers.classes == y).mean() > 0.6
    np.savez(folder / "ask.npz", x=x[:2])
    code, said = run("predict", "--state", folder / "state-d0", "--way", "nothing", folder / "ask.npz")
    assert code != 0
    assert "personal" in said
