"""`protofleet demo` as a user runs it: real processes, a real broker, real images; and nothing left however it ends."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from commands import one_error_line, run
from lab_samples import small_directory
from page_checks import check_page
from PIL import Image

from protofleet.contract.extras import install_command
from protofleet.contract.methods import METHODS
from protofleet.hw_profiles.units import percent
from protofleet.lab.demo.photos import DEALT_PER_CLASS, read_photos
from protofleet.lab.demo.report import render_report
from protofleet.lab.demo.shipped import read_images

Ran = Callable[[str], tuple[dict[str, Any], str, str, Path]]


FASHION = ("--data", "fashion_mnist_subset")

# What a plain installation of the demo lacks; a process that is told so finds none of it.
WORKSTATION = ("torch", "torchvision", "onnx", "onnxscript", "pyarrow", "pandas", "datasets", "flwr_datasets")
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {WORKSTATION}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Hidden())
"""
WITHOUT_PHOTOS = """
import pathlib, protofleet.contract.bundle.shipped_extractor as shipped
shipped._PACKAGE, shipped._CHECKOUT = 'none_of_this_name', pathlib.Path('/nowhere')
"""


def _start(
    out: Path, *options: str, hidden: Path | None = None, lacks: str = HIDE + WITHOUT_PHOTOS
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protofleet", "demo", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    if hidden is not None:  # for the processes that it starts, too
        (hidden / "sitecustomize.py").write_text(lacks)
        environment["PYTHONPATH"] = str(hidden)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _descendants(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(demo.pid).children(recursive=True)


def _wait(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


Finished = tuple[Path, str, list[psutil.Process]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_directory(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One whole demo as the README starts it, where nothing is installed but what it needs; the processes it had, and
    what it printed."""
    return _finished(tmp_path_factory.mktemp("demo") / "out", hidden=tmp_path_factory.mktemp("hidden"))


@pytest.fixture(scope="module")
def on_photos(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same where the extra `photos` is installed, too, of three devices."""
    hidden = tmp_path_factory.mktemp("hidden")
    return _finished(tmp_path_factory.mktemp("photos") / "out", "--clients", "3", hidden=hidden, lacks=HIDE)


def _finished(out: Path, *options: str, hidden: Path | None = None, lacks: str = HIDE + WITHOUT_PHOTOS) -> Finished:
    demo = _start(out, *options, hidden=hidden, lacks=lacks)
    seen: dict[int, psutil.Process] = {}
    try:
        while demo.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen |= {each.pid: each for each in _descendants(demo)}
            time.sleep(0.5)
        printed, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 0, errors
    return out, printed, list(seen.values())


@pytest.fixture(scope="module")
def summary(finished: Finished) -> dict[str, Any]:
    return _summary(finished[0])


def _summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_scratch_it_tells_the_same_story(tmp_path: Path, summary: dict[str, Any]) -> None:
    """Pretrained and exported here, on all shipped images."""
    found = _summary(_finished(tmp_path / "out", "--from-scratch", *FASHION)[0])
    assert (tmp_path / "out" / "backbone.safetensors").is_file()
    assert found["devices"][0]["samples_per_class"] == summary["devices"][0]["samples_per_class"]
    for way in ("public_alone", "local_only", "closing"):
        there, here = (each["accuracy"]["all_classes"][way] for each in (found, summary))
        assert there == pytest.approx(here, abs=0.05), way  # floats are summed in another order on another machine


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_fedproto_the_fleet_beats_its_devices(tmp_path: Path) -> None:
    """Five devices, five rounds, and FFC's."""
    found = _summary(_finished(tmp_path / "out", "--method", "fedproto")[0])
    assert (found["method"], found["clients"], found["rounds"]) == ("fedproto", 5, 5)
    assert found["contributions"] == {"sent": 30, "committed": 30, "duplicates_refused": 0}
    over_all = found["accuracy"]["all_classes"]
    assert over_all["local_only"] < min(over_all["federated"], over_all["closing"])
    assert found["uplink_bytes_per_device_round"] <= 0.01 * found["fedavg_bytes_per_device_round"]
    assert found["message_overhead_bytes"] <= 60


def test_the_fleet_names_what_nobody_alone_does(summary: dict[str, Any]) -> None:
    """Figures of one machine, and wide of them."""
    new, everything = summary["accuracy"]["new_classes"], summary["accuracy"]["all_classes"]
    assert new["public_alone"] == 0.0  # what the public images do not show, they cannot teach
    assert new["closing"] > 0.5
    assert everything["closing"] > 0.55
    assert everything["local_only"] < 0.35
    assert everything["public_alone"] < 0.5
    confusion = summary["confusion"]["closing"]
    assert all(row[number] > 0 for number, row in enumerate(confusion))  # of every class it names some right


def test_summary_has_the_keys_that_are_contract(summary: dict[str, Any]) -> None:
    assert (summary["schema"], summary["dataset"]) == ("protofleet.demo/4", "fashion_mnist_subset")
    assert (summary["method"], summary["clients"], summary["rounds"]) == ("ffc", 5, 1)
    ways = {"public_alone", "bundle_as_shipped", "local_only", "federated", "closing"}
    assert set(summary["accuracy"]["own_classes"]) == ways
    for part in ("new_classes", "all_classes"):
        assert set(summary["accuracy"][part]) == ways | {"pooled_ridge"}
        assert all(0 <= value <= 1.0 for value in summary["accuracy"][part].values() if value is not None)
    for key in ("uplink_bytes_per_device_round", "fedavg_bytes_per_device_round", "device_peak_rss_bytes", "seconds"):
        assert summary[key] > 0


def test_the_bundle_as_shipped_is_the_devices_own_figure(finished: Finished, summary: dict[str, Any]) -> None:
    told = []
    for name in (device["id"] for device in summary["devices"]):
        lines = (finished[0] / "devices" / name / "state" / "history.jsonl").read_text().splitlines()
        told.append(json.loads(lines[-1])["right"])
        assert f"bundle as shipped {told[-1]['shipped']:.1%}" in (finished[0] / "logs" / f"{name}.log").read_text()
    everything = summary["accuracy"]["all_classes"]
    assert everything["bundle_as_shipped"] == pytest.approx(sum(each["shipped"] for each in told) / len(told))
    assert everything["local_only"] == pytest.approx(sum(each["alone"] for each in told) / len(told))


def test_everything_sent_was_committed_once(summary: dict[str, Any]) -> None:
    assert summary["contributions"] == {"sent": 5, "committed": 5, "duplicates_refused": 0}


def test_ffc_over_mqtt_is_the_pooled_solution(summary: dict[str, Any]) -> None:
    assert summary["closing_vs_pooled_ridge"]["relative_error"] <= 1e-6
    assert summary["closing_vs_pooled_ridge"]["identical_predictions"] is True
    for part in ("new_classes", "all_classes"):
        assert summary["accuracy"][part]["closing"] == summary["accuracy"][part]["pooled_ridge"]


def test_no_device_has_all_classes(summary: dict[str, Any]) -> None:
    assert all(min(device["samples_per_class"]) == 0 for device in summary["devices"])


def test_the_images_shown_are_not_picked_and_the_answers_are_the_devices(
    finished: Finished, summary: dict[str, Any]
) -> None:
    """The first test image of each class; then as `protofleet predict` answers from the device's own directory."""
    images, state = read_images(), finished[0] / "devices" / "device-1" / "state"
    first = [int((images.test.y == number).argmax()) for number in range(10)]
    assert [each["label"] for each in summary["shown"]] == list(images.labels)
    assert [each["new"] for each in summary["shown"]] == images.new.tolist()
    (finished[0] / "photos").mkdir()
    for row, each in zip(first, summary["shown"], strict=True):
        picture = base64.b64decode(each["image"].removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture))), images.test.x[row, :, :, 0])
        (finished[0] / "photos" / f"{row:03}.png").write_bytes(picture)
    done = run("predict", finished[0] / "photos", "--state", state, "--json", "-")
    assert done.returncode == 0, done.stderr
    said = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["photo"])
    order = sorted(range(10), key=lambda number: first[number])
    assert [line["label"] for line in said] == [summary["shown"][number]["fleet"] for number in order]
    held = {label for label, n in zip(images.labels, summary["devices"][0]["samples_per_class"], strict=True) if n}
    assert {each["local_only"] for each in summary["shown"]} <= held


def test_it_used_a_process_for_each_part_and_left_none(finished: Finished) -> None:
    out, _, processes = finished
    assert len(processes) >= 7  # broker, aggregator, five devices
    assert _gone(processes)
    devices = {f"device-{number}" for number in range(1, 6)}
    assert {log.stem for log in (out / "logs").iterdir()} == {"broker", "aggregator", *devices}


def test_it_prints_one_table(finished: Finished) -> None:
    printed = finished[1]
    words = ("public images alone", "bundle as shipped", "a device alone", "fleet: FFC", "pooled ridge")
    for each in (*words, "5 contributions sent, 5 committed", "report.html"):
        assert each in printed
    assert "Traceback" not in printed


def test_the_report_needs_nothing_from_outside(finished: Finished) -> None:
    page = (finished[0] / "report.html").read_text(encoding="utf-8")
    check_page(page)
    assert page.count("<svg") == 6
    assert "held-out photos of" in page
    assert page.count("<img") == 10 + 5 * 3


def test_fewer_and_more_bytes_are_what_the_fleet_had(summary: dict[str, Any]) -> None:
    """The other ways are computed beside the run; of the run's own way they must say the same."""
    ways = {each["way"]: each for each in summary["other_ways"]}
    assert list(ways) == ["ncm", "fedcof groups=1", "ffc", "ffc discriminant"]
    assert ways["ffc"]["right"] == pytest.approx(summary["accuracy"]["all_classes"]["closing"])
    assert ways["ncm"]["uplink_bytes"] < 0.1 * ways["ffc"]["uplink_bytes"]


# ── colour photos ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_their_extractor_the_demo_says_how_to_see_photos(finished: Finished, tmp_path: Path) -> None:
    line = f"The same on colour photos: {install_command('photos')}"
    assert line in finished[1]
    (tmp_path / "hidden").mkdir()
    demo = _start(tmp_path / "out", "--data", "sign_digits_subset", hidden=tmp_path / "hidden")
    errors = demo.communicate(timeout=60)[1]
    assert (demo.returncode, errors.count("\n")) == (2, 1), errors
    assert install_command("photos") in errors
    assert not (tmp_path / "out").exists()


def test_on_photos_a_fleet_names_signs_that_no_device_has_seen(on_photos: Finished) -> None:
    found = _summary(on_photos[0])
    assert (found["dataset"], found["method"], found["clients"], found["photos"]) == (
        "sign_digits_subset",
        "ffc",
        3,
        True,
    )
    everything, new = found["accuracy"]["all_classes"], found["accuracy"]["new_classes"]
    assert everything["public_alone"] is None  # there are no public images
    assert new["local_only"] == 0.0
    assert everything["local_only"] < 0.42
    assert min(everything["closing"], new["closing"]) > 0.7  # 80 to 86 % with other draws
    assert found["closing_vs_pooled_ridge"]["relative_error"] <= 1e-6
    assert found["closing_vs_pooled_ridge"]["identical_predictions"] is True
    assert new["closing"] == new["pooled_ridge"]
    told = [
        json.loads((on_photos[0] / f"devices/device-{n}/state/history.jsonl").read_text())["right"] for n in (1, 2, 3)
    ]
    assert everything["local_only"] == pytest.approx(sum(each["alone"] for each in told) / 3)
    assert everything["bundle_as_shipped"] == pytest.approx(sum(each["shipped"] for each in told) / 3)
    ways = {each["way"]: each["right"] for each in found["other_ways"]}
    assert ways["ffc project=256"] == pytest.approx(everything["closing"])
    assert ways["ncm"] > 0.65
    assert found["uplink_share"] < 0.05
    assert "new classes   to each device those of which it has no photo" in on_photos[1]
    assert "public images" not in on_photos[1]


def test_a_device_has_photos_as_files_and_no_photo_is_in_two_places(on_photos: Finished) -> None:
    homes, shipped = on_photos[0] / "devices", read_photos()
    places = [
        homes / "device-1" / "photos",
        homes / "device-2" / "photos",
        homes / "device-3" / "photos",
        homes / "test",
    ]
    files = [path for place in places for path in place.rglob("*.JPG")]
    contents = [path.read_bytes() for path in files]
    assert len(set(contents)) == len(contents)
    assert set(contents) <= set(shipped.contents)
    for place, device in zip(places, _summary(on_photos[0])["devices"], strict=False):
        assert [len(list((place / label).glob("*"))) for label in sorted(path.name for path in place.iterdir())] == [
            count for count in device["samples_per_class"] if count
        ]
        assert len(list(place.iterdir())) == 4
    assert sum(len(list(place.rglob("*.JPG"))) for place in places[:3]) == 10 * DEALT_PER_CLASS
    assert not list(homes.glob("*/state/images"))  # of decoded pixels nothing is left


def test_photos_are_shown_as_they_are_and_answered_as_predict_does(on_photos: Finished) -> None:
    found, home = _summary(on_photos[0]), on_photos[0] / "devices"
    shown = [base64.b64decode(each["image"].removeprefix("data:image/jpeg;base64,")) for each in found["shown"]]
    by_content = {path.read_bytes(): path for path in (home / "test").rglob("*.JPG")}
    assert [by_content[content].parent.name for content in shown] == found["labels"] == list("0123456789")
    (home / "shown").mkdir()
    for number, content in enumerate(shown):
        (home / "shown" / f"{number}.jpg").write_bytes(content)
    done = run("predict", home / "shown", "--state", home / "device-1" / "state", "--json", "-")
    assert done.returncode == 0, done.stderr
    said = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["photo"])
    assert [line["label"] for line in said] == [each["fleet"] for each in found["shown"]]
    has = {label for label, n in zip(found["labels"], found["devices"][0]["samples_per_class"], strict=True) if n}
    assert [each["label"] not in has for each in found["shown"]] == [each["new"] for each in found["shown"]]
    assert {each["local_only"] for each in found["shown"]} <= has
    held = [base64.b64decode(each["image"].partition(",")[2]) for each in found["held"][0]]
    assert set(held) <= {path.read_bytes() for path in (home / "device-1" / "photos").rglob("*.JPG")}


