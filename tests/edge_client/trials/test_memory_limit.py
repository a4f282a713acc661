"""`client --memory-limit`: sizes, which way fits, what is proposed, and a real trial in a process of its own."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.console.logs import told
from protofleet.contract.console.sizes import read_size
from protofleet.contract.errors import UsageError
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.trials import memory_trial
from protofleet.edge_client.trials.memory_limit import (
    BESIDE_BYTES,
    KEPT_IN,
    Needed,
    fitting_forms,
    measured_bytes,
    trains_in_parts,
)

GIVEN = {"bundle": "pets.bundle", "broker": "mqtt://127.0.0.1", "id": "pi-1", "state": "state", "data": "photos"}


def settings(**options: object) -> ClientSettings:
    return read_settings(ClientSettings, {**GIVEN, **options})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("400MB", 400_000_000),
        ("400m", 400_000_000),
        ("0.4 GB", 400_000_000),
        ("256MiB", 1 << 28),
        ("12345678", 12345678),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert read_size(text, "--memory-limit") == size


@pytest.mark.parametrize(
    "text", ["", "400", "MB", "400 apples", "-400MB", "1e9", "9MB", "4OOMB", "9999999GB", "9" * 400]
)
def test_what_is_no_size_is_refused_before_anything_is_loaded(text: str) -> None:
    with pytest.raises(UsageError, match="--memory-limit, expected a size from 10MB, got"):
        settings(memory_limit=text)


@pytest.fixture(scope="module")
def manifest(mnist_like_bundle):
    return read_bundle(mnist_like_bundle()).manifest  # batches of 16, no parts


def settled(
    manifest, tmp_path: Path, needs: dict[bool, int | None], *, rounds: int | None = None, **options: object
) -> tuple[bool, list[str], list[bool]]:
    """The way that is taken, what is said, and which ways were tried; `rounds` is what the closing one adds to."""
    lines, tried = list[str](), list[bool]()

    def measure(way: str) -> Needed:
        tried.append(way == "parts")
        return Needed(needs[way == "parts"] if rounds is None else rounds, needs[way == "parts"])

    path = Path("pets.bundle")
    with told(lines.append):
        way = trains_in_parts(settings(**options), manifest, bytes(32), path, tmp_path, measure)
    return way, lines, tried


def test_whole_batches_are_taken_where_they_fit_and_parts_where_only_these_do(manifest, tmp_path: Path) -> None:
    halves = msgspec.structs.replace(manifest, micro_batch=8)
    needs = {False: 110_000_000, True: 90_000_001}
    assert settled(halves, tmp_path, needs) == (False, [], [])
    whole = settled(halves, tmp_path, needs, memory_limit="110MB")
    assert whole == (False, ["training in batches of 16 takes 110 MB of 110 MB"], [False])
    parts = settled(halves, tmp_path, needs, memory_limit="100MB")
    assert parts == (True, ["training in batches of 16, 8 at a time takes 91 MB of 100 MB"], [True]), (
        "the whole is known"
    )
    assert settled(halves, tmp_path, {}, memory_limit="100MB")[2] == [], "both were kept"
    assert settled(halves, tmp_path, needs, micro_batch=8)[0]
    (tmp_path / KEPT_IN).write_text("no JSON")
    assert settled(halves, tmp_path, needs, memory_limit="120MB", micro_batch=8)[2] == [True]


def test_what_does_not_fit_is_refused_in_a_line_with_what_would(manifest, tmp_path: Path) -> None:
    halves = msgspec.structs.replace(manifest, micro_batch=8)
    with pytest.raises(UsageError) as caught:
        settled(halves, tmp_path, {False: None, True: 90_000_001}, memory_limit="80MB")
    assert str(caught.value) == (
        "--memory-limit 80MB: pets.bundle, expected at most 80 MB, got 91 MB for training in batches of 16, 8 at a time"
        ", try exporting it with --micro-batch 4 or --trainable-blocks 1 or --method ffc"
    )
    with pytest.raises(
        UsageError, match="got more than 50 MB for training in batches of 16, try exporting it with --mic"
    ):
        settled(manifest, tmp_path, {False: None}, memory_limit="50MB")


@pytest.mark.parametrize("all_of_it", [90_000_001, None])
def test_where_the_closing_round_does_not_fit_smaller_parts_are_not_proposed(manifest, tmp_path, all_of_it) -> None:
    halves = msgspec.structs.replace(manifest, micro_batch=8)
    with pytest.raises(UsageError) as caught:
        settled(halves, tmp_path, {False: all_of_it, True: all_of_it}, rounds=80_000_000, memory_limit="80MB")
    got = "91 MB" if all_of_it else "more than 80 MB"
    assert str(caught.value) == (
        f"--memory-limit 80MB: pets.bundle, expected at most 80 MB, got {got} for the round that closes a run"
        f", try --hold-out 0 (then no head is solved here) or a backbone of fewer features than {halves.features}"
    )


def test_a_device_that_tests_with_no_photos_is_tried_without_them(manifest, tmp_path: Path, monkeypatch) -> None:
    lines = list[list[str]]()

    def run(command: list[str], **options: object) -> CompletedProcess[str]:
        lines.append(command[-5:])
        return CompletedProcess(command, 0, "60000000\n70000000\n", "")

    monkeypatch.setattr("protofleet.edge_client.trials.memory_limit.subprocess.run", run)
    for hold_out in (None, 0.0):
        given = settings(memory_limit="90MB", hold_out=hold_out)
        trains_in_parts(given, manifest, bytes(32), Path("b"), tmp_path)
    assert [line[-1] for line in lines] == ["tests", ""]


def test_parts_of_another_size_than_the_bundles_are_refused(manifest, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="parts of 8, got one without parts, try exporting it anew with --micro-batch 8"
    ):
        settled(manifest, tmp_path, {}, micro_batch=8)
    with pytest.raises(UsageError, match="parts of 4, got one of parts of 8, try --micro-batch 8"):
        settled(msgspec.structs.replace(manifest, micro_batch=8), tmp_path, {}, micro_batch=4)


def test_a_trial_measures_what_a_device_takes_and_ends_where_it_may_not(mnist_like_bundle) -> None:
    path = mnist_like_bundle()
    needed = measured_bytes(path, settings(), 400_000_000)
    assert needed.rounds is not None
    assert needed.all is not None
    assert 60_000_000 < needed.rounds - BESIDE_BYTES <= needed.all - BESIDE_BYTES < 200_000_000
    with pytest.raises(UsageError, match=r"a trial of the bundle, got .*--micro-batch, expected a bundle with graphs"):
        measured_bytes(path, settings(), 400_000_000, "parts")


def test_a_trial_also_takes_what_held_out_photos_and_the_closing_round_ask_for(mnist_like_bundle, monkeypatch) -> None:
    """FFC's sums are solved on the device itself, for what it would answer alone: that is the most of a wide bundle."""
    asked = list[tuple[str, int]]()
    monkeypatch.setattr(memory_trial.Device, "accuracy", lambda self, found, name: asked.append((name, found.samples)))
    rounds, everything = memory_trial.peaks(str(mnist_like_bundle()), 1, "whole")
    assert 0 < rounds <= everything
    assert asked == [("fedproto", 16), ("fedproto", 16), ("ffc", 16)] or asked == [("ffc", 16)]


