"""The front door: every command is found, loads only its own room, and fails in one line with the right exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest
from commands import ROOT, one_error_line, run, run_process
from contract_samples import small_parts

from protofleet import cli
from protofleet.contract.bundle.bundle_file import write_bundle
from protofleet.contract.errors import near_names
from protofleet.contract.extras import install_command


def test_the_installed_command_is_this_front_door():
    (script,) = [s for s in entry_points(group="console_scripts") if s.name == "protofleet"]
    assert script.load() is cli.main


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command_and_exits_0(args):
    done = run(*args)
    assert done.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.summary in done.stdout


def test_the_version_is_the_packages():
    assert run_process("--version").stdout == f"protofleet {version('protofleet')}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_answers_help(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert f"protofleet {name}" in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_an_unknown_option_is_one_line_and_exit_2(name):
    done = run(name, "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in one_error_line(done) or "no-such-option" in one_error_line(done)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("aggregate --rounds two", "--rounds, expected a valid integer, got two, try protofleet aggregate --help"),
        ("aggregate --deadline=soon", "--deadline, expected a valid number, got soon, try protofleet aggregate --help"),
        ("predict --top 0", "--top, expected 1 or more, got 0"),
        ("aggregate --bundle b --rounds", "--rounds, expected a value, got none, try protofleet aggregate --help"),
        ("aggregate --quiet=3", "--quiet, expected no value, got one, try protofleet aggregate --help"),
        ("aggregate --store s", "protofleet aggregate, expected --bundle and --broker, got none, try --help"),
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
    done = run_process("agregate")
    assert done.returncode == 2
    line = one_error_line(done)
    assert line.startswith("error: unknown command, expected a protofleet command, got agregate, try one of aggregate")
    assert near_names("agregate", cli.COMMANDS) in line


def test_a_machine_with_too_little_memory_is_one_line(monkeypatch):
    def command(name, rest):
        raise MemoryError("Unable to allocate 80.0 GiB")

    monkeypatch.setattr(cli, "_call", command)
    done = run("predict")
    assert (done.returncode, one_error_line(done)) == (1, "error: not enough memory (Unable to allocate 80.0 GiB)")


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
    done = run_process(name, *options.replace("never", f"{tmp_path}/never").split(), code=hide)
    assert done.returncode == 2
    assert "needs a package that is not installed" in one_error_line(done)
    assert f"try {install_command(extra)}" in one_error_line(done)
    assert not list(tmp_path.iterdir())


def test_a_demo_from_scratch_names_the_extra_that_has_what_it_needs():
    missing = ModuleNotFoundError("No module named 'datasets'", name="datasets")
    assert install_command("all") in str(cli._missing_package("demo", missing))
    missing = ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
    assert install_command("demo") in str(cli._missing_package("demo", missing))


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
        assert "loaded: []" in run_process(*args, code=watch).stdout, args


def test_output_into_a_closed_pipe_is_no_traceback():
    shell = f"{sys.executable} -m protofleet --help | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_answers_h_as_help(name):
    assert run(name, "-h").stdout == run(name, "--help").stdout


@pytest.mark.parametrize("name", ["aggregate", "broker", "client", "demo", "export"])
def test_what_logs_can_be_quiet_in_one_way(name):
    assert "--quiet, -q" in " ".join(run(name, "-h").stdout.split()) or "-q, --quiet" in run(name, "-h").stdout


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("protofleet ag", ["aggregate"]),
        ("protofleet client --pol", ["--policy"]),
        ("protofleet cost sweep F.bundle --cs", ["--csv"]),
        ("protofleet lab ru", ["run"]),
        ("protofleet lab run --save-w", ["--save-weights"]),
    ],
)
def test_the_shell_completes_commands_and_options(words, wanted):
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = run_process(**variables, _PROTOFLEET_COMPLETE="complete_bash")
    assert done.stdout.split() == wanted, done.stderr


def test_completion_is_installed_for_a_shell_and_shown(tmp_path):
    assert "complete -o default -F" in run("--show-completion", "bash").stdout
    assert "complete -o default -F" in run("--show-completion", SHELL="/bin/bash").stdout
    assert run("--install-completion", "bash", HOME=str(tmp_path)).returncode == 0
    assert "_PROTOFLEET_COMPLETE" in (tmp_path / ".bash_completions" / "protofleet.sh").read_text()
    wrong = run("--show-completion", "dos")
    assert wrong.returncode == 2
    assert "expected a shell, got dos" in one_error_line(wrong)


@pytest.mark.parametrize("name", ["inspect", "cost", "lab list"])
def test_json_goes_whole_to_a_file_or_alone_to_standard_output(name, tmp_path):
    write_bundle(tmp_path / "b.bundle", **small_parts())
    words = {
        "inspect": ("inspect", "b.bundle"),
        "cost": ("cost", "spherefed_convnet"),
        "lab list": ("lab", "list"),
    }[name]
    words = [str(tmp_path / word) if word == "b.bundle" else word for word in words]
    told = json.loads(run(*words, "--json", "-").stdout)
    assert run(*words, "--json", str(tmp_path / "r.json")).returncode == 0
    assert json.loads((tmp_path / "r.json").read_text()) == told
    for path in (tmp_path, tmp_path / "none" / "r.json", "/proc/r.json"):
        assert "--json" in one_error_line(failed(*words, "--json", str(path)))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.bundle", "r.json"]


def failed(*words: str) -> subprocess.CompletedProcess[str]:
    done = run(*words)
    assert done.returncode == 2, done.stderr
    return done


def test_a_module_of_ours_that_is_missing_is_no_package_to_install() -> None:
    """It is a fault of ours, and no extra brings it."""
    ours = ModuleNotFoundError("No module named 'protofleet.lab.gone'", name="protofleet.lab.gone")
    assert cli._missing_package("lab", ours) is ours
    theirs = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert "needs a package that is not installed, expected torch" in str(cli._missing_package("lab", theirs))
