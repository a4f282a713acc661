"""Wrong paths and full disks: one line, exit 1 or 2, whatever is where a file or a folder should be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT
from contract_samples import small_parts
from PIL import Image

from protofleet import cli
from protofleet.cli import main
from protofleet.contract.bundle.bundle_file import write_bundle
from protofleet.contract.errors import DataError
from protofleet.edge_client.data.load import load_data

CLIENT = "client --bundle b.bundle --broker mqtt://127.0.0.1:1 --id d --data d.npz --state st --patience 0.1 -q"
AGGREGATE = "aggregate --bundle b.bundle --broker mqtt://127.0.0.1:1 --store s.sqlite --patience 0.1 -q"
TLS = CLIENT.replace("mqtt:", "mqtts:")
# What comes behind each of these is taken for a file: nothing there, a folder, and a file of other content are refused.
READ = {
    "client --bundle": CLIENT.replace("b.bundle", "{}"),
    "client --data": CLIENT.replace("d.npz", "{}"),
    "client --test": CLIENT + " --test {}",
    "client --config": CLIENT + " --config {}",
    "client --trust": CLIENT + " --trust {}",
    "client --ca": TLS + " --ca {}",
    "client --cert": TLS + " --cert {} --key {}",
    "aggregate --bundle": AGGREGATE.replace("b.bundle", "{}"),
    "aggregate --ca": AGGREGATE.replace("mqtt:", "mqtts:") + " --ca {}",
    "inspect": "inspect {}",
    "profile": "profile {}",
    "profile --measure": "profile {} --measure",
    "profile --devices-file": "profile b.bundle --devices-file {}",
    "profile --measured": "profile b.bundle --measured {}",
    "cost": "cost {}",
    "cost --devices-file": "cost spherefed_convnet --devices-file {}",
}
# And these are written: only a place where nothing can be written is wrong.
WRITTEN = {
    "client --json": CLIENT + " --json {}",
    "aggregate --json": AGGREGATE + " --json {}",
    "aggregate --store": AGGREGATE.replace("s.sqlite", "{}"),
    "inspect --json": "inspect b.bundle --json {}",
    "cost --html": "cost spherefed_convnet --html {}",
    "cost --scalesim-csv": "cost spherefed_convnet --scalesim-csv {}",
    "lab list --json": "lab list --json {}",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tests"])  # as called by a program, which the client must not replace
    parts = small_parts()
    write_bundle(tmp_path / "b.bundle", **parts)
    manifest = parts["manifest"]
    x = np.zeros((8, *manifest.input_shape), np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(8) % manifest.classes)
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").write_bytes(b"\x00\xff other")
    return tmp_path


def _refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    code = main(line.split())
    lines = capsys.readouterr().err.splitlines()
    assert code in (1, 2), lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: "), lines
    assert "expected" in lines[0], lines
    assert "got" in lines[0], lines
    return lines[0]


@pytest.mark.parametrize("name", READ)
def test_what_is_read_and_is_not_there_or_something_else(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("missing", "folder", "other", "other/inside"):
        line = _refused(READ[name].format(path, path), capsys)
        assert "no broker" not in line, (path, line)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_where_nothing_can_be(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("folder", "other/inside", "/proc/none"):
        line = _refused(WRITTEN[name].format(path), capsys)
        assert "no broker" not in line, (path, line)


BARRED = {**READ, "client --state": CLIENT.replace("--state st", "--state {}")}
_ONE_AFTER_ANOTHER = """
import os, sys
sys.argv = ["tests"]  # as called by a program, which the client must not replace
from protofleet.cli import main
for line in sys.stdin.read().splitlines():
    barred, words = line.split(" ", 1)
    mode = os.stat(barred).st_mode & 0o777
    os.chmod(barred, 0)
    print("exit code", main(words.split()), file=sys.stderr)
    os.chmod(barred, mode)
"""


def test_what_this_user_may_not_read(place: Path) -> None:
    """Root reads everything, unless that right is taken away, which needs a process of its own."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if drop and shutil.which(drop[0]) is None:
        if os.environ.get("PROTOFLEET_CI"):
            pytest.fail("setpriv is not installed, and this is CI")
        pytest.skip("root, and no setpriv")
    folders = ("client --data", "client --test", "client --state")
    at = ["folder" if name in folders else "other" for name in BARRED]
    lines = [f"{path} {line.format(path, path)}" for path, line in zip(at, BARRED.values(), strict=True)]
    done = subprocess.run(
        [*drop, sys.executable, "-c", _ONE_AFTER_ANOTHER], input="\n".join(lines),
        capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 2 * len(BARRED), done.stderr
    for name, line, code in zip(BARRED, said[::2], said[1::2], strict=True):
        assert code in ("exit code 1", "exit code 2"), (name, code)
        assert "ermission denied" in line, (name, line)


def test_a_class_folder_that_may_not_be_read_is_not_taken_for_empty(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protofleet.edge_client.data import folder

    manifest = small_parts()["manifest"]
    for label in manifest.labels[:2]:
        (place / "folder" / label).mkdir()
        Image.new("L", (4, 4)).save(place / "folder" / label / "a.png")

    def scandir(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(folder.os, "scandir", scandir)
    with pytest.raises(DataError, match=r"cannot read .*folder/.*got Permission denied"):
        load_data(place / "folder", manifest)


def test_a_disk_that_is_full_is_one_line_wherever_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(args: list[str]) -> int:
        raise OSError(28, "No space left on device", "out/devices/train.npz")

    monkeypatch.setattr(cli, "_dispatch", full)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "error: cannot write out/devices/train.npz, expected a disk that takes it, got No space left on device, "
        "try freeing space, or another place\n"
    )


def test_the_aggregators_own_id_is_no_devices(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _refused(CLIENT.replace("--id d", "--id aggregator"), capsys)
    assert line == "error: --id, expected a device's id, got aggregator, which is reserved, try aggregator-1"


def test_an_empty_share_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = small_parts()["manifest"].input_shape
    np.savez(place / "d.npz", x=np.zeros((0, *shape), np.uint8), y=np.zeros(0, np.int64))
    assert "d.npz is empty, expected at least one image, got none" in _refused(CLIENT, capsys)
