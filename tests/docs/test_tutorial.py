"""docs/tutorial.md is run: its blocks in order, and the errors of its table are what commands really say."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, run
from contract_samples import small_parts
from PIL import Image

from protofleet.contract.bundle.bundle_file import write_bundle
from protofleet.contract.heads.answers import _WORDS

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
LIBRARY = (ROOT / "docs" / "library.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
SAID = re.findall(r"`([^`]+)`", TUTORIAL.split("| what is said |")[1])


def test_the_blocks_are_a_shell_script_and_every_fleet_command_is_in_one_of_them() -> None:
    script = "\n".join(BLOCKS)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for command in ("export", "inspect", "doctor", "broker", "aggregate", "client", "predict", "model"):
        assert re.search(rf"protofleet {command} ", script), command


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs_as_it_stands_and_ends_in_right_answers(tmp_path: Path) -> None:
    """But for two things: a port that is free, and a network as it is initialised, since a test downloads nothing."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name, call in (("protofleet", "-m protofleet"), ("python", "")):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    script = "\n".join(BLOCKS).replace("1883", str(free_port())).replace(" --weights pretrained", "")
    assert script.count("pretrained") == 0
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    script = script.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail"], input=script, text=True, capture_output=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 contributions committed" in done.stdout + done.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 120
    right = [each["top"][0]["label"] == Path(each["photo"]).parent.name for each in answers]
    assert np.mean(right) > 0.5  # six classes, of which a device has three
    sandals = [line for line in done.stdout.splitlines() if "/sandal/" in line]
    assert sum(": sandal " in line for line in sandals) > len(sandals) / 2  # which the kitchen never had
    for made in ("things.onnx", "own.bundle"):
        assert (tmp_path / made).stat().st_size > 1000
    plain = next(
        block for block in re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL) if "InferenceSession" in block
    )
    plain = plain.replace("pets.onnx", "things.onnx").replace("cat.jpg", answers[7]["photo"])
    told = subprocess.run([sys.executable, "-c", plain], text=True, capture_output=True, cwd=tmp_path, check=True)
    assert told.stdout.split()[0] == answers[7]["top"][0]["label"]


def photos(folder: Path, *labels: str) -> Path:
    for label in labels:
        (folder / label).mkdir(parents=True)
        for number in range(6):
            Image.new("L", (4, 4), 40 * number).save(folder / label / f"{number}.png")
    return folder


def test_the_errors_of_the_table_are_what_is_really_said(tmp_path: Path) -> None:
    write_bundle(tmp_path / "pets.bundle", **small_parts())
    device = ("--id", "a", "--broker", "mqtt://127.0.0.1:9", "--state", tmp_path / "state")
    client = ("client", "--bundle", tmp_path / "pets.bundle", *device, "--data")
    said = {
        "no data at …, expected": run(*client, tmp_path / "nowhere"),
        "unknown class, expected a class of the bundle's": run(*client, photos(tmp_path / "photos", "cat", "cats")),
    }
    assert set(said) <= set(SAID)
    for phrase, done in said.items():
        error = done.stderr.splitlines()[-1]
        assert done.returncode == 2
        assert re.search(".*".join(map(re.escape, phrase.split("…"))), error), error


@pytest.mark.parametrize(
    ("phrase", "source"),
    [
        ("error: this system, expected 64 bits, got 32", "deploy/install-device.sh"),
        ("no broker at mqtt://…, expected an MQTT 5 broker", "contract/mqtt/link.py"),
        ("nothing to answer with", "edge_client/answers/predictor.py"),
        ("waiting for devices: 2 online, 3 needed", "aggregator/metrics/console.py"),
        ("waiting for round 1 to open", "edge_client/rounds/round_follower.py"),
        ("the fleet runs another bundle, expected", "edge_client/rounds/round_follower.py"),
        ("is of another bundle than", "edge_client/answers/knowledge.py"),
        ("expected the features of the bundle's test vectors, got others", "edge_client/training/compiled_graphs.py"),
    ],
)
def test_what_else_the_table_lists_is_in_the_programs(phrase: str, source: str) -> None:
    assert phrase in SAID
    words = max(re.split(r"\d+|mqtt://…|, expected\b|^expected |, got |error: ", phrase), key=len)
    assert words.strip(" /") in (ROOT / source).read_text()


