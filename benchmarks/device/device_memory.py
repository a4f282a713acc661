"""How much memory a device takes: waiting, and training the default network, as a real process on a real broker.

    python -m benchmarks.device.device_memory [--batch 16] [--backbone small_cnn] [--rounds 3] [--json FILE]
    python -m benchmarks.device.device_memory --backbone torchvision:mobilenet_v2 --input 128x128x3 --batch 8 \
        --images 64 --micro-batch 2 --most 400

Exports the bundle, gives one device 1,000 of the shipped Fashion-MNIST images and the shipped test images, and starts
the embedded broker and `protofleet client`. Two seconds after it has connected, its resident set (VmRSS) and its
proportional share of it (Pss) are read: that is the waiting device. Then `protofleet aggregate` runs rounds of FedProto
and one of FFC; two seconds after it has ended, the client waits for the next run, and the same is read again. The peak
(VmHWM) is what the client reports of itself at the end. Then the trial of `--memory-limit` is made of the same bundle:
what the client had beyond it is what `BESIDE_BYTES` in edge_client/trials/memory_limit.py has to hold. Prints all
beside the targets of docs/figures.md, in MB of 1,000,000 bytes, and exits with 1 when a target is missed.

    python -m benchmarks.device.device_memory --options [--batch 16]

compares ONNX Runtime's memory options instead (docs/decisions/020): for each, a process of its own runs 150 steps.

    python -m benchmarks.device.device_memory --forms

compares the portable step with that of the wheel protofleet-kernels, for the four networks of `train_step.py`: for each
form a process of its own runs 30 steps in a session of a device. Exits with 1 when the wheel's form needs more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.device.train_step import TARGETS
from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.native_kernels import FORM, installed_kernels
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.hardware.process_metrics import board_name, versions
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.trials.memory_limit import BESIDE_BYTES, measured_bytes
from protofleet.export.bundles.build import build_bundle
from protofleet.export.cli import read_shape

FASHION = Path(__file__).parents[2] / "lab" / "data" / "fashion_mnist"
LABELS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
IDLE_TARGET_MB, TRAINING_TARGET_MB = 75.0, 120.0
TRAINING_IMAGES = 1_000
_SETTLED_S = 2.0


@dataclass(frozen=True)
class Case:
    """What is measured: (H, W, c) of the images, and how many the device holds."""

    backbone: str
    batch: int
    shape: tuple[int, int, int]
    images: int
    micro_batch: int = 0


@dataclass(frozen=True)
class Result:
    """All in MB of 1,000,000 bytes; `step_ms` is the median training step.

    `…_file_mb` are pages of files, above all ONNX Runtime's code that has run: the kernel takes them back when memory
    is short.
    """

    backbone: str
    batch: int
    images: int
    idle_mb: float
    idle_file_mb: float
    idle_pss_mb: float
    training_peak_mb: float
    after_a_round_mb: float
    after_a_round_file_mb: float
    after_a_round_pss_mb: float
    trial_mb: float
    step_ms: float


def rss_mb(pid: int) -> tuple[float, float]:
    """VmRSS of a process, and the share of it that is pages of files; zeros when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    found = {
        line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(("VmRSS", "RssF"))
    }
    return found.get("VmRSS", 0.0), found.get("RssFile", 0.0)