def test_forms_that_do_not_fit_are_not_even_tried(mnist_like_bundle, tmp_path: Path, said: list[str]) -> None:
    tried = list[str]()
    forms = {name: name.encode() for name in ("small", "large", "alien", "none")}
    bundle = replace(read_bundle(mnist_like_bundle()), forms=forms)
    needs = {"small": 90_000_000, "large": 90_000_001, "none": None}

    def measure(way: str) -> Needed:
        tried.append(way)
        if way == "alien":
            raise UsageError("--memory-limit", expected="a trial of the bundle", got="not a registered function/op")
        return Needed(needs[way], needs[way])

    def fitting(**options: object) -> set[str]:
        return set(fitting_forms(settings(**options), bundle, Path(), tmp_path, measure))

    assert fitting() == {*forms}
    assert not tried
    assert fitting(memory_limit="90MB") == {"small"}
    assert said == [
        "large is left out: it takes 91 MB of 90 MB",
        "alien is left out: not a registered function/op",
        "none is left out: it takes more than 90 MB of 90 MB",
    ]
    assert fitting(memory_limit="100MB") == {"small", "large"}
    assert tried == ["small", "large", "alien", "none", "alien", "none"]


def test_a_trial_stays_below_what_the_system_allows_it(monkeypatch) -> None:
    held = list[tuple[int, tuple[int, int]]]()
    monkeypatch.setattr(memory_trial.resource, "setrlimit", lambda what, to: held.append((what, to)))
    monkeypatch.setattr(memory_trial.resource, "getrlimit", lambda what: (1, 500_000_000))
    memory_trial.hold_to(100_000_000)
    memory_trial.hold_to(400_000_000)
    assert [most for _, (most, _) in held] == [356_000_000, 500_000_000]


def test_what_a_client_has_beside_its_graphs_is_added_and_a_killed_trial_is_too_large(monkeypatch) -> None:
    ends = {"whole": (0, "90\n100\n"), "parts": (3, "90\n"), "lanes16": (-9, "")}

    def run(command: list[str], **options: object) -> CompletedProcess[str]:
        assert "-P" in command or sys.path[0] == os.getcwd(), "it is not to import from where it happens to run"
        code, said = ends[command[-4]]
        return CompletedProcess(command, code, said, "")

    monkeypatch.setattr("protofleet.edge_client.trials.memory_limit.subprocess.run", run)
    found = [measured_bytes(Path("b"), settings(), 400_000_000, way) for way in ends]
    rounds = 90 + BESIDE_BYTES
    assert found == [Needed(rounds, 100 + BESIDE_BYTES), Needed(rounds, None), Needed(None, None)]