def test_every_way_of_answering_has_plain_words_and_a_place_in_the_pages() -> None:
    pages = (ROOT / "docs" / "accuracy.md").read_text()
    assert set(re.findall(r"^\| `([a-z_]+)` \| (?:the |a |SphereFed|FFC|NCM|FedCOF)", pages, re.MULTILINE)) >= set(
        _WORDS
    )


# ── the installer ───────────────────────────────────────────────────────────────────────────────────────────────────

INSTALLER = ROOT / "deploy" / "install-device.sh"


def install(
    folder: Path, *words: object, python: str = "exit 0", machine: str = "aarch64"
) -> subprocess.CompletedProcess:
    """The installer with a python and a uname that are played."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, body in (("python3", python), ("uname", f"echo {machine}")):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        ["sh", INSTALLER, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True
    )


SIXTY_FOUR = 'case "$2" in *maxsize*) echo 64 ;;'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"python": "echo 32"},
            "error: this system, expected 64 bits, got 32, try the 64-bit image of Raspberry Pi OS",
        ),
        ({"python": "echo 64", "machine": "armv7l"}, "error: this processor, expected aarch64 or x86_64, got armv7l"),
        (
            {"python": f'[ "$1" = -V ] && echo Python 3.9.2; {SIXTY_FOUR} *version_info*) exit 1 ;; esac'},
            "expected 3.11 or newer, got Python 3.9.2, try Raspberry Pi OS 12",
        ),
        (
            {"python": f"{SIXTY_FOUR} *ensurepip*) exit 1 ;; esac"},
            "expected the module venv, got none, try sudo apt install",
        ),
        ({"python": "echo 64", "words": ["none.whl"]}, "error: none.whl, expected a wheel, got nothing there"),
        (
            {"python": "echo 64", "words": ["--user"]},
            "error: --user, expected --into DIR, --with EXTRA, a wheel or a name",
        ),
        ({"python": "echo 64", "words": ["--with"]}, "error: --with, expected an extra, got none, try --with security"),
    ],
    ids=["32 bits", "armv7", "old Python", "no venv", "no wheel", "unknown option", "no extra"],
)
def test_the_installer_says_in_one_line_what_is_missing(tmp_path: Path, options: dict, expected: str) -> None:
    done = install(tmp_path, *options.pop("words", []), **options)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "protofleet").exists()


def test_the_installer_makes_one_environment_and_brings_it_up_to_date(tmp_path: Path) -> None:
    """Python is real, its pip is played: what pip is asked to do is looked at, a download is not a test's business."""
    wheel = tmp_path / "protofleet-0.2.0-py3-none-any.whl"
    wheel.touch()
    home = tmp_path / "protofleet"
    body = f"""
case "$*" in
*maxsize*) echo 64 ;;
"-m venv "*) mkdir -p {home}/bin; cp "$0" {home}/bin/python; echo venv >> {tmp_path}/log ;;
"-c import pip") ;;
"-m pip "*) echo "$*" >> {tmp_path}/log ;;
*onnxruntime*) echo "0.2.0 with ONNX Runtime 1.31.1" ;;
esac"""
    for words in ((), ("--with", "security")):
        done = install(tmp_path, *words, python=body)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Protofleet 0.2.0 with ONNX Runtime 1.31.1 in {home}: ")
    log = (tmp_path / "log").read_text().splitlines()
    assert log.count("venv") == 1
    pip = "-m pip --disable-pip-version-check --quiet install --no-compile"
    assert [line.removeprefix(pip) for line in log if line != "venv"] == [
        f" --upgrade --upgrade-strategy only-if-needed ./{wheel.name}",
        f" --force-reinstall --no-deps ./{wheel.name}",
        f" --upgrade --upgrade-strategy only-if-needed ./{wheel.name}[security]",
        f" --force-reinstall --no-deps ./{wheel.name}",
    ]


def test_scripts_are_shell() -> None:
    for script, shell in ((INSTALLER, "sh"), (ROOT / "scripts" / "arm64-check", "bash")):
        assert subprocess.run([shell, "-n", script]).returncode == 0
        assert os.access(script, os.X_OK)
