"""`--quiet` and `--verbose`, the same in every command that logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import one_error_line, run
from fleets import bundle, fleet_in, share
from lab_samples import small_directory

from protofleet import cli

LOGS = {"aggregate": (), "broker": (), "client": (), "demo": (), "export": (), "lab": ("run",)}
_NEEDED = {
    "aggregate": "--bundle b --broker mqtt://h --store s",
    "client": "--bundle b --broker mqtt://h --id d --data d --state s",
    "export": "--backbone small_cnn --method fedproto --classes 3 --input 28x28x1 --out b",
}


@pytest.mark.parametrize("name", LOGS)
def test_what_logs_can_be_quiet_or_verbose_in_one_way(name: str) -> None:
    told = " ".join(run(name, *LOGS[name], "-h").stdout.split())
    for long, short in (("--quiet", "-q"), ("--verbose", "-v")):
        assert f"{long}, {short}" in told or f"{short}, {long}" in told


@pytest.mark.parametrize("name", LOGS)
def test_both_at_once_are_refused_in_one_line(name: str) -> None:
    done = run(name, *LOGS[name], *_NEEDED.get(name, "").split(), "-q", "-v")
    assert done.returncode == 2
    assert one_error_line(done) == "error: --quiet and --verbose, expected one of them, got both"


def test_a_verbose_fleet_tells_each_message_and_counts_at_the_end(tmp_path: Path) -> None:
    made = bundle(tmp_path / "f.bundle", "fedproto", "fedproto_mnist", input_shape=(28, 28, 1))
    with fleet_in(tmp_path) as fleet:
        fleet.aggregator([made], "-v", "--rounds", 1, "--no-calibrate")
        fleet.client("d0", made, share(0, range(3), whole=True), "-v")
        assert set(fleet.finish().values()) == {0}, fleet.log("d0")
    aggregator, device = fleet.log("aggregator"), fleet.log("d0")
    assert "d0, round 1 (fedproto): committed" in aggregator
    assert "link closed: 1 connections, 0 messages dropped at QoS 0" in aggregator
    assert "announcement, " in device
    assert "bytes on pf/v2/" in device
    assert "link closed: 1 connections, 0 messages skipped, 0 refused, 0 dropped at QoS 0, 0 contributions" in device


def test_a_quiet_lab_run_prints_nothing_and_a_verbose_one_each_turn(tmp_path: Path) -> None:
    data = str(small_directory(tmp_path / "data"))
    common = [
        "lab",
        "run",
        "--jobs",
        "1",
        "--method",
        "ffc",
        "--rounds",
        "1",
        "--clients",
        "2",
        "--backbone",
        "fedproto_mnist",
    ]
    quiet, verbose = (run(*common, "--data", data, option, HOME=str(tmp_path)) for option in ("-q", "-v"))
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert "round 1, device 2 of 2" in verbose.stdout, verbose.stderr


def test_a_report_is_whole_before_it_is_shown(tmp_path: Path) -> None:
    """Whoever reads along may leave after the first line: `profile F --json r.json | head -1`."""
    made = bundle(tmp_path / "f.bundle", "fedproto", "fedproto_mnist", input_shape=(28, 28, 1))
    for name, words in {
        "profile": ["profile", made, "--html", tmp_path / "profile.html"],
        "cost": ["cost", "spherefed_convnet", "--html", tmp_path / "cost.html"],
        "inspect": ["inspect", made],
        "list": ["lab", "list"],
    }.items():
        target = tmp_path / f"{name}.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "protofleet", *map(str, words), "--json", str(target)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(cli.__file__).parent.parent,
        )
        assert process.stdout is not None
        process.stdout.close()
        said = process.communicate(timeout=300)[1]
        assert target.exists(), said
        assert b"Traceback" not in said
    assert (tmp_path / "profile.html").exists()
    assert (tmp_path / "cost.html").exists()
