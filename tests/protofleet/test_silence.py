"""Nothing but prototypes leaves: whole commands under strace make no file, look up no name, and call nobody but the
broker. And the libraries' own telemetry is off in every process that loads them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from brokers import Embedded
from camera_samples import video
from fleets import bundle, share
from watched import Watched, strace

from protofleet import cli
from protofleet.contract.console.telemetry import VARIABLES

ROOT = Path(cli.__file__).parent.parent
ROOMS = ("contract", "edge_client", "aggregator", "export", "hw_profiles", "lab", "tests", "benchmarks", "docs")


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(tmp_path_factory.mktemp("bundle") / "f.bundle", "fedproto", "fedproto_mnist", input_shape=(28, 28, 1))


def _check(watched: Watched, *allowed: Path, calls: set[str]) -> None:
    assert watched.connections() <= calls
    assert watched.lookups() == []
    assert watched.written_outside(*allowed) == set()
    assert watched.left() == []


def test_a_device_and_an_aggregator_call_nobody_but_the_broker(bundle_path: Path, tmp_path: Path) -> None:
    strace()
    x, y = share(0, range(3), whole=True)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    broker = Embedded()
    broker.start()
    try:
        address = broker.url.removeprefix("mqtt://")
        common = ("--bundle", bundle_path, "--broker", broker.url)
        store, state = tmp_path / "store", tmp_path / "state"
        store.mkdir()
        told = tmp_path / "told.json"
        aggregator = Watched.protofleet(
            tmp_path / "a", "aggregate", *common, "--store", store / "run.sqlite", "--rounds", 1, "--json", told
        ).start()
        device = Watched.protofleet(
            tmp_path / "d",
            "client",
            "--until-finished",
            *common,
            "--id",
            "d",
            "--data",
            tmp_path / "data.npz",
            "--state",
            state,
        ).start()
        assert (device.finish(), aggregator.finish()) == (0, 0), device.said + aggregator.said
    finally:
        broker.stop()
    _check(device, state, calls={address})
    _check(aggregator, store, told, tmp_path / "told.json.partial", calls={address})
    assert device.connections() == aggregator.connections() == {address}  # it saw what it is meant to see


@pytest.mark.slow
def test_a_demo_calls_nobody_but_its_own_broker(tmp_path: Path) -> None:
    strace()
    out, broker = tmp_path / "out", tmp_path / "broker"
    few = ("--clients", 2, "--data", "fashion_mnist_subset")  # what it calls is not of photos
    demo = Watched.protofleet(tmp_path / "w", "demo", *few, "--out", out).start()
    assert demo.finish(240) == 0, demo.said
    ports = {each.rpartition(":")[2] for each in demo.connections()}
    assert len(ports) == 1
    _check(demo, out, broker, calls={f"127.0.0.1:{port}" for port in ports})


def test_reading_a_video_calls_nobody_and_writes_nothing(tmp_path: Path) -> None:
    """FFmpeg, whose libraries PyAV brings, is able to do much more."""
    strace()
    film, code = video(tmp_path / "a.mp4", [40, 80, 120], key_every=1), tmp_path / "read.py"
    code.write_text(
        "import sys\n"
        "from protofleet.edge_client.cameras.sources import camera_of, pictures_of\n"
        "assert len([*pictures_of(camera_of(sys.argv[1]), 0.01)]) == 3\n"
    )
    reader = Watched(tmp_path / "r", [sys.executable, "-B", str(code), f"file:{film}"]).start()
    assert reader.finish() == 0, reader.said
    _check(reader, calls=set())


def test_measuring_here_calls_nobody(bundle_path: Path, tmp_path: Path) -> None:
    strace()
    told = tmp_path / "told.json"
    words = ("profile", bundle_path, "--measure", "--under-load", "--seconds", 0.1, "--threads", 1, "--json", told)
    watched = Watched.protofleet(tmp_path / "w", *words).start()
    assert watched.finish() == 0, watched.said
    _check(watched, told, tmp_path / "told.json.partial", calls=set())


@pytest.mark.slow  # torch and its exporter under strace
def test_an_export_for_a_target_calls_nobody(tmp_path: Path) -> None:
    strace()
    x, y = share(0, range(3), whole=True)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    out = tmp_path / "out"
    out.mkdir()
    options = ("--backbone", "fedproto_mnist", "--method", "fedproto", "--classes", 10, "--input", "28x28x1")
    target = ("--target", "raspberry-pi-4", "--data", tmp_path / "data.npz", "--out", out / "f.bundle")
    watched = Watched.protofleet(tmp_path / "w", "export", *options, *target).start()
    assert watched.finish(240) == 0, watched.said
    _check(watched, out, calls=set())


def test_an_export_leaves_no_directory_of_torch(tmp_path: Path) -> None:
    """An optimizer or `make_fx` loads torch's compiler, which makes its cache directory."""
    code = (
        "import torch; from protofleet.export.operators.trace import record; import os;"
        "record(lambda x: (x + 1,), [torch.zeros(2)]); print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHINDUCTOR_")}
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, env=environment | {"TMPDIR": str(tmp_path)}, cwd=ROOT, text=True)
    assert (said.strip(), list(tmp_path.iterdir())) == ("None", [])


def test_the_watcher_sees_what_it_must_not_find(tmp_path: Path) -> None:
    """ONNX Runtime as it comes, and a name that is looked up: the same look as above finds both."""
    strace()
    code = "import onnxruntime, socket, time; time.sleep(0.5); socket.getaddrinfo('collector.invalid', 443)"
    bare = Watched(tmp_path / "w", (sys.executable, "-c", code), environment={"ORT_DISABLE_TELEMETRY": "0"})
    bare.folder.mkdir()
    bare.start().finish()
    assert bare.lookups()
    if "1.31" in subprocess.check_output(
        [sys.executable, "-c", "import protofleet.contract.bundle.onnx_runtime as r; print(r.ort.__version__)"],
        text=True,
    ):
        assert any("onnxruntime" in path for path in bare.written_outside())
        assert bare.left()


def test_one_file_alone_loads_onnx_runtime() -> None:
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if file == ROOT / "contract" / "bundle" / "onnx_runtime.py" or "onnxruntime" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [n for n in names if n.split(".")[0] == "onnxruntime"], str(file)


def test_each_variable_has_the_value_that_its_library_reads_as_no() -> None:
    """docs/decisions/070 says where each library reads it."""
    on = {name for name, value in VARIABLES.items() if value == "1"}
    assert on == {"ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"}
    off = {name for name, value in VARIABLES.items() if value == "0"}
    assert off == {"HF_UPDATE_DOWNLOAD_COUNTS", "FLWR_TELEMETRY_ENABLED"}


@pytest.mark.parametrize(
    "module",
    [
        "protofleet.edge_client.training.onnx_session",
        "protofleet.edge_client.training.trainer",
        "protofleet.export.graphs.precision",
        "protofleet.lab.data.datasets",
    ],
)
def test_a_library_user_gets_it_silent_whatever_the_environment_says(module: str) -> None:
    code = (
        f"import {module}, os; print({{name: os.environ.get(name) for name in {list(VARIABLES)!r}}} == {VARIABLES!r})"
    )
    environment = {**os.environ, **dict.fromkeys(VARIABLES, "")}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_program_that_loaded_it_first_is_warned(tmp_path: Path) -> None:
    code = "import onnxruntime, protofleet.contract.bundle.onnx_runtime"
    for value, warned in (("", True), ("1", False)):
        environment = {**os.environ, "HOME": str(tmp_path), "ORT_DISABLE_TELEMETRY": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ("its telemetry has started" in done.stderr) is warned, done.stderr