def test_the_page_of_photos(on_photos: Finished) -> None:
    page = (on_photos[0] / "report.html").read_text(encoding="utf-8")
    check_page(page)
    assert page.count("<img") == 10 + 3 * 4
    assert page.count('class="shots photos"') == 1
    assert "Each device has seen 4 of 10 classes. One round later each answers about all 10." in page
    assert "public" not in page.partition("<main>")[2]
    assert "it can show which are in" in page  # fewer photos than columns
    assert "<dt>head</dt><dd>10 × 256</dd>" in page


@pytest.mark.slow
def test_photos_and_another_method_without_torch(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    words = ("--clients", "2", "--method", "ncm")
    out, printed, _ = _finished(tmp_path / "out", *words, hidden=tmp_path / "hidden", lacks=HIDE)
    found = _summary(out)
    assert (found["method"], found["closing_vs_pooled_ridge"]) == ("ncm", None)
    assert found["accuracy"]["all_classes"]["federated"] > 0.65
    assert found["uplink_bytes_per_device_round"] < 60_000
    assert "nearest class mean" in printed
    check_page((out / "report.html").read_text(encoding="utf-8"))


def test_the_report_escapes_what_a_data_set_calls_its_classes(summary: dict[str, Any]) -> None:
    named = "<script>alert(1)</script>"
    shown = [{**summary["shown"][0], "label": named, "fleet": '"><script>'}, *summary["shown"][1:]]
    labels = [named, *summary["labels"][1:]]
    page = render_report({**summary, "labels": labels, "dataset": "<img>", "shown": shown})
    assert page.count("<script") == 1  # the page's own, which tells what a chart's marks are
    assert named not in page
    assert '"><script>' not in page
    assert "<img>" not in page
    check_page(page)


def test_a_fleet_that_loses_is_not_headed_as_one_that_won(summary: dict[str, Any]) -> None:
    title = "Each device has seen 3 of 10 classes. One round later each answers about all 10."
    assert title in render_report(summary)
    accuracy = summary["accuracy"]
    for way, who in (("local_only", "a device"), ("public_alone", "the public images")):
        better = {**accuracy, "all_classes": {**accuracy["all_classes"], way: 0.9}}
        page = render_report({**summary, "accuracy": better})
        assert title not in page
        assert f"In this run the fleet did not beat {who} alone: " in page
        assert f"right against {percent(0.9)}." in page


# ── the other methods ───────────────────────────────────────────────────────────────────────────────────────────────


def _small_demo(small: Path, out: Path, *options: str) -> tuple[dict[str, Any], str, str]:
    """Two devices, a small network, few images: the summary, what was printed, and the page."""
    done = run("demo", "--out", out, "--clients", 2, "--data", small, "--backbone", "fedproto_mnist", *options)
    assert done.returncode == 0, done.stderr
    return _summary(out), done.stdout, (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ran(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A small demo of one round by method: once for each, however many tests look at it."""

    @cache
    def of(name: str) -> tuple[dict[str, Any], str, str, Path]:
        out = tmp_path_factory.mktemp(name)
        return *_small_demo(small, out, "--method", name, "--rounds", "1"), out

    return of


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in ("fedhp", "fedpr", "fedhkd")), "spherefed"],
)
def test_every_method_of_the_wire(name: str, ran: Ran) -> None:
    (found, printed, page, out), row = ran(name), METHODS[name]
    assert (found["dataset"], found["method"], found["rounds"]) == ("small", name, 1)
    assert found["contributions"] == {"sent": 4, "committed": 4, "duplicates_refused": 0}
    assert found["closing_vs_pooled_ridge"]["identical_predictions"] is True
    assert row.title in printed
    assert f"{row.title} round" in page

    # `federated` is the method's own inference in its own round, and not FFC's.
    history = [json.loads(line) for line in (out / "devices/device-1/state/history.jsonl").open()]
    assert [line["method"] for line in history] == [name, "ffc"]
    way = row.way
    for part in ("own_classes", "all_classes"):
        device = found["devices"][0]["accuracy"][part]
        assert device["federated"] == history[0]["accuracy"][part][way]
        assert device["closing"] == history[1]["accuracy"][part]["linear"]
    assert all(device["curve"][0]["loss"] > 0 for device in found["devices"])
    over_all = found["accuracy"]["all_classes"]
    assert all(0.15 < over_all[way] <= 1.0 for way in ("local_only", "federated", "closing"))


def test_spherefeds_rounds_cost_next_to_nothing_and_are_local_until_ffc(
    ran: Ran,
) -> None:
    found, printed, page, _ = ran("spherefed")
    assert found["uplink_bytes_per_device_round"] < 100
    for part in found["accuracy"].values():
        assert part["federated"] == pytest.approx(part["local_only"])  # the same training: nothing comes back
    assert 0.15 < found["other_answers"]["personal"]["own_classes"] <= 1.0
    assert "SphereFed, personal head" in printed
    assert "SphereFed, personal head" in page


def test_ffc_alone_only_calibrates(finished: Finished, summary: dict[str, Any]) -> None:
    assert summary["accuracy"]["all_classes"]["federated"] == summary["accuracy"]["all_classes"]["closing"]
    assert "round by round" not in (finished[0] / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_several_backbones_are_one_fleet_without_ffc(small: Path, tmp_path: Path) -> None:
    names = ["fedproto_mnist", "fedproto_mnist_18"]
    words = ("--method", "fedproto", "--rounds", "1", "--backbone")
    found, printed, page = _small_demo(small, tmp_path, *words, ",".join(names))
    assert [(each["name"], each["devices"]) for each in found["backbones"]] == [(names[0], 1), (names[1], 1)]
    assert {path.name for path in tmp_path.glob("*.bundle")} == {"fleet-1.bundle", "fleet-2.bundle"}
    ran = {json.loads((tmp_path / f"devices/device-{n}/client.json").read_text())["bundle"] for n in (1, 2)}
    assert ran == {each["bundle"] for each in found["backbones"]}
    assert found["contributions"] == {"sent": 2, "committed": 2, "duplicates_refused": 0}
    assert found["closing_vs_pooled_ridge"] is None
    assert found["closing_uplink_bytes_per_device"] is None
    assert found["accuracy"]["all_classes"]["pooled_ridge"] is None
    for part in found["accuracy"].values():
        assert part["closing"] is None
    assert 0.15 < found["accuracy"]["all_classes"]["federated"] <= 1.0
    assert "pooled ridge" not in printed + page
    assert "FFC, linear head" not in printed


# ── ending badly ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A demo in the middle of its rounds."""
    demo = _start(tmp_path, "--clients", "2", "--rounds", "500", *FASHION)
    history = tmp_path / "devices" / "device-1" / "state" / "history.jsonl"
    try:
        _wait(lambda: history.exists() or demo.poll() is not None, 90, "no round was done")
        assert demo.poll() is None, demo.communicate()[1]
        yield demo, tmp_path
    finally:
        demo.kill()
        demo.communicate()


def test_ctrl_c_leaves_no_process_and_one_line(running: tuple[subprocess.Popen[str], Path]) -> None:
    demo, _ = running
    processes = _descendants(demo)
    assert len(processes) >= 4
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors == "error: interrupted, every process it started is ended\n"
    assert _gone(processes)


def test_kill_9_of_the_demo_leaves_no_process(running: tuple[subprocess.Popen[str], Path]) -> None:
    demo, _ = running
    processes = _descendants(demo)
    demo.kill()
    _wait(lambda: _gone(processes), 10, "a process outlived the demo")


def test_a_device_that_dies_ends_the_demo_in_one_line(running: tuple[subprocess.Popen[str], Path]) -> None:
    demo, out = running
    processes = _descendants(demo)
    (device,) = [each for each in processes if "device-2" in each.cmdline()]
    device.kill()
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert errors.count("\n") == 1
    assert errors.startswith("error: device-2 ended early (SIGKILL)")
    assert str(out / "logs" / "device-2.log") in errors
    assert _gone(processes)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--clients", "0"), "error: --clients, expected 1 to 200, got 0"),
        (("--rounds", "0"), "error: --rounds, expected 1 to 10000, got 0"),
        (("--method", "fedprot"), "error: unknown method, expected a known method, got fedprot, try one of fedproto"),
        (
            ("--data", "./nowhere"),
            "error: no data at ./nowhere, expected a folder of images, a .csv, a .npz or parquet",
        ),
        (("--backbone", "small_cn"), "error: --backbone, expected a known backbone or module:callable, got small_cn"),
        (("--port", "70000"), "error: --port, expected 0 to 65535, got 70000"),
        (
            ("--method", "fedproto", "--backbone", "fedproto_mnist,small_cnn"),
            "error: --backbone, expected backbones of one feature width, got fedproto_mnist 50, small_cnn 128",
        ),
        (
            ("--method", "spherefed", "--backbone", "fedproto_mnist,fedproto_mnist_18"),
            "error: --backbone, expected one for all devices",
        ),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(options: tuple[str, ...], line: str, tmp_path: Path) -> None:
    done = run("demo", "--out", tmp_path / "out", *options)
    assert done.returncode == 2
    assert one_error_line(done).startswith(line)


def test_from_scratch_without_torch_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    for options in (["--from-scratch"], ["--method", "fedproto"], ["--clients", "2", "--backbone", "fedproto_mnist"]):
        demo = _start(tmp_path / "out", *options, hidden=tmp_path / "hidden")
        errors = demo.communicate(timeout=60)[1]
        assert (demo.returncode, errors.count("\n")) == (2, 1), errors
        assert "torch" in errors
        assert f"try {install_command('all')}" in errors
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("demo", "--out", tmp_path / "file" / "out")
    assert done.returncode == 2
    assert one_error_line(done).startswith("error: --out ")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("demo", "--out", tmp_path, "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert one_error_line(done).startswith("error: --port, expected a free port")
