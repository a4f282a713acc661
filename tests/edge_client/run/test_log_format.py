"""`--log-format json`, and whose eyes a photo's name is for: from the commands' own output."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import commands
import numpy as np
import pytest
from brokers import Embedded
from fleets import ENVIRONMENT, Processes
from PIL import Image

from protofleet import lab
from protofleet.contract.bundle.bundle_file import read_bundle

BUNDLE = Path(lab.__file__).parent / "demo" / "shipped" / "fleet.bundle"
HOSTILE = "grandma\x1b[31m\n{'x'}.png"
NOWHERE = ("--broker", "mqtt://user:s3cret@127.0.0.1:1", "--until-finished", "--patience", "0.2")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos of three classes, and a file that is none."""
    rng, labels = np.random.default_rng(0), read_bundle(BUNDLE).manifest.labels[1:4]
    for label in labels:
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (28, 28), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"uncle-{number}.png")
    (tmp_path / "photos" / labels[0] / HOSTILE).write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.end()


def client(photos: Path, *options: object) -> tuple[object, ...]:
    state = photos.parent / "state"
    return ("client", "--bundle", BUNDLE, "--id", "pi-1", "--data", photos, "--state", state, *options)


def test_a_fleets_records_are_lines_of_json_without_secrets_or_photos(photos: Path, processes: Processes) -> None:
    broker = Embedded()
    broker.start()
    try:
        to, as_json = ("--broker", broker.url), ("--log-format", "json", "--fleet", "pets")
        store = ("--store", photos.parent / "s.sqlite")
        processes.start(
            "aggregate", "aggregate", "--bundle", BUNDLE, *to, *store, "--rounds", 1, "--no-calibrate", *as_json
        )
        signed_in = ("--broker", broker.url.replace("://", "://user:s3cret@"))
        processes.start("client", *client(photos, *signed_in, "--until-finished", *as_json))
        assert processes.finish() == {"aggregate": 0, "client": 0}, processes.log("client")
    finally:
        broker.stop()
    records = {name: [json.loads(line) for line in processes.log(name).splitlines()] for name in processes.processes}
    for text in map(processes.log, processes.processes):
        assert not any(secret in text for secret in ("s3cret", "user:", "grandma", "uncle"))
    mine = records["client"]
    assert all((each["fleet"], each["device"]) == ("pets", "pi-1") for each in mine)
    (skipped,) = [each for each in mine if "skipped" in each["message"]]
    assert (skipped["level"], skipped["logger"]) == ("WARNING", "protofleet.edge_client.data.decode")
    (committed,) = [each for each in mine if each["message"] == "round 1 (ffc): committed"]
    (closed,) = [each for each in records["aggregate"] if each.get("event") == "RoundClosed"]
    assert (committed["round"], committed["method"], committed["run"]) == (1, "ffc", closed["run"])
    assert committed["bundle"] == read_bundle(BUNDLE).sha256.hex()
    assert (closed["fleet"], closed["round"], closed["method"], closed["committed"]) == ("pets", 1, "ffc", 1)
    assert closed["logger"] == "protofleet.aggregator"


@pytest.mark.parametrize(("options", "shown"), [((), False), (("--verbose",), True)])
def test_into_a_pipe_a_photos_name_is_told_with_verbose_alone(
    photos: Path, options: tuple[str, ...], shown: bool
) -> None:
    for as_json in ((), ("--log-format", "json")):
        done = commands.run(*client(photos, *NOWHERE, *options, *as_json))
        assert done.returncode == 1
        assert ("grandma" in done.stderr) == shown
        assert "s3cret" not in done.stderr
        lines = done.stderr.splitlines()
        if as_json:
            last = json.loads(lines[-1])
            assert last["level"] == "ERROR"
            assert last["message"].startswith("no broker at mqtt://127.0.0.1:1"), last
            assert [json.loads(line)["device"] for line in lines] == ["pi-1"] * len(lines)
        else:
            assert lines[-1].startswith("error: ")
            assert all(line.startswith("pi-1: ") for line in lines[:-1])


def test_the_owner_at_a_terminal_reads_which_photo_it_is(photos: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as terminal:
        command = [sys.executable, "-m", "protofleet", *map(str, client(photos, *NOWHERE))]
        process = subprocess.Popen(command, stderr=theirs, env=ENVIRONMENT)
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(terminal.fileno(), 4096):
                said += chunk
        except OSError:  # the other end is closed
            pass
        assert process.wait(60) == 1
    line = next(line for line in said.decode().splitlines() if "skipped" in line)
    assert line.startswith("pi-1: skipped 1 of 37 images of ")
    assert line.endswith(r"grandma\x1b[31m\n{'x'}.png (no image of a known format)")


def test_an_unknown_format_is_refused_before_anything_begins(photos: Path) -> None:
    done = commands.run(*client(photos, *NOWHERE, "--log-format", "jsn"))
    assert done.returncode == 2
    assert commands.one_error_line(done) == "error: --log-format, expected text or json, got jsn, try one of json"
