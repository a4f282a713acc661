"""A device that tries the wheel's step and one that keeps to the portable one, as processes, with a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from protofleet.aggregator.server.broker import EmbeddedBroker

COMMAND = [sys.executable, "-m", "protofleet.cli"]


def start(folder: Path, name: str, *words: object) -> subprocess.Popen[str]:
    said = (folder / f"{name}.log").open("w")
    return subprocess.Popen([*COMMAND, *map(str, words)], stdout=said, stderr=said, text=True)


def test_devices_with_and_without_the_wheel_merge(tmp_path: Path) -> None:
    bundle, rng = tmp_path / "F.bundle", np.random.default_rng(4)
    export = ["export", "--backbone", "small_cnn", "--method", "fedproto", "--classes", "4", "--input", "16x16x1"]
    subprocess.run([*COMMAND, *export, "--out", bundle, "--for-kernels"], check=True, capture_output=True)
    for name in ("wheel", "portable"):
        y = np.arange(48) % 4
        x = np.clip(rng.normal(60, 20, (48, 16, 16, 1)) + 35 * y[:, None, None, None], 0, 255).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    broker = EmbeddedBroker()
    broker.start()
    at = ["--bundle", bundle, "--broker", broker.url]
    started = []
    try:
        rounds = ["--store", tmp_path / "store.sqlite", "--rounds", 1, "--min-clients", 2, "--deadline", 200]
        started.append(start(tmp_path, "aggregate", "aggregate", *at, *rounds))
        for name in ("wheel", "portable"):
            own = ["--id", name, "--data", tmp_path / f"{name}.npz", "--state", tmp_path / name, "--until-finished"]
            form = ["--portable-step"] if name == "portable" else []
            started.append(start(tmp_path, name, "client", *at, *own, *form))
        codes = [process.wait(240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
        broker.stop()
    said = {name: (tmp_path / f"{name}.log").read_text() for name in ("aggregate", "wheel", "portable")}
    assert codes == [0, 0, 0], said
    assert "2 contributions, 4 classes merged" in said["aggregate"], said
    assert "tries kernels" in said["wheel"], said
    assert "tries kernels" not in said["portable"], said
    for name in ("wheel", "portable"):
        told = json.loads((tmp_path / name / "history.jsonl").read_text().splitlines()[0])
        assert told["outcome"] == "committed", name
        assert 0 < told["loss"] < 3, name
