"""The front door: every command is found, loads only its own room, and fails in one line with the right exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import protofleet
from contract.errors import near_names

ROOT = Path(protofleet.__file__).parent


def run(*args: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it, or, with `code`, Python that runs before its `main`."""
    start = ["-m", "protofleet"] if code is None else ["-c", f"{code}\nimport protofleet; sys.exit(protofleet.main())"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "120"} | environment
    return subprocess.run([sys.executable, *start, *args], capture_output=True, text=True, timeout=120, env=env)


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The single line on standard error that starts with `error: `."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_the_installed_command_is_this_front_door():
    (script,) = [s for s in entry_points(group="console_scripts") if s.name == "protofleet"]
    assert script.load() is protofleet.main


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command_and_exits_0(args):
    done = run(*args)
    assert done.returncode == 0
    for name, command in protofleet.COMMANDS.items():
        assert name in done.stdout
        assert command.summary in done.stdout


def test_the_version_is_the_packages():
    assert run("--version").stdout == f"protofleet {version('protofleet')}\n"


@pytest.mark.parametrize("name", protofleet.COMMANDS)
def test_every_command_answers_help(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert f"protofleet {name}" in done.stdout


@pytest.mark.parametrize("name", protofleet.COMMANDS)
def test_an_unknown_option_is_one_line_and_exit_2(name):
    done = run(name, "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in one_error_line(done) or "no-such-option" in one_error_line(done)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("aggregate --rounds two", "--rounds, expected a valid integer, got two, try protofleet aggregate --help"),
        ("aggregate --deadline=soon", "--deadline, expected a valid number, got soon, try protofleet aggregate --help"),
        ("aggregate --bundle b --rounds", "--rounds, expected a value, got none, try protofleet aggregate --help"),
        ("aggregate --quiet=3", "--quiet, expected no value, got one, try protofleet aggregate --help"),
        ("aggregate --store s", "--bundle, expected a value, got none, try protofleet aggregate --help"),
        ("inspect", "file, expected a value, got none, try protofleet inspect --help"),
        ("lab", "protofleet lab, expected a command, got none, try list or run"),
        ("lab rum", "protofleet lab, expected a command, got rum, try one of run"),
        (
            "aggregate --bundel b",
            "unknown option, expected an option of protofleet aggregate, got --bundel, try one of --bundle",
        ),
    ],
)
def test_wrong_use_says_what_was_expected_and_what_came(args, line):
    done = run(*args.split())
    assert done.returncode == 2
    assert one_error_line(done).startswith(f"error: {line}")


def test_an_unknown_command_is_one_line_with_the_nearest():
    done = run("agregate")
    assert done.returncode == 2
    line = one_error_line(done)
    assert line.startswith("error: unknown command, expected a protofleet command, got agregate, try one of aggregate")
    assert near_names("agregate", protofleet.COMMANDS) in line


def test_ctrl_c_is_one_line_and_exit_130(tmp_path):
    command = "export --backbone small_cnn --method fedproto --classes 3 --input 28x28x1"
    process = subprocess.Popen(
        [sys.executable, "-m", "protofleet", *command.split(), "--out", str(tmp_path / "never.bundle")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "loading torch\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.read().splitlines()[-1] == "error: interrupted"
    assert process.wait(30) == 130
    assert not list(tmp_path.iterdir())


MISSING = {
    "export": (
        "--backbone small_cnn --method fedproto --classes 3 --input 28x28x1 --out never.bundle --quiet",
        "export",
    ),
    "demo": ("--out never", "all"),
    "lab": ("run", "all"),
    "broker": ("--listen 127.0.0.1:0", "broker"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_extra_names_what_to_install(name, tmp_path):
    hide = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'iotcore', 'datasets'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())"
    )
    options, extra = MISSING[name]
    done = run(name, *options.replace("never", f"{tmp_path}/never").split(), code=hide)
    assert done.returncode == 2
    assert "needs a package that is not installed" in one_error_line(done)
    assert f"pip install 'protofleet[{extra}]'" in one_error_line(done)
    assert not list(tmp_path.iterdir())


def test_a_device_command_loads_nothing_of_the_workstation():
    watch = (
        "import sys, atexit\n"
        "heavy = ('torch', 'onnx', 'datasets', 'sklearn', 'pandas', 'plotly', 'lab', 'export')\n"
        "atexit.register(lambda: print('loaded:', [m for m in heavy if m in sys.modules]))"
    )
    for args in (
        ("--help",),
        ("client", "--help"),
        ("aggregate", "--help"),
        ("broker", "--help"),
        ("inspect", "--help"),
    ):
        assert "loaded: []" in run(*args, code=watch).stdout, args


def test_output_into_a_closed_pipe_is_no_traceback():
    shell = f"{sys.executable} -m protofleet --help | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "Traceback" not in done.stderr
