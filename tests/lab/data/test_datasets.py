"""The lab's data: what ships, how it was drawn, what a user's directory must look like, and the Hub out of reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lab_samples import LABELS, shipped, small_directory
from PIL import Image

from protofleet.contract.errors import DataError
from protofleet.lab.data.datasets import SHIPPED, load_dataset
from protofleet.lab.data.make_subset import draw_balanced, draw_subset
from protofleet.lab.paper_tables.run_log import data_mark


def test_the_shipped_set_is_balanced_and_named() -> None:
    data = shipped()
    assert data.labels == LABELS
    assert data.input_shape == (28, 28, 1)
    assert data.train.x.dtype == np.uint8
    assert np.bincount(data.train.y).tolist() == [600] * 10
    assert np.bincount(data.test.y).tolist() == [100] * 10


def test_no_test_image_is_a_training_image() -> None:
    train = {image.tobytes() for image in shipped().train.x}
    assert not train & {image.tobytes() for image in shipped().test.x}


def test_the_licence_of_the_shipped_set_is_beside_it() -> None:
    text = (SHIPPED["fashion_mnist_subset"] / "README.md").read_text(encoding="utf-8")
    assert "MIT License" in text
    assert "Zalando SE" in text


def test_draw_is_balanced_without_repeats_and_reproducible() -> None:
    labels = np.array([0] * 30 + [1] * 20 + [2] * 25)
    drawn = draw_balanced(labels, 12, np.random.default_rng(5))
    assert np.bincount(labels[drawn]).tolist() == [12, 12, 12]
    assert len(set(drawn.tolist())) == 36
    assert drawn.tolist() == draw_balanced(labels, 12, np.random.default_rng(5)).tolist()
    with pytest.raises(DataError, match="class 1, expected at least 21 images, got 20"):
        draw_balanced(labels, 21, np.random.default_rng(5))


def test_drawing_again_from_the_shipped_set_gives_its_very_images(tmp_path: Path) -> None:
    """The draw takes 600 and 100 of each class, so from the subset itself it must take everything, byte for byte."""
    source = SHIPPED["fashion_mnist_subset"]
    draw_subset(source, tmp_path)
    for split in ("train", "test"):
        assert (tmp_path / f"{split}.parquet").read_bytes() == (source / f"{split}.parquet").read_bytes()


def test_a_directory_loads_like_the_shipped_set(tmp_path: Path) -> None:
    data = load_dataset(str(small_directory(tmp_path / "mine")))
    assert (data.name, data.labels, len(data.train), len(data.test)) == ("mine", LABELS, 600, 100)


def test_a_set_without_test_split_holds_out_a_tenth_of_each_class_however_it_is_sorted(tmp_path: Path) -> None:
    """Every tenth row in order, where 9 of 10 rows of each ten are of other classes, would hold out one class alone."""
    small_directory(tmp_path)
    table = pq.read_table(tmp_path / "train.parquet")
    labels = table["label"].to_numpy()
    in_turn = np.argsort(np.argsort(labels, kind="stable") % 60, kind="stable")  # class 0, 1, …, 9, 0, 1, …
    for order in (np.argsort(labels, kind="stable"), in_turn):
        pq.write_table(table.take(order), tmp_path / "train.parquet")
        (tmp_path / "test.parquet").unlink(missing_ok=True)
        data = load_dataset(str(tmp_path))
        assert np.bincount(data.train.y).tolist() == [54] * 10
        assert np.bincount(data.test.y).tolist() == [6] * 10


def _write(path: Path, blobs: list[bytes], labels: list[int]) -> None:
    images = [{"bytes": blob, "path": None} for blob in blobs]
    pq.write_table(pa.table({"image": images, "label": labels}), path)


def _png(path: Path, size: tuple[int, int]) -> bytes:
    Image.new("L", size).save(path)
    return path.read_bytes()


def test_bad_directories_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty, expected one subfolder of images for each class"):
        load_dataset(str(tmp_path))
    train = tmp_path / "train.parquet"
    train.write_bytes(b"not parquet")
    with pytest.raises(DataError, match="is not a whole parquet file"):
        load_dataset(str(tmp_path))
    _write(train, [b"not an image"] * 10, [0] * 10)
    with pytest.raises(DataError, match=r"no image of 9 can be read, .* got train.parquet row 0 \(no image of a known"):
        load_dataset(str(tmp_path))
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), train)
    with pytest.raises(DataError, match="expected a column of image structs"):
        load_dataset(str(tmp_path))
    train.rename(tmp_path / "test.parquet")
    _write(tmp_path / "test.parquet", [_png(tmp_path / "a.png", (4, 4))], [0])
    with pytest.raises(DataError, match=r"has no train split, .* got test"):
        load_dataset(str(tmp_path))


def _photos(root: Path, sizes: list[tuple[int, int]], per_class: int = 10) -> Path:
    """Colours tell the classes apart: the sky and grass of a set of photos, of these sizes in turn."""
    for name, colour in (("sky", (20, 60, 220)), ("grass", (30, 200, 40))):
        (root / name).mkdir(parents=True)
        for row in range(per_class):
            Image.new("RGB", sizes[row % len(sizes)], colour).save(root / name / f"{row}.jpg")
    return root


def test_photos_of_mixed_sizes_are_resized_and_it_is_said(tmp_path: Path, said: list[str]) -> None:
    data = load_dataset(str(_photos(tmp_path / "mine", [(80, 60), (300, 200), (50, 90)])))
    assert (data.name, data.labels, data.input_shape) == ("mine", ("grass", "sky"), (64, 64, 3))
    assert [len(data.train), len(data.test)] == [18, 2]
    assert sorted(data.test.y.tolist()) == [0, 1]
    assert (data.train.x.mean(axis=(1, 2)).argmax(axis=1) == np.where(data.train.y == 0, 1, 2)).all()
    (line,) = said
    assert "images of 3 sizes are resized to 64 x 64 (--input for another size)" in line


@pytest.mark.parametrize(
    ("size", "asked", "shape"),
    [((40, 30), None, (30, 40, 3)), ((640, 480), None, (64, 64, 3)), ((640, 480), (48, 60, 1), (48, 60, 1))],
)
def test_the_shape_is_the_images_own_where_it_is_small_or_what_is_asked_for(size, asked, shape, tmp_path: Path) -> None:
    assert load_dataset(str(_photos(tmp_path / "mine", [size])), asked).input_shape == shape


def test_whatever_a_device_reads_the_lab_reads(tmp_path: Path, said: list[str]) -> None:
    """Folders with splits, a CSV with broken lines, an archive: by the device's readers."""
    root = _photos(tmp_path / "train", [(20, 20)])
    (root / "sky" / "torn.jpg").write_bytes(b"torn")
    _photos(tmp_path / "val", [(20, 20)], per_class=2)
    folder = load_dataset(str(tmp_path))
    assert (folder.labels, len(folder.train), len(folder.test)) == (("grass", "sky"), 20, 4)
    assert "skipped 1 of 21 images" in said[0]
    lines = [f"train/{name}/{row}.jpg,{name}" for name in ("sky", "grass") for row in range(10)]
    (tmp_path / "d.csv").write_text("path,label\n" + "\n".join(lines) + "\ntrain/sky/1.jpg,\n")
    assert len(load_dataset(str(tmp_path / "d.csv")).train) == 18
    np.savez(tmp_path / "d.npz", x=folder.train.x, y=folder.train.y)
    data = load_dataset(str(tmp_path / "d.npz"))
    assert (data.labels, len(data.train), data.input_shape) == (("0", "1"), 18, (20, 20, 3))


