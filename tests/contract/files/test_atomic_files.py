"""Writing is whole or not at all, and leaves what is not a plain file as it is."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protofleet.contract.files.atomic_files import lock, whole_file


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with contextlib.suppress(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_the_bytes_are_on_the_disk_before_the_name_is_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.replace

    def forced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        done.append("renamed")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(os, "replace", renamed)
    with whole_file(tmp_path / "f") as file:
        file.write(b"new")
    assert done == ["3 bytes", "renamed", "folder"]


def test_two_that_write_one_file_do_not_mix(tmp_path: Path) -> None:
    with whole_file(tmp_path / "f") as file:
        file.write(b"first")
        with pytest.raises(OSError, match="another process that is writing it"), whole_file(tmp_path / "f"):
            pytest.fail("it is being written")
        assert sorted(os.listdir(tmp_path)) == ["f.partial"]
    assert (tmp_path / "f").read_bytes() == b"first"
    (tmp_path / "f.partial").write_bytes(b"of a process that was killed")
    with whole_file(tmp_path / "f") as file:
        file.write(b"second")
    assert (tmp_path / "f").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_is_followed_and_what_is_no_plain_file_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with whole_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "f").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(tmp_path / "pipe") as file:
        file.write(b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["f", "link", "pipe"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """A limit on file size, in a process of its own, is a disk that is full."""
    (tmp_path / "f").write_bytes(b"old")
    script = """
import resource, sys
from protofleet.contract.files.atomic_files import whole_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with whole_file(sys.argv[1]) as file:
        file.write(bytes(5000))
except OSError as error:
    print(error.strerror)
"""
    root = Path(__file__).parents[3]
    asked = [sys.executable, "-c", script, str(tmp_path / "f")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout.strip() == "File too large", done.stderr
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_lock_is_of_the_file_under_every_name_and_ends_with_its_process(tmp_path: Path) -> None:
    script = "import sys, time; from protofleet.contract.files.atomic_files import lock; "
    script += "lock(sys.argv[1]); print(1, flush=True); time.sleep(60)"
    asked = [sys.executable, "-c", script, str(tmp_path / "f")]
    other = subprocess.Popen(asked, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert other.stdout is not None
    other.stdout.readline()
    os.link(tmp_path / "f", tmp_path / "hard")
    (tmp_path / "soft").symlink_to("f")
    for name in ("f", "hard", "soft"):
        with pytest.raises(BlockingIOError):
            lock(tmp_path / name)
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    os.close(lock(tmp_path / "soft"))


@pytest.mark.parametrize("kind", ["directory", "pipe", "device"])
def test_what_is_no_plain_file_cannot_be_locked_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match=r"directory|regular"):
        lock(path)


def test_a_link_where_the_half_written_file_would_be_is_not_followed(tmp_path: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "report.json"
    other.write_bytes(b"mine")
    (tmp_path / "report.json.partial").symlink_to(other)
    with whole_file(target) as file:
        file.write(b"report")
    assert (other.read_bytes(), target.read_bytes()) == (b"mine", b"report")
    assert not target.is_symlink()
