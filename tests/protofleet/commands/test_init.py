"""`protofleet init`: from a folder of photos to a fleet that runs; what no fleet can be made of is one line."""

from __future__ import annotations

import os
import resource
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import one_error_line, run, run_process
from PIL import Image

from protofleet.advice.advice import Measured
from protofleet.commands.init import PLAIN_WAYS, _is_first_choice, doubtful, in_plain_words, init_command
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.bundle.uplink_bytes import rungs
from protofleet.first_fleet.first_run import Asked
from protofleet.first_fleet.look import Photo
from protofleet.lab.demo.processes import Fleet, free_port, wait_for_port

COLOURS = {"red box": (210, 40, 30), "синий": (30, 60, 220), "绿": (40, 190, 60)}


def photos(root: Path, labels: dict[str, int], px: int = 48) -> Path:
    """Squares of a class's colour on noise, a few of each class."""
    rng = np.random.default_rng(0)
    for number, (label, count) in enumerate(labels.items()):
        (root / label).mkdir(parents=True)
        for n in range(count):
            pixels = rng.integers(90, 160, (px, px, 3), dtype=np.uint8)
            if px > 8:
                top, left = rng.integers(2, px // 3, 2)
                pixels[top : top + px // 2, left : left + px // 2] = list(COLOURS.values())[number % 3]
            Image.fromarray(pixels).save(root / label / f"{n} of {count}.png")
    return root


def test_photos_become_a_fleet_whose_device_answers_about_one_that_was_not_shown(tmp_path: Path) -> None:
    root, out = photos(tmp_path / "my photos", dict.fromkeys(COLOURS, 6)), tmp_path / "fleet"
    (root / "red box" / "half.png").write_bytes((root / "red box" / "0 of 6.png").read_bytes()[:300])
    (root / "red box" / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    listen = f"127.0.0.1:{free_port()}"
    without = "import sys; sys.modules['torch'] = sys.modules['onnx'] = None"
    done = run_process("init", root, "--out", out, "--listen", listen, "--run", code=without, HOME=str(tmp_path / "no"))
    assert done.returncode == 0, done.stderr
    assert "18 photos of 3 classes" in done.stderr
    assert "2 files cannot be read and will be left out (red box/half.png: " in done.stderr
    assert "; red box/phone.heic: HEIC is not supported, save it as JPEG)." in done.stderr
    assert "3 of 3 photos that were not shown are named right." in done.stderr
    assert not (tmp_path / "no").exists()
    bundle = read_bundle(out / "fleet.bundle")
    assert set(bundle.manifest.labels) == set(COLOURS)
    assert bundle.manifest.extractor == read_bundle(photos_bundle()).manifest.extractor
    settings = {
        name: tomllib.loads((out / f"{name}.toml").read_text()) for name in ("broker", "aggregator", "device-1")
    }
    assert settings["broker"]["listen"] == listen
    assert settings["device-1"]["data"] == str(root)
    for command, name in (("broker", "broker"), ("aggregate", "aggregator"), ("client", "device-1")):
        assert f"protofleet {command} --config {out / name}.toml" in done.stderr
        assert run(command, "--config", out / f"{name}.toml", "--print-config").returncode == 0
    said = [line for line in done.stderr.splitlines() if "--id device-2" in line]
    password = (out / "passwords").read_text().strip().split(":")[1]
    assert done.stderr.count(password) == 1
    assert "a new folder" in one_error_line(run("init", root, "--out", out))
    _a_second_device_joins_by_its_line(tmp_path, out, root, listen, said[0].strip(), password)


def _a_second_device_joins_by_its_line(
    tmp_path: Path, out: Path, root: Path, listen: str, line: str, password: str
) -> None:
    """As who pastes it beside a folder `photos`: without the password nobody is let in, with it the device counts."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "photos").symlink_to(root)
    fetched, started = line.split(" && ")
    assert fetched.startswith("scp ")
    assert fetched.endswith(f":{out}/fleet.bundle .")
    (there / "fleet.bundle").write_bytes((out / "fleet.bundle").read_bytes())
    variable, *command = shlex.split(started)
    name, url = variable.split("=", 1)
    assert url.endswith(f":{listen.split(':')[1]}")
    assert command[0] == "protofleet"
    with Fleet(tmp_path / "logs") as fleet:
        for part, name_of in (("broker", "broker"), ("aggregate", "aggregator")):
            fleet.start(part, [part, "--config", str(out / f"{name_of}.toml")])
        wait_for_port(fleet, "broker", int(listen.split(":")[1]))
        for sign_in, heard in (("", "wrong user or password"), (f"photos:{password}@", "round 1 (ncm): committed")):
            arguments = [sys.executable, "-m", "protofleet", *command[1:]]
            variables = {**os.environ, name: f"mqtt://{sign_in}{listen}"}
            device = subprocess.Popen(
                arguments, cwd=there, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            try:
                assert device.stderr is not None
                assert any(heard in told for told in device.stderr)
            finally:
                device.terminate()
                device.communicate()
        assert sign_in in url
        logs = [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert not any(password in text for text in logs)


def test_without_photos_each_class_has_a_folder(tmp_path: Path) -> None:
    done = run("init", "--no-photos", "--classes", "cat,dog", "--out", tmp_path / "fleet")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in sorted((tmp_path / "fleet" / "photos").iterdir())] == ["cat", "dog"]
    assert read_bundle(tmp_path / "fleet" / "fleet.bundle").manifest.labels == ("cat", "dog")
    made = tmp_path / "fleet" / "fleet.bundle"
    other = run("init", "--no-photos", "--classes", "a,b", "--out", tmp_path / "other", "--backbone", made)
    assert other.returncode == 0, other.stderr


def test_a_class_of_one_photo_and_an_empty_one_are_said(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", {"red box": 5, "синий": 1})
    (root / "nobody").mkdir()
    done = run("init", root, "--out", tmp_path / "fleet")
    assert done.returncode == 0, done.stderr
    assert "Fewer than 4 photos: синий." in done.stderr
    assert "Without a photo, and so no class: nobody." in done.stderr
    assert f"--known {root} PHOTO.jpg" in done.stderr


def test_a_first_run_says_which_classes_it_does_not_ask_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked_about_red(files: object, photos: Sequence[Photo], on_start: object) -> list[Asked]:
        return [Asked(next(photo for photo in photos if photo.label == "red box"), "red box")]

    monkeypatch.setattr("protofleet.commands.init.first_run", asked_about_red)
    root = photos(tmp_path / "photos", {"red box": 5, "синий": 1, "绿": 4, "one burst": 6})
    listen = f"127.0.0.1:{free_port()}"
    assert init_command(root, out=tmp_path / "fleet", listen=listen, run=True) == 0
    said = capsys.readouterr().err
    assert "Not asked about: one burst, синий, 绿. A class needs 5 photos, near copies not counted, for that." in said


def test_each_way_is_named_in_plain_words() -> None:
    ways = [rung for rung in rungs(read_bundle(photos_bundle()).manifest) if _is_first_choice(rung)]
    assert {rung.name for rung in ways} == PLAIN_WAYS.keys()
    said = in_plain_words(Measured(ways[0].name, ways[0], np.zeros(1)))
    assert said == f"{PLAIN_WAYS[ways[0].name]} ({ways[0].name})"
    own = Measured("another", ways[0], np.zeros(1))
    assert in_plain_words(own) == f"{ways[0].method.summary} (another)"


def videos(root: Path) -> Path:
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "purring.MP4").write_bytes(b"0" * 100)
    return root


def flat(root: Path) -> Path:
    root.mkdir()
    (root / "1.jpg").write_bytes(b"0")
    return root


def broken(root: Path) -> Path:
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
        (root / label / "1.jpg").write_bytes(b"no photo")
    return root


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda root: root, "nothing there"),
        (flat, "one subfolder of images for each class"),
        (videos, "1 video (.MP4)"),
        (broken, "2 broken ones"),
        (lambda root: photos(root, {"cat": 3}), "one only: cat"),
        (lambda root: photos(root, {"cat": 3, "dog": 3}, px=1), "a picture of one pixel"),
        (lambda root: photos(root, {"cat": 3, "dog": 3}, px=6), "photos of 16 px or more, got most of 6 px"),
        (lambda root: photos(root, {f"photo {n}": 1 for n in range(1000)}, px=20), "1,000 folders with 1,000 photos"),
        (lambda root: photos(root, {"café": 1, "cafe\u0301": 1}), "folders in"),
    ],
)
def test_what_no_fleet_can_be_made_of_is_one_line(made, expected: str, tmp_path: Path) -> None:
    line = one_error_line(run("init", made(tmp_path / "photos"), "--out", tmp_path / "fleet"))
    assert expected in line
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "a folder of photos"),
        (("--no-photos", "--classes", "cat"), "two names or more"),
        (("--classes", "a,b", "photos"), "--no-photos"),
        (("--no-photos", "--classes", "a,b", "--run"), "--run, expected photos"),
        (("--no-photos", "--classes", "a,b", "--listen", "here:x"), "--listen"),
        (("--no-photos", "--classes", "a,b", "--backbone", "none.bundle"), "none.bundle"),
    ],
)
def test_options_that_do_not_fit_are_one_line(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    assert expected in one_error_line(run("init", *words, "--out", tmp_path / "fleet"))


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    full = f"import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit({resource.RLIMIT_FSIZE}, (1000, 1000))"  # noqa: E501
    done = run_process("init", "--no-photos", "--classes", "a,b", "--out", tmp_path / "fleet", code=full)
    assert "cannot write" in one_error_line(done)
    assert not os.path.exists(tmp_path / "fleet" / "fleet.bundle")


def test_a_port_that_is_taken_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", dict.fromkeys(COLOURS, 2))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("init", root, "--out", str(tmp_path / "fleet"), "--listen", listen, "--run")
    assert done.returncode == 2
    assert f"--listen {listen}, expected an address that is free, got Address already in use" in one_error_line(done)
    assert not (tmp_path / "fleet").exists()


def test_an_address_of_ipv6_is_in_brackets_in_urls(tmp_path: Path) -> None:
    done = run("init", "--no-photos", "--classes", "cat,dog", "--out", str(tmp_path / "f"), "--listen", "[::1]:1884")
    assert done.returncode == 0, done.stderr
    broker = tomllib.loads((tmp_path / "f" / "device-1.toml").read_text())["broker"]
    assert broker.endswith("@[::1]:1884")
    for command in ("aggregate", "client"):
        file = {"aggregate": "aggregator", "client": "device-1"}[command]
        settings = run(command, "--config", str(tmp_path / "f" / f"{file}.toml"), "--print-config")
        assert settings.returncode == 0, settings.stderr


def test_all_right_of_few_is_not_said_to_be_certain() -> None:
    assert doubtful(Measured("ncm", None, np.ones(12))) == pytest.approx(1 / 12)
    assert doubtful(Measured("ncm", None, np.r_[np.ones(50), np.zeros(50)])) == pytest.approx(0.05)