def pss_mb(pid: int) -> float:
    """Pss of a process: its resident set, each page divided by how many processes have it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))


def write_inputs(folder: Path, case: Case) -> None:
    """fleet.bundle, train.npz and test.npz in `folder`."""
    build_bundle(
        backbone=case.backbone,
        method_name="fedproto",
        labels=LABELS,
        input_shape=case.shape,
        out=folder / "fleet.bundle",
        batch=case.batch,
        micro_batch=case.micro_batch,
    )
    manifest = read_bundle(folder / "fleet.bundle").manifest
    for name in ("train", "test"):
        data = load_data(FASHION / f"{name}.parquet", manifest, purpose="test")
        rows = np.random.default_rng(0).permutation(len(data))[: case.images]
        np.savez(folder / f"{name}.npz", x=data.x[rows], y=data.y[rows])


def measure(folder: Path, case: Case, rounds: int) -> Result:
    """One device's life, from birth to the end of a run."""
    write_inputs(folder, case)
    front_door = [sys.executable, "-m", "protofleet"]
    with EmbeddedBroker() as broker:
        common = [f"--bundle={folder / 'fleet.bundle'}", f"--broker={broker.url}"]
        device = [f"--data={folder / 'train.npz'}", f"--test={folder / 'test.npz'}"]
        device += [f"--micro-batch={case.micro_batch}"] if case.micro_batch else []
        files = [f"--state={folder / 'state'}", f"--json={folder / 'summary.json'}"]
        client = subprocess.Popen(
            [*front_door, "client", *common, *device, *files, "--id=pi-1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert client.stderr is not None
        while "connected" not in client.stderr.readline():
            assert client.poll() is None, "the client ended"
        time.sleep(_SETTLED_S)
        idle = (*rss_mb(client.pid), pss_mb(client.pid))
        store = [f"--store={folder / 'run.sqlite'}", f"--rounds={rounds}", "--quiet"]
        subprocess.run([*front_door, "aggregate", *common, *store], check=True, timeout=600)
        time.sleep(_SETTLED_S)
        after = (*rss_mb(client.pid), pss_mb(client.pid))
        client.send_signal(signal.SIGTERM)
        client.communicate(timeout=60)
    summary = json.loads((folder / "summary.json").read_text())
    peak_mb = summary["peak_rss_bytes"] / 1e6
    given = {
        "bundle": str(folder / "fleet.bundle"),
        "broker": "mqtt://127.0.0.1",
        "id": "pi-1",
        "state": ".",
        "data": ".",
    }
    way = "parts" if case.micro_batch else "whole"
    trial = measured_bytes(folder / "fleet.bundle", read_settings(ClientSettings, given), 10**10, way).all or 0
    trial_mb = (trial - BESIDE_BYTES) / 1e6
    return Result(case.backbone, case.batch, case.images, *idle, peak_mb, *after, trial_mb, summary["step_ms"])


STEPS = """
import sys, time
import numpy as np
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.edge_client.hardware.process_metrics import peak_rss_bytes

pattern, arena, blocked = (word == "on" for word in sys.argv[2:5])
bundle = read_bundle(sys.argv[1])
m = bundle.manifest
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.enable_mem_pattern, options.enable_cpu_mem_arena = pattern, arena
levels = ort.GraphOptimizationLevel
options.graph_optimization_level = levels.ORT_ENABLE_ALL if blocked else levels.ORT_ENABLE_EXTENDED
session = ort.InferenceSession(bundle.train_step, options)
feed = {t.name: bundle.params.get(t.name, np.zeros(t.shape, np.float32)) for t in m.state}
feed |= {
    "x": np.zeros((m.batch, *m.input_shape), np.uint8),
    "y": np.zeros(m.batch, np.int64),
    "sample_weight": np.ones(m.batch, np.float32),
    "prototypes": np.zeros((m.classes, m.features), np.float32),
    "prototype_mask": np.zeros(m.classes, np.float32),
    "lr": np.array(0.01, np.float32),
}
took_ms = []
for _ in range(150):
    began = time.perf_counter()
    session.run(None, feed)
    took_ms.append((time.perf_counter() - began) * 1e3)
print(peak_rss_bytes() / 1e6, min(took_ms))
"""


FORM_STEPS = """
import sys
import numpy as np
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.hardware.process_metrics import peak_rss_bytes
from protofleet.edge_client.training.onnx_session import open_session

bundle = read_bundle(sys.argv[1])
graph = bundle.forms[sys.argv[2]] if sys.argv[2] in bundle.forms else bundle.train_step
session, _ = open_session(graph, sys.argv[2], threads=1, training=True)
kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}
feed = {i.name: np.ones(i.shape, kinds[i.type]) for i in session.get_inputs()}
feed |= {name: value for name, value in bundle.params.items() if name in feed}
for _ in range(30):
    session.run(None, feed)
print(peak_rss_bytes() / 1e6)
"""


def compare_forms(folder: Path) -> bool:
    """Peak of a process that trains by each form of the step; whether the wheel's is no higher."""
    if installed_kernels() is None:
        raise SystemExit("error: --forms needs the wheel protofleet-kernels (pip install ./kernels)")
    print(f"{'network, input, batch':38} portable  kernels   peak in MB of a process that runs 30 steps, one thread")
    fine = True
    for case in TARGETS:
        backbone, size, batch, method_name = case.split(":")
        build_bundle(
            backbone=backbone if backbone == "small_cnn" else f"torchvision:{backbone}",
            method_name=method_name,
            labels=LABELS,
            input_shape=read_shape(size),
            out=folder / "fleet.bundle",
            batch=int(batch),
            for_kernels=True,
        )
        peaks = []
        for form in ("portable", FORM):
            command = [sys.executable, "-c", FORM_STEPS, str(folder / "fleet.bundle"), form]
            peaks.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        fine &= peaks[1] <= peaks[0]
        print(f"{case:38} {peaks[0]:8.1f} {peaks[1]:8.1f}", flush=True)
    return fine


def compare(folder: Path, backbone: str, batch: int) -> None:
    """Peak and fastest step for each choice of memory pattern, arena and blocked layouts."""
    write_inputs(folder, Case(backbone, batch, (28, 28, 1), TRAINING_IMAGES))
    print(f"{backbone}, batch {batch}: pattern, arena, blocked layouts → peak MB, fastest step ms")
    for words in itertools.product(("on", "off"), repeat=3):
        command = [sys.executable, "-c", STEPS, str(folder / "fleet.bundle"), *words]
        peak_mb, step_ms = map(float, subprocess.run(command, check=True, capture_output=True).stdout.split())
        print(f"  {words[0]:4} {words[1]:4} {words[2]:4}  {peak_mb:7.1f}  {step_ms:6.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="small_cnn")
    parser.add_argument("--batch", type=int, default=16, help="of the training step; 16 is export's default")
    parser.add_argument("--input", default="28x28x1", help="HxWxc; the images are scaled")
    parser.add_argument("--images", type=int, default=TRAINING_IMAGES)
    parser.add_argument("--micro-batch", type=int, default=0, help="train each batch in parts of so many")
    parser.add_argument("--most", type=float, default=TRAINING_TARGET_MB, help="target of the peak, in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--forms", action="store_true", help="compare the portable step with the wheel's instead")
    parser.add_argument("--options", action="store_true", help="compare ONNX Runtime's memory options instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.options:
            compare(Path(folder), options.backbone, options.batch)
            return 0
        if options.forms:
            return 0 if compare_forms(Path(folder)) else 1
        case = Case(options.backbone, options.batch, read_shape(options.input), options.images, options.micro_batch)
        result = measure(Path(folder), case, options.rounds)
    parts = f" in parts of {options.micro_batch}" if options.micro_batch else ""
    idle_met = max(result.idle_mb, result.after_a_round_mb) <= IDLE_TARGET_MB
    training_met = result.training_peak_mb <= options.most
    print(
        f"{options.backbone}, batch {options.batch}{parts}, {options.input}, {options.images:,} images; {board_name()}"
    )
    rows = (
        ("waiting, connected", result.idle_mb, IDLE_TARGET_MB, result.idle_mb <= IDLE_TARGET_MB),
        ("waiting, after a run", result.after_a_round_mb, IDLE_TARGET_MB, result.after_a_round_mb <= IDLE_TARGET_MB),
        ("peak over the run", result.training_peak_mb, options.most, training_met),
    )
    for what, value, target, met in rows:
        print(f"{what:22} {value:7.1f} MB   target {target:5.0f} MB   {'met' if met else 'MISSED'}")
    shares = f"{result.idle_file_mb:.1f} MB before, {result.after_a_round_file_mb:.1f} MB after the run"
    print(f"{'of which file pages':22} {shares}")
    print(f"{'proportional (Pss)':22} {result.idle_pss_mb:.1f} MB before, {result.after_a_round_pss_mb:.1f} MB after")
    beyond = result.training_peak_mb - result.trial_mb
    print(f"{'trial (--memory-limit)':22} {result.trial_mb:7.1f} MB   the client had {beyond:.1f} MB more")
    print(f"{'training step':22} {result.step_ms:7.1f} ms   median, one thread")
    if options.json is not None:
        facts = {"schema": "protofleet.bench.device-memory/1", **asdict(result), "versions": versions()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if idle_met and training_met else 1


if __name__ == "__main__":
    sys.exit(main())