def test_a_loaded_set_of_the_hub_is_listed_with_its_splits(tmp_path: Path) -> None:
    """What `datasets.load_dataset` returns, made here: the Hub itself cannot be reached from a test."""
    import datasets

    from protofleet.edge_client.data.load import read_images
    from protofleet.lab.data.hub import list_splits

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})

    def split(count: int) -> datasets.Dataset:
        images = [Image.new("L", (4, 4), 10 * row) for row in range(count)]
        return datasets.Dataset.from_dict({"img": images, "label": [row % 2 for row in range(count)]}, features)

    found = {"train": split(6), "validation": split(2), "test": split(4), "unsupervised": split(1)}
    listing = list_splits(found, "owner/name", "another name")
    assert (listing.names, len(listing), np.bincount(listing.splits).tolist()) == (("a", "b"), 12, [0, 6, 2, 4])
    x, kept = read_images(listing, np.array([5, 8, 9]), (4, 4, 1))
    assert x[:, 0, 0, 0].tolist() == [50, 0, 10]
    assert [listing.name(row) for row in kept] == ["train row 5", "test row 0", "test row 1"]
    with pytest.raises(DataError, match="expected a train split, got test"):
        list_splits({"test": split(2)}, "owner/name", "another name")


def test_a_federation_on_photos_of_mixed_sizes(tmp_path: Path) -> None:
    """The lab refused them once; small networks tell two colours apart from a few of them."""
    root = _photos(tmp_path / "mine", [(80, 60), (33, 21)], per_class=30)
    options = ["--input", "28x28x1", "--backbone", "fedproto_mnist", "--clients", "2", "--rounds", "1", "--batch", "4"]
    command = [
        sys.executable,
        "-m",
        "protofleet",
        "lab",
        "run",
        "--jobs",
        "1",
        "--data",
        str(root),
        "--partition",
        "iid",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "ffc" in done.stdout


def test_a_tables_runs_belong_to_their_data(tmp_path: Path) -> None:
    root = _photos(tmp_path / "mine", [(8, 8)], per_class=15)
    mark = data_mark(str(root))
    (tmp_path / "other").mkdir()
    assert mark == data_mark(str(root.rename(tmp_path / "other" / "mine")))
    (tmp_path / "other" / "mine" / "sky" / "0.jpg").unlink()
    assert mark != data_mark(str(tmp_path / "other" / "mine"))
    assert data_mark("cifar10") == "cifar10"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_directory_that_is_not_there(name: str) -> None:
    with pytest.raises(DataError, match=r"no data at .*, expected a folder of images"):
        load_dataset(name)


def test_the_hub_out_of_reach_is_one_line_and_soon() -> None:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "protofleet", "demo", "--data", "fashion_mnst"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: data set 'fashion_mnst' does not ship, and the Hub cannot be asked")
    assert "fashion_mnist_subset" in done.stderr
