"""`protofleet demo --living`: the month's story, its figures, its page; and, when it is run, nothing lost or left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from commands import one_error_line, run
from markupsafe import escape
from page_checks import check_page

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.export.bundles.extend import extend_bundle
from protofleet.lab.data.datasets import take
from protofleet.lab.demo.living.figures import Figures
from protofleet.lab.demo.living.proofs import StoreContents, compare, head_error, stretches, total_of
from protofleet.lab.demo.living.report import render_living
from protofleet.lab.demo.living.run import write_short
from protofleet.lab.demo.living.story import DAYS, DEVICES, FIRST, GROWN, HAPPENINGS, labels_of, plan
from protofleet.lab.demo.living.summary import SCHEMA
from protofleet.lab.demo.shipped import read_images, shipped_bundle
from protofleet.lab.demo.story import Images
from tests.lab.demo.test_demo import HIDE

NAMED = {device.name: device for device in DEVICES}


@pytest.fixture(scope="module")
def images() -> Images:
    return read_images()


# ── the story ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [0, 7])
def test_every_photo_comes_to_one_device_that_is_there(images: Images, seed: int) -> None:
    month = plan(images, seed)
    rows = [each.row for arrivals in month.arrivals.values() for each in arrivals]
    rows += [row for taught in month.taught.values() for row in taught]
    assert sorted(rows) == list(range(len(images.dealt)))
    for device in DEVICES:
        assert all(device.joins <= each.day < DAYS for each in month.arrivals[device.name])
        first = Counter(images.dealt.y[month.come(device.name, device.joins)].tolist())
        assert first == dict.fromkeys(device.holds, FIRST)
        seen = set(images.dealt.y[month.there(device, DAYS)].tolist())
        assert seen - {images.classes - 1} == set(device.holds)
    again = plan(images, seed)
    assert again.arrivals == month.arrivals


def test_nobody_has_the_new_class_before_its_day_and_enough_have_it_after(images: Images) -> None:
    month, new = plan(images, 0), images.classes - 1
    have = {
        day: [device.name for device in DEVICES if new in images.dealt.y[month.there(device, day)]]
        for day in (GROWN - 1, GROWN, DAYS)
    }
    assert have[GROWN - 1] == []
    assert have[GROWN] == [device.name for device in DEVICES if device.finds_new]
    assert have[DAYS] == [device.name for device in DEVICES if device.finds_new or device.taught]
    assert all(device.stays_awake for device in DEVICES if device.finds_new)  # they have the long list on that day


def test_each_class_is_on_two_devices_and_those_that_stay_have_all() -> None:
    holders = Counter(number for device in DEVICES for number in device.holds)
    assert holders == dict.fromkeys(range(9), 2)
    assert {number for device in DEVICES if device.is_there(DAYS) for number in device.holds} == set(range(9))


def test_what_happens_can_happen(images: Images) -> None:
    """Whoever is killed in its work is awake and has some; whoever is taken out sleeps, and was there until then."""
    month = plan(images, 0)
    on = {each.what: each for each in HAPPENINGS if each.what != "joins"}
    for each in (happening for happening in HAPPENINGS if happening.what == "joins"):
        assert NAMED[each.device].joins == each.day
    killed, taught, woken = (on[what] for what in ("device killed", "taught", "wakes"))
    assert NAMED[killed.device].wakes(killed.day)
    assert not NAMED[killed.device].wakes(killed.day - 1)
    assert month.come(killed.device, killed.day)
    stays = DEVICES[0].name  # whose sums are waited for while there is no aggregator
    assert month.come(stays, on["aggregator killed"].day)
    assert not NAMED[taught.device].stays_awake
    assert any(NAMED[taught.device].wakes(day) for day in range(GROWN, taught.day))  # it has the long list
    assert NAMED[taught.device].wakes(taught.day)
    for what in ("forgotten", "withdraws"):
        gone = NAMED[on[what].device]
        assert (gone.leaves, gone.stays_awake) == (on[what].day, False)
    assert on["comes back"].device == on["forgotten"].device
    slept = max(day for day in range(woken.day) if NAMED[woken.device].wakes(day))
    assert f"after {woken.day - slept} days" in woken.words
    assert all(device.wakes(DAYS) for device in DEVICES if device.is_there(DAYS))
    marked = [each.day for each in HAPPENINGS if each.marked]
    assert all(later - earlier >= 2 for earlier, later in pairwise(marked))  # their marks have room


def test_the_short_bundle_is_extended_to_the_shipped_extractor(images: Images, tmp_path: Path) -> None:
    labels = labels_of(images)
    short = read_bundle(write_short(tmp_path / "short.bundle", labels[:-1]))
    extend_bundle(tmp_path / "short.bundle", [labels[-1]], tmp_path / "long.bundle")
    long, whole, ffc = read_bundle(tmp_path / "long.bundle"), shipped_bundle(), method("ffc")
    assert (short.manifest.labels, long.manifest.labels) == (labels[:-1], labels)
    assert long.manifest.extended == {short.sha256: 9}
    assert short.extractor(ffc) == long.extractor(ffc) == whole.extractor(ffc)
    assert short.features == whole.features
    assert "/" not in "".join(labels)  # they are names of folders


# ── figures and proofs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_head_of_few_classes_answers_no_other(images: Images) -> None:
    few = Images("few", images.labels, images.public, take(images.dealt, np.arange(0, 2000, 20)), images.test, 0)
    few = Images(**{**few.__dict__, "test": take(images.test, np.arange(0, 1000, 10))})
    figures = Figures(few, shipped_bundle())
    old = np.flatnonzero(few.dealt.y < 5)
    asked, everything = figures.of_photos(old), figures.of_photos(range(len(few.dealt)))
    assert set(asked.answers.tolist()) <= set(range(5))
    assert asked.new == 0.0
    assert asked.right == pytest.approx(float((asked.answers == few.test.y).mean()))
    assert everything.right > asked.right
    assert figures.of_photos(reversed(old.tolist())) is asked  # the same photos, whatever their order


def _held(rows: int, *, more: float = 0.0) -> StoreContents:
    rng = np.random.default_rng(0)
    sums = {
        name: ExactSum.of(FeatureGram.of(rng.normal(size=(rows, 3)) + more, rng.integers(0, 2, rows), 2))
        for name in "ab"
    }
    return StoreContents(sums, total_of(sums), np.eye(2, 3, dtype=np.float32), {"a": 1, "b": 1})


def test_sums_are_equal_to_the_last_integer_or_differ() -> None:
    same, other = compare(_held(8), _held(8)), compare(_held(8), _held(8, more=1e-9))
    assert (same["equal"], same["differing_integers"], same["equal_devices"], same["head_differing"]) == (True, 0, 2, 0)
    assert not other["equal"]
    assert 0 < other["differing_integers"] <= other["integers"] == 6 + 6 + 2
    assert other["equal_devices"] == 0
    assert head_error(np.full((2, 2), 1.1), np.ones((2, 2))) == pytest.approx(0.1)


def test_pieces_of_a_message_are_found_wherever_they_lie(tmp_path: Path) -> None:
    message = np.random.default_rng(0).bytes(4096) + bytes(4096)
    store = tmp_path / "store.sqlite"
    store.write_bytes(b"x" * 100 + message[:2048])
    (tmp_path / "store.sqlite-wal").write_bytes(b"y" + message[2048:])
    assert stretches(store, message) == (128, 128)
    store.write_bytes(b"")
    assert stretches(store, message) == (64, 128)


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _summary(**changed: Any) -> dict[str, Any]:
    """A month as a summary tells it, with made-up figures."""
    images = 1_000
    days = [
        {
            "day": day,
            "awake": [device.name for device in DEVICES if device.wakes(day)],
            "photos": {device.name: 45 + day for device in DEVICES if device.is_there(day)},
            "global_version": day,
            "fleet": {"right": 0.3 + day / 100, "new": 0.4 if day >= GROWN else 0.0},
            "devices": {d.name: {"right": 0.3 + day / 100, "new": 0.0} for d in DEVICES if d.is_there(day)},
            "pooled": {"right": 0.32 + day / 100, "new": 0.5 if day >= GROWN else 0.0},
            "alone": {"right": 0.25, "new": 0.1},
        }
        for day in range(1, DAYS + 1)
    ]
    number = iter(range(1, 99))
    happenings = [
        {
            "day": each.day,
            "what": each.what,
            "device": each.device,
            "words": each.words.format(new="<boot>"),
            "number": next(number) if each.marked else None,
        }
        for each in HAPPENINGS
    ]
    devices = [
        {
            "id": device.name,
            "holds": ["Bag", "Coat"],
            "on_mains": device.stays_awake,
            "joins": device.joins,
            "leaves": None if device.is_there(DAYS) else device.leaves,
            "awake": [day for day in range(1, DAYS + 1) if device.wakes(day)],
            "starts": 3,
            "photos": 300,
            "sums": 7,
            "outcomes": {"sent": 7, "committed": 6, "duplicate": 1},
            "uplink_bytes": 70_000,
            "peak_rss_bytes": 95_000_000,
        }
        for device in DEVICES
    ]
    never = {"devices": ["harbour"], "integers": 9_546, "differing_integers": 0, "equal_devices": 1, "equal": True}
    sent = {"sent": 42, "counted": 42, "duplicate": 1, "late": 0, "rejected": 0, "pending": 0}
    found = {
        "schema": SCHEMA,
        "dataset": "some",
        "seed": 0,
        "labels": ["Bag", "Coat", "<boot>"],
        "new_label": "<boot>",
        "test_images": images,
        "new_test_images": 100,
        "days": days,
        "happenings": happenings,
        "devices": devices,
        "bundle_as_shipped": 0.28,
        "forgotten": {"device": "market", "samples": 210, "before": 9, "after": 0, "stretches": 9},
        "never": never | {"digest": "ab" * 32, "head_numbers": 1280, "head_differing": 0},
        "pooled_at_the_end": {"relative_error": 2.5e-8, "equal_predictions": images},
        "equal_to_predict": {"harbour": images},
        "contributions": sent,
        "device_peak_rss_bytes": 95_000_000,
        "shown_days": [1, GROWN - 1, DAYS],
        "shown": [{"png": "AAAA", "label": "Bag", "new": False, "said": ["Bag", "Coat", "Bag"]}],
        "backbone": {"name": "small_cnn", "features": 128, "provenance": "made; the first 2", "bundles": ["ab", "cd"]},
        "machine": {"cores": 2},
        "seconds": 70.0,
        "seconds_by_phase": {"month": 60.0, "proofs": 10.0},
    }
    return found | changed


def test_the_page_leads_with_what_came_of_the_month() -> None:
    page = render_living(_summary())
    check_page(page)
    assert "<h1>31.0\u00a0→\u00a060.0\u00a0% right in 30 days, a class that nobody knew among them" in page.replace(
        "&nbsp;", "\u00a0"
    )
    assert page.index("<h1>") < page.index('class="tiles"') < page.index("images, day by day") < page.index("Proofs")
    assert "<boot>" not in page
    assert "&lt;boot&gt;" in page
    for each in HAPPENINGS:
        assert escape(each.words.format(new="<boot>")) in page
    assert page.count('class="c-event"') == sum(each.marked for each in HAPPENINGS) + 6  # and from day 12 on


def test_the_page_says_so_where_sums_differ_or_nothing_was_gained() -> None:
    summary = _summary()
    worse = {**summary["never"], "differing_integers": 3, "equal": False}
    assert "<h1>In this run the fleet's sums are not those of a fleet in which" in render_living(_summary(never=worse))
    days = [{**day, "fleet": {"right": 0.3, "new": 0.0}} for day in summary["days"]]
    assert "<h1>In this run the fleet is 30.0" in render_living(_summary(days=days))


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--clients", "3"), "error: --clients with --living, expected one of them, got both"),
        (("--from-scratch",), "error: --from-scratch with --living, expected one of them, got both"),
        (("--method", "ncm"), "error: --method with --living, expected one of them, got both"),
        (("--seed", "-1"), "error: --seed, expected 0 to 2147483647, got -1"),
        (("--port", "70000"), "error: --port, expected 0 to 65535, got 70000"),
        (("--quiet", "--verbose"), "error: --quiet and --verbose, expected one of them"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(options: tuple[str, ...], line: str, tmp_path: Path) -> None:
    done = run("demo", "--living", "--out", tmp_path / "out", *options)
    assert done.returncode == 2
    assert one_error_line(done).startswith(line)
    assert not (tmp_path / "out").exists()


Started = tuple[subprocess.Popen[str], Path]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """As the README starts it, where nothing is installed but what the demo needs."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "hidden")}
    command = [sys.executable, "-m", "protofleet", "demo", "--living", "--out", str(tmp_path / "out"), "--quiet"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    demo = subprocess.Popen(command, **both, env=environment, text=True, start_new_session=True)
    try:
        yield demo, tmp_path / "out"
    finally:
        demo.kill()
        demo.communicate()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_month(started: Started) -> None:
    demo, out = started
    printed, errors = demo.communicate(timeout=1100)
    assert (demo.returncode, printed, errors) == (0, "", "")
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    check_page((out / "report.html").read_text(encoding="utf-8"))
    assert summary["schema"] == SCHEMA
    assert summary["never"]["equal"]
    assert (summary["never"]["differing_integers"], summary["never"]["head_differing"]) == (0, 0)
    assert summary["never"]["devices"] == sorted(device.name for device in DEVICES if device.is_there(DAYS))
    assert summary["pooled_at_the_end"]["equal_predictions"] == summary["test_images"] == 1_000
    assert set(summary["equal_to_predict"].values()) == {1_000}
    sent = summary["contributions"]
    assert sent["pending"] == sent["rejected"] == 0
    assert sent["sent"] == sent["counted"] + sent["late"]
    assert sent["counted"] <= sent["generations_held"] <= sent["sent"]
    gone = summary["forgotten"]
    assert (gone["device"], gone["after"]) == ("market", 0)
    assert gone["before"] > 0.8 * gone["stretches"] > 10
    first, before, last = (summary["days"][number - 1] for number in (1, GROWN - 1, DAYS))
    assert first["fleet"]["right"] < 0.45 < 0.58 < last["fleet"]["right"]
    assert before["fleet"]["new"] == before["pooled"]["new"] == 0.0
    assert last["fleet"]["new"] > 0.3
    assert last["fleet"] == last["pooled"]
    starts = {device["id"]: device["starts"] for device in summary["devices"]}
    assert starts["harbour"] == 2  # it stays, but for the day on which it changes its bundle
    assert starts["mill"] == sum(NAMED["mill"].wakes(day) for day in range(1, DAYS + 1)) + 1  # killed once


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_in_the_month_leaves_no_process_and_one_line(started: Started) -> None:
    demo, out = started
    history = out / "devices" / "school" / "state" / "history.jsonl"
    while not history.exists():
        assert demo.poll() is None, demo.communicate()[1]
        time.sleep(0.1)
    processes = psutil.Process(demo.pid).children(recursive=True)
    assert len(processes) >= 4
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors == "error: interrupted, every process it started is ended\n"
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)
