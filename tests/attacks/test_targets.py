"""What fuzzing has found, once more: every seed and every kept input of `tests/attacks`, without the fuzzer.

`benchmarks/attacks/fuzz.py` looks for more; where atheris is installed, a moment of that is a test here.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from protofleet.contract.wire import codec
from protofleet.contract.wire.messages import Message
from tests.attacks.guard import Trespass, guarded
from tests.attacks.registry import CORPUS, TARGETS, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_that_was_ever_found_breaks_a_promise(name: str) -> None:
    target = load(name)
    kept = {path.name: path.read_bytes() for path in target.corpus()}
    with guarded(), warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow that only warns would be a hole, too
        warnings.simplefilter("ignore", ResourceWarning)  # numpy leaves a broken .npz to the garbage collector
        for data in target.seeds():
            target.run(data)
        for found, data in kept.items():
            try:
                target.run(data)
            except BaseException as error:
                error.add_note(f"tests/attacks/corpus/{name}/{found}")
                raise


def test_every_type_of_message_is_attacked() -> None:
    """The codec's own table says which there are: whoever adds one freezes its bytes, and it is fuzzed from then on."""
    seeds = [data for data in load("wire").seeds() if data]
    assert {type(codec.decode(data)) for data in seeds if _decodes(data)} == set(Message.by_number.values())


def _decodes(data: bytes) -> bool:
    try:
        codec.decode(data)
    except codec.WireError:
        return False
    return True


def test_the_corpora_are_small_and_belong_to_a_target() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 1 << 20


def test_the_guard_sees_what_is_written_outside(tmp_path: Path) -> None:
    """Or the attacks above would prove nothing of it."""
    (tmp_path / "there").write_text("x")
    with guarded():
        Path(tempfile.gettempdir(), "within").write_text("x")
        assert (tmp_path / "there").read_text() == "x"
        for act in (
            lambda: (tmp_path / "new").write_text("x"),
            lambda: (tmp_path / "there").unlink(),
            lambda: (tmp_path / "folder").mkdir(),
            lambda: (tmp_path / "there").rename(tmp_path / "moved"),
            lambda: os.symlink("there", tmp_path / "link"),
            lambda: subprocess.run(["true"], check=True),
        ):
            with pytest.raises(Trespass):
                act()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris (extra `fuzz`) is not installed")
def test_a_moment_of_fuzzing(tmp_path: Path) -> None:
    """That the fuzzer runs, reaches our code and reports; not that it finds anything in a second."""
    command = [sys.executable, "-m", "benchmarks.attacks.fuzz", "--target", "wire", "--runs", "2000"]
    done = subprocess.run([*command, "--work", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("wire: 2,000 executions, ")
    edges, crashes = (int(done.stdout.split(", ")[at].split()[0]) for at in (1, 3))
    assert edges > 150
    assert crashes == 0
