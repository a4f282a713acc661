"""`protofleet suggest` on real photos: with a bundle alone, with named photos, with a device's state; and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import shared
from fleets import LABELS, error_line, fleet_in, run, share
from fleets import bundle as made_bundle
from PIL import Image

from protofleet.contract.bundle.bundle_file import read_bundle


def _written(folder: Path, x: np.ndarray, y: np.ndarray, *, named: bool = False) -> Path:
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / LABELS[label] if named else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(place / f"{row:03d}-{label}.png")
    return folder


def _device(folder: Path) -> None:
    folder.mkdir()
    with fleet_in(folder) as fleet:
        path = made_bundle(folder / "f.bundle", "ncm")
        fleet.aggregator([path], "--rounds", 1, "--min-clients", 1)
        fleet.client("d0", path, share(0, (0, 1, 2), 60), "--hold-out", 0.3)
        assert set(fleet.finish().values()) == {0}, fleet.log("aggregator")


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared.once("suggest-device", _device), tmp_path / "device"))


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_with_a_bundle_alone_kinds_are_told_apart_and_copies_asked_about_once(tmp_path: Path) -> None:
    path = made_bundle(tmp_path / "f.bundle", "ncm")
    x, y = share(0, range(5), 30)
    _written(tmp_path / "new", np.concatenate([x, np.repeat(x[:1], 40, axis=0)]), np.concatenate([y, y[:1].repeat(40)]))
    (tmp_path / "new" / "broken.png").write_bytes(b"no picture")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    out = tmp_path / "found.jsonl"
    code, said = run("suggest", tmp_path / "new", "--bundle", path, "--count", 8, "--random", 0.25, "--json", out)
    assert code == 0, said
    found = _lines(out)
    assert [one["why"] for one in found] == ["new"] * 6 + ["random"] * 2
    copies = [one for one in found if one["why"] == "new" and int(Path(one["photo"]).name[:3]) in (0, *range(30, 70))]
    assert len(copies) == 1
    assert copies[0]["alike"] >= 41
    assert "broken.png: cannot be read" in said
    assert "70 photos without a name, 0 with one; by how they differ, there is no answer yet" in said
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file != out}
    assert after == before  # nothing is written
    assert "a kind of its own, " in said
    assert "a name, " not in said.replace("without a name, 0 with", "")  # none is known that has one
    assert "--labelled PHOTOS says which photos have a name" in said
    code, again = run("suggest", tmp_path / "new", "--bundle", path, "--count", 8, "--random", 0.25)
    assert again == said


def test_named_photos_are_not_asked_about_again(tmp_path: Path) -> None:
    path = made_bundle(tmp_path / "f.bundle", "ncm")
    x, y = share(0, (0, 1), 30)
    others, other_labels = share(1, (4,), 6)
    _written(tmp_path / "new", np.concatenate([x, others]), np.concatenate([y, other_labels]))
    _written(tmp_path / "named", *share(2, (0, 1), 20), named=True)
    out = tmp_path / "found.jsonl"
    words = ("--bundle", path, "--labelled", tmp_path / "named", "--random", 0, "--count", 3, "--json", out)
    code, said = run("suggest", tmp_path / "new", *words)
    assert code == 0, said
    assert "36 photos without a name, 20 with one" in said
    assert "unlike every photo with a name, " in said
    assert "--labelled PHOTOS" not in said
    assert any(one["photo"].endswith("-4.png") for one in _lines(out))


def test_with_a_state_answers_count_and_what_was_learned_is_left_out(device: Path, tmp_path: Path) -> None:
    x, y = share(3, (0, 1, 2, 3), 24)
    new, state, out = _written(tmp_path / "new", x, y), device / "state-d0", tmp_path / "found.jsonl"
    code, said = run("suggest", new, "--state", state, "--count", 5, "--random", 0, "--json", out)
    assert code == 0, said
    first = _lines(out)
    assert 0 < max(one["uncertainty"] for one in first) <= 1
    assert len({round(one["uncertainty"], 6) for one in first}) > 1
    taught = Path(first[0]["photo"])
    assert run("learn", taught, LABELS[int(taught.stem[-1])], "--state", state)[0] == 0
    code, said = run("suggest", new, "--state", state, "--count", 24, "--random", 0, "--json", out)
    assert code == 0, said
    assert "23 photos without a name, 1 with one" in said
    assert str(taught) not in [one["photo"] for one in _lines(out)]


def test_bad_input_gets_one_line(tmp_path: Path) -> None:
    path = made_bundle(tmp_path / "f.bundle", "ncm")
    assert read_bundle(path).manifest.method == "ncm"
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("a.png", "b.jpg", "notes.txt"):  # the last is no photo by its name
        (broken / name).write_bytes(b"no picture")
    for words, expected in (
        ((empty, "--bundle", path), "photos without a name, got 0 that cannot be read"),
        ((broken, "--bundle", path), "photos without a name, got 2 that cannot be read"),
        ((tmp_path / "nowhere", "--bundle", path), "no photo at"),
        ((empty,), "expected --state or --bundle"),
        ((empty, "--state", tmp_path / "nowhere"), "a device's state directory"),
        ((empty, "--bundle", tmp_path / "nowhere"), "nowhere"),
    ):
        code, said = run("suggest", *words)
        assert code != 0
        assert expected in error_line(said)


def test_copies_alone_are_said_to_be_like_what_was_suggested(tmp_path: Path) -> None:
    x, y = share(0, (0,), 1)
    path, new = made_bundle(tmp_path / "f.bundle", "ncm"), _written(tmp_path / "new", x.repeat(5, 0), y.repeat(5))
    code, said = run("suggest", new, "--bundle", path, "--count", 3, "--random", 0)
    assert code == 0, said
    assert said.count("a kind of its own, 4 others like it") == 1
    assert said.count("like photos suggested already, and the answer is 100% unsure, 4 others like it") == 2
