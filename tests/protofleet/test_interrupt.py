"""Ctrl-C at any moment after a command's start: exit code 130, at most one line, never a traceback."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import Embedded
from commands import ROOT
from contract_samples import small_parts
from fleets import bundle, share

from protofleet.contract.bundle.bundle_file import write_bundle
from protofleet.contract.console.interrupt import Terminated, interruptible, leave_at_once

MOMENTS = 20  # in the long version; a few of them in the default run
FEW = 4
# While the interpreter starts, and until the few lines that settle Ctrl-C are loaded, it is Python that answers.
FIRST = {
    ROOT / name
    for name in (
        "protofleet/cli.py",
        "protofleet/__init__.py",
        "protofleet/__main__.py",
        "contract/__init__.py",
        "contract/console/telemetry.py",
    )
}
FIRST |= {
    ROOT / name for name in ("contract/console/interrupt.py", "edge_client/__init__.py", "edge_client/__main__.py")
}


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    made = Embedded()
    made.start()
    yield made.url
    made.stop()


@pytest.fixture(scope="module")
def commands(broker: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    folder = tmp_path_factory.mktemp("interrupt")
    trained = bundle(folder / "f.bundle", "fedproto", "fedproto_mnist", input_shape=(28, 28, 1))
    x, y = share(0, range(3), whole=True)
    np.savez(folder / "d.npz", x=x, y=y)
    write_bundle(folder / "small.bundle", **small_parts())
    common = ["--bundle", trained, "--broker", broker, "--fleet", "interrupt"]
    return {
        "client": ["client", *common, "--id", "d", "--data", folder / "d.npz", "--state", folder / "state"],
        "aggregate": ["aggregate", *common, "--store", folder / "s.sqlite", "--min-clients", 9],
        "broker": ["broker", "--listen", "127.0.0.1:0"],
        "demo": ["demo", "--out", folder / "out"],
        "inspect": ["inspect", folder / "small.bundle"],
    }


def _interrupted(words: list[object], after_s: float) -> tuple[int, str]:
    command = [sys.executable, "-m", "protofleet", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    try:
        said = process.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()[1]
        if "Exception ignored" in said and "KeyboardInterrupt" in said:  # Python dropped it before our first line
            return -signal.SIGINT, said
        pytest.fail(f"Ctrl-C after {after_s:.3f} s was lost: {said}")
    return process.returncode, said


def _too_early(said: str) -> bool:
    """Whether a traceback shows nothing of ours but the lines that come first."""
    files = {Path(name) for name in re.findall(r'File "([^"]+)"', said)}
    ours = {file for file in files if file.is_relative_to(ROOT) and ".venv" not in file.parts}
    return "KeyboardInterrupt" in said and ours <= FIRST


LASTS_S = {"client": 1.5, "aggregate": 1.5, "broker": 0.8, "demo": 3.0, "inspect": 0.8}  # until it does its work
ENDS_WELL = ("inspect", "broker")  # it may be done by then; the broker runs until Ctrl-C, which is its good end


@pytest.mark.parametrize("name", [name for name in LASTS_S if name != "demo"])  # that one: tests/lab/demo/test_demo.py
def test_ctrl_c_at_some_moments_is_one_line_at_most(name: str, commands: dict[str, list[object]]) -> None:
    _check_moments(name, FEW, commands[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LASTS_S)
def test_ctrl_c_at_any_moment_is_one_line_at_most(name: str, commands: dict[str, list[object]]) -> None:
    assert _check_moments(name, MOMENTS, commands[name]) & {130, 0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_a_library_makes_an_error_of_is_still_one(number: signal.Signals) -> None:
    """pandas' extension modules answer Ctrl-C while they load with an AttributeError."""

    def load() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

    with pytest.raises(KeyboardInterrupt) as raised, interruptible(terminable=True):
        load()
    assert isinstance(raised.value, Terminated) == (number == signal.SIGTERM)
    with pytest.raises(AttributeError), interruptible():
        raise AttributeError("nobody asked")


@pytest.mark.parametrize("once", [False, True])
def test_an_interruption_that_python_drops_comes_again(once: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A callback of a weak reference, as those of the locks of imports, cannot raise."""

    def wait() -> None:
        watched = threading.Event()
        reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
        del watched
        assert reference() is None
        time.sleep(30)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible(once=once):
        wait()
    assert time.monotonic() - started < 20
    assert "Traceback" not in capsys.readouterr().err


def test_who_has_ctrl_c_ignored_keeps_it_so() -> None:
    """As `nohup` does, and a shell for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        leave_at_once()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_from_the_start_ctrl_c_is_one_line_and_130() -> None:
    code = "import signal; from protofleet.contract.console.interrupt import leave_at_once; "
    code += "leave_at_once(); signal.raise_signal(2)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_python_m_settles_ctrl_c_too() -> None:
    code = """
import runpy, signal, sys
sys.argv = ["protofleet/__main__.py", "--version"]
try:
    runpy.run_module("protofleet", run_name="__main__")
except SystemExit:
    print(signal.getsignal(signal.SIGINT).__name__)
"""
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert said.split()[-1] == "_leave"


def test_after_the_block_ctrl_c_means_what_it_did() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(terminable=True):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def _check_moments(name: str, moments: int, words: list[object]) -> set[int]:
    """Interrupt it at so many moments; the exit codes that were ours. On a busy machine they may all be too early."""
    codes = set()
    for moment in range(moments):
        code, said = _interrupted(words, 0.02 + LASTS_S[name] * (moment + 1) / moments)
        if code == -signal.SIGINT or _too_early(said):
            continue
        codes.add(code)
        assert code == 130 or (code == 0 and name in ENDS_WELL), said
        assert "Traceback" not in said
        ends = [line for line in said.splitlines() if "interrupted" in line or "stopped" in line]
        assert len(ends) <= 1, said
    return codes
