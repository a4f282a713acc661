"""The device and the server without torch: a real round in a process where importing it is an error."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from edge_samples import fashion

from protofleet.contract.bundle.bundle_file import read_bundle

SCRIPT = textwrap.dedent(
    """
    import importlib, json, pkgutil, sys

    FORBIDDEN = {"torch", "torchvision", "onnx", "onnxscript", "sklearn", "datasets", "flwr_datasets", "pydantic"}

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in FORBIDDEN:
                raise ImportError(f"{name} must not be imported on a device")

    sys.meta_path.insert(0, Refuse())
    try:
        import torch
    except ImportError as error:
        assert "must not be imported" in str(error)
    else:
        raise SystemExit("the hook does not work")

    from protofleet import contract, edge_client, aggregator
    for room in (contract, edge_client, aggregator):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

    from protofleet.contract.bundle.bundle_file import read_bundle
    from protofleet.contract.wire.messages import Announcement
    from protofleet.edge_client.data.load import load_data
    from protofleet.edge_client.device.device import Device

    bundle = read_bundle(sys.argv[1])
    pi = Device(bundle, load_data(sys.argv[2], bundle.manifest), "pi-1")
    losses, classes = [], []
    for number, method in ((1, "fedproto"), (2, "fedproto"), (3, "ffc")):
        result = pi.run_round(Announcement(b"run1", number, "open", method, bundle.sha256), None)
        losses.append(result.loss)
        classes.append(result.contribution.body.classes.tolist())
    print(json.dumps({"losses": losses, "classes": classes, "loaded": sorted(FORBIDDEN & set(sys.modules))}))
    """
)


def test_a_training_round_without_torch(mnist_like_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = mnist_like_bundle()
    data = fashion(read_bundle(bundle), 60, (0, 3, 8))
    np.savez(tmp_path / "train.npz", x=data.x, y=data.y)
    command = [sys.executable, "-c", SCRIPT, str(bundle), str(tmp_path / "train.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["losses"][1] < said["losses"][0]
    assert said["classes"] == [[0, 3, 8]] * 3
    assert said["loaded"] == []


def test_a_devices_process_collects_no_module_again() -> None:
    """What it has loaded by its first round is frozen; otherwise each round's collection goes through all of it."""
    code = (
        "import gc, msgspec, os\n"
        "from protofleet.edge_client.run import process\n"
        "from protofleet.edge_client.settings import ClientSettings\n"
        "settings = msgspec.json.encode(ClientSettings(bundle='b', broker='mqtt://h', id='a', data='d', state='s'))\n"
        "read, write = os.pipe()\n"
        "os.write(write, settings)\n"
        "os.close(write)\n"
        "process.run = lambda settings: print(gc.get_freeze_count(), len(gc.get_objects())) or 0\n"
        "assert process.main(['pi-1', str(read)]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    frozen, others = map(int, done.stdout.split())
    assert frozen > 10 * others
