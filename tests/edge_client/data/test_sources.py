"""edge_client/data: folders, CSVs, parquet as downloaded, archives with splits; what is taken, and what is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edge_samples import announcement
from PIL import Image

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import DataError
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data, load_held_out
from protofleet.edge_client.data.splits import held_out
from protofleet.edge_client.device.device import Device
from tests.edge_client.data.test_load import manifest, png, samples, sorted_rows, write_folder, write_parquet

X, Y = samples(12)
LABELS = manifest().labels


def rows(data: LocalData) -> list[tuple[int, bytes]]:
    return sorted_rows(data.x, data.y)


def _folders(root: Path) -> Path:
    for split, part in (("train", slice(0, 6)), ("val", slice(6, 9)), ("test", slice(9, 12))):
        write_folder(root / split, X[part], Y[part], LABELS)
    return root


def _csv(root: Path) -> Path:
    write_folder(root / "files", X, Y, LABELS)
    words = ["train"] * 4 + ["", " "] + ["Validation"] * 3 + ["test"] * 3
    lines = [f"{LABELS[y]},files/{LABELS[y]}/{row % 12:04}.png,{words[row]},x" for row, y in enumerate(Y)]
    # write_folder numbers files by row, so the names above are those of the whole set
    (root / "mine.CSV").write_text("\ufefflabel,path,split,more\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return root / "mine.CSV"


def _hub(root: Path) -> Path:
    """As `huggingface-cli download` leaves it: a hidden folder, a card, and parquet in `data/`."""
    for folder in ("data", ".cache"):
        (root / folder).mkdir(parents=True)
    (root / "README.md").write_text("a card")
    write_parquet(root / ".cache" / "train-00000.parquet", X, Y, LABELS)
    write_parquet(root / "data" / "train-00000-of-00002.parquet", X[:3], Y[:3], LABELS)
    write_parquet(root / "data" / "train-00001-of-00002.parquet", X[3:6], Y[3:6], LABELS)
    write_parquet(root / "data" / "validation-00000-of-00001.parquet", X[6:9], Y[6:9], LABELS)
    write_parquet(root / "data" / "test-00000-of-00001.parquet", X[9:], Y[9:], LABELS)
    return root


def _converted(root: Path) -> Path:
    """As the Hub converts data sets itself: a folder for each split."""
    for split, part in (("train", slice(0, 6)), ("validation", slice(6, 9)), ("test", slice(9, 12))):
        (root / "default" / split).mkdir(parents=True)
        write_parquet(root / "default" / split / "0000.parquet", X[part], Y[part], LABELS)
    return root


def _npz(root: Path) -> Path:
    parts = {"train": slice(0, 6), "val": slice(6, 9), "test": slice(9, 12)}
    root.mkdir()
    np.savez(root / "d.npz", **{f"{a}_{n}": v[p] for n, p in parts.items() for a, v in (("x", X), ("y", Y))})
    return root / "d.npz"


SPLIT_SOURCES = [_folders, _csv, _hub, _converted, _npz]


@pytest.mark.parametrize("make", SPLIT_SOURCES)
def test_declared_splits_are_honoured_in_every_source(make, tmp_path: Path) -> None:
    path = make(tmp_path / "data")
    assert rows(load_data(path, manifest())) == sorted_rows(X[:6], Y[:6])
    assert rows(load_data(path, manifest(), purpose="test")) == sorted_rows(X[9:], Y[9:])
    train, held = load_held_out(path, manifest())
    assert (rows(train), rows(held)) == (sorted_rows(X[:6], Y[:6]), sorted_rows(X[9:], Y[9:]))


def test_valid_is_the_test_where_there_is_no_test(tmp_path: Path) -> None:
    root = _folders(tmp_path / "data")
    (root / "test").rename(tmp_path / "elsewhere")
    assert rows(load_data(root, manifest(), purpose="test")) == sorted_rows(X[6:9], Y[6:9])
    (root / "val").rename(tmp_path / "elsewhere too")
    with pytest.raises(DataError, match="has no test split, expected samples of a split test, got train"):
        load_data(root, manifest(), purpose="test")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    """A device that has photos of trains only is not one that declares a split."""
    vehicles = manifest(("car", "train"))
    write_folder(tmp_path / "one", X[:3], np.ones(3, int), vehicles.labels)
    assert load_data(tmp_path / "one", vehicles).y.tolist() == [1, 1, 1]
    write_folder(tmp_path / "two", X[:3], np.array([0, 1, 1]), vehicles.labels)
    assert load_data(tmp_path / "two", vehicles).y.tolist() == [0, 1, 1]


@pytest.mark.parametrize("make", [lambda root: write_folder(root, X, Y, LABELS), _csv])
def test_names_of_classes_are_mapped_to_the_bundles_numbers(make, tmp_path: Path) -> None:
    path = make(tmp_path / "data")
    other = manifest(("cat", "zebra", "bee", "ant"))
    data = load_data(path, other)
    theirs = load_data(path, manifest())
    assert [other.labels[y] for y in data.y] == [LABELS[y] for y in theirs.y]
    with pytest.raises(DataError, match=r"ant/0000\.png: unknown class, expected a class of the bundle's 2, got 'ant'"):
        load_data(path, manifest(("bee", "cat")))


def test_a_folder_of_devices_is_not_a_folder_of_classes_and_the_error_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos" / "kitchen", X, Y, LABELS)
    with pytest.raises(DataError, match=r"got 'kitchen', try --data with the folder kitchen, in which ant lies"):
        load_data(tmp_path / "photos", manifest())


@pytest.mark.parametrize("trains", [True, False])
def test_one_class_and_an_empty_class_are_welcome(trains: bool, tmp_path: Path) -> None:
    write_folder(tmp_path / "one", X[:4], np.full(4, 2), LABELS)
    (tmp_path / "one" / "ant").mkdir()
    assert load_data(tmp_path / "one", manifest(trains=trains)).y.tolist() == [2] * 4
    np.savez(tmp_path / "d.npz", x=X, y=Y * 0)
    assert load_data(tmp_path / "d.npz", manifest(trains=trains)).y.tolist() == [0] * 12


@pytest.mark.parametrize("method", ["fedproto", "fedhp", "fedpr", "fedhkd", "spherefed", "ffc"])
def test_a_device_with_one_class_takes_part(method: str, mnist_like_bundle) -> None:
    bundle = read_bundle(mnist_like_bundle(method))
    x = np.random.default_rng(0).integers(0, 256, (20, *bundle.manifest.input_shape), np.uint8)
    device = Device(bundle, LocalData(x, np.full(20, 3)), "pi-1")
    result = device.run_round(announcement(bundle), None)
    assert result.loss is None or np.isfinite(result.loss)
    if len(result.contribution.body.classes):
        assert result.contribution.body.classes.tolist() == [3]


def test_endings_in_capitals_and_other_files(tmp_path: Path, said: list[str]) -> None:
    """A camera writes DSC_0001.JPG; what else lies in a folder is no image, and is not spoken of."""
    root = write_folder(tmp_path / "d", X, Y, LABELS)
    for file in list(root.rglob("*.png")):
        file.rename(file.with_suffix(".PNG"))
    for other in ("Thumbs.db", "notes.txt", "clip.mp4", "annotations.json"):
        (root / "ant" / other).write_bytes(b"\x00")
    (root / "readme.txt").write_text("x")
    (root / "ant" / "deeper" / "still").mkdir(parents=True)
    (root / "ant" / "0000.PNG").rename(root / "ant" / "deeper" / "still" / "0000.PNG")
    assert rows(load_data(root, manifest())) == sorted_rows(X, Y)
    assert said == []


def test_links_within_the_folder_are_followed_and_those_out_of_it_are_not(tmp_path: Path, said: list[str]) -> None:
    root = write_folder(tmp_path / "d", X[:6], Y[:6], LABELS)
    secret = write_folder(tmp_path / "d-private", X[6:], Y[6:], LABELS)
    (root / "ant" / "again.png").symlink_to(root / "ant" / "0000.png")
    (root / "ant" / "dangling.png").symlink_to(root / "ant" / "nothing.png")
    (root / "bee" / "out.png").symlink_to(secret / "bee" / "0001.png")
    (root / "bee" / "folder").symlink_to(secret / "bee")
    (root / "bee" / "loop").symlink_to(root / "bee")
    (root / "cat" / "up.png").symlink_to(Path("..") / ".." / "d-private" / "cat" / "0002.png")
    data = load_data(root, manifest())
    again = [(0, X[0].tobytes())]
    assert rows(data) == sorted(sorted_rows(X[:6], Y[:6]) + again)
    (line,) = said
    assert "3 symbolic links that lead out of it are not followed (bee/folder, bee/out.png, cat/up.png)" in line


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    write_folder(tmp_path / "d", X, Y, LABELS)
    (tmp_path / "link").symlink_to(tmp_path / "d")
    assert rows(load_data(tmp_path / "link", manifest())) == sorted_rows(X, Y)


def test_a_csv_names_any_file_and_what_is_missing_is_told(tmp_path: Path, said: list[str]) -> None:
    write_folder(tmp_path / "elsewhere", X[:2], Y[:2], LABELS)
    (tmp_path / "d").mkdir()
    mine = tmp_path / "d" / "mine.csv"
    outside = tmp_path / "elsewhere" / "ant" / "0000.png"
    mine.write_text(f'path,label\n"{outside}",ant\n../elsewhere/bee/0001.png,bee\nlost.jpg,cat\n')
    assert rows(load_data(mine, manifest())) == sorted_rows(X[:2], Y[:2])
    assert said == [f"skipped 1 of 3 images of {mine}, which cannot be read: lost.jpg (No such file or directory)"]


BAD_CSV = {
    "1,2,3\n4,5,6\n": r"first line, expected the columns path,label\[,split\], got 1,2,3",
    "": r"first line, expected the columns path,label\[,split\], got none",
    "path,label\n": r"is empty, expected a line for each image",
    "path,label\n,ant\n": r"line 2: path, expected a file's path",
    "path,label,split\na.png,ant,tset\n": r"line 2: split, expected train, valid, test, got tset",
    "path,label\n\xff\xfe": r"is not a CSV",
}


@pytest.mark.parametrize("text", BAD_CSV)
def test_bad_csv(text: str, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=BAD_CSV[text]) as caught:
        load_data(tmp_path / "d.csv", manifest())
    assert "\n" not in str(caught.value)


def test_parquet_files_that_number_classes_differently_are_not_mixed(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", X[:6], Y[:6], LABELS)
    write_parquet(tmp_path / "train-1.parquet", X[6:], Y[6:], LABELS[::-1])
    with pytest.raises(DataError, match="expected one list of classes in all its files, got 2 that differ"):
        load_data(tmp_path, manifest())


# ── held out ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_held_out_is_stratified_shuffled_and_the_same_at_every_start() -> None:
    labels = np.repeat([4, 0, 2], [200, 100, 30])
    held = held_out(labels, 0.1, seed=7)
    assert {label: int(held[labels == label].sum()) for label in (4, 0, 2)} == {4: 20, 0: 10, 2: 3}
    assert (held == held_out(labels, 0.1, seed=7)).all()
    assert (held != held_out(labels, 0.1, seed=8)).any()
    assert len(set(np.diff(np.flatnonzero(held[:200])).tolist())) > 3  # not every tenth
    assert np.flatnonzero(held)[:6].tolist() == FIRST_HELD  # and on any machine


FIRST_HELD = [0, 14, 19, 24, 41, 58]


@pytest.mark.parametrize(
    ("counts", "share", "total"),
    [([5] * 10, 0.1, 5), ([1, 1, 1], 0.5, 0), ([2, 1], 0.5, 1), ([100, 1], 0.1, 10), ([3, 3], 0.0, 0), ([10], 0.25, 2)],
)
def test_small_classes_share_what_is_held_and_keep_a_sample(counts: list[int], share: float, total: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    held = held_out(labels, share, seed=0)
    assert held.sum() == total
    for label, count in enumerate(counts):
        taken = int(held[labels == label].sum())
        assert taken < count
        assert taken in (int(share * count), int(share * count) + 1)


def test_the_class_that_lost_most_by_rounding_gives_one_more() -> None:
    held = held_out(np.repeat([0, 1, 2], [11, 19, 12]), 0.1, seed=0)
    assert np.bincount(np.repeat([0, 1, 2], [11, 19, 12])[held]).tolist() == [1, 2, 1]


def test_what_has_no_label_is_never_held_out() -> None:
    labels = np.array([-1] * 50 + [0] * 20)
    held = held_out(labels, 0.5, seed=1)
    assert not held[:50].any()
    assert held.sum() == 10


def _many(root: Path, count: int, kind: str) -> Path:
    for row in range(count):
        folder = root / LABELS[row % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), row % 256).save(folder / f"{kind}{row // 3:04}.png")
    return root


def _names(data: LocalData) -> set[tuple[int, int]]:
    return {(int(y), int(x.flat[0])) for x, y in zip(data.x, data.y, strict=True)}


def test_a_tenth_of_a_folder_is_held_out_and_hardly_changes_when_photos_are_added(tmp_path: Path) -> None:
    """Photos that trained the device yesterday must not become its test today."""
    small = manifest(shape=(1, 1, 1))
    root = _many(tmp_path / "d", 240, "a")
    train, held = load_held_out(root, small)
    assert np.bincount(train.y).tolist() == [72] * 3
    assert np.bincount(held.y).tolist() == [8] * 3
    assert not _names(train) & _names(held)
    assert _names(load_held_out(root, small)[1]) == _names(held)
    assert _names(load_held_out(root, small, seed=1)[1]) != _names(held)
    (tmp_path / "moved").mkdir()
    assert _names(load_held_out(root.rename(tmp_path / "moved" / "e"), small)[1]) == _names(held)
    for row in range(15):  # one in twenty more
        Image.new("L", (2, 2), 255).save(tmp_path / "moved" / "e" / LABELS[row % 3] / f"b{row}.png")
    more_train, more_held = load_held_out(tmp_path / "moved" / "e", small)
    assert len(_names(more_held) & _names(train)) <= 4
    assert len(more_train) + len(more_held) == 255


def test_what_is_held_out_has_labels_and_shares_the_array(tmp_path: Path) -> None:
    from tests.edge_client.device.test_unlabelled import _of

    root = write_folder(tmp_path / "d", X, Y, LABELS)
    (root / "unlabelled").mkdir()
    for row in range(5):
        (root / "unlabelled" / f"{row}.png").write_bytes(png(X[row]))
    backwards = sorted(root.rglob("*.png"), key=lambda path: path.parent.name[::-1])
    lines = [f"{path},{path.parent.name}" for path in backwards]
    (tmp_path / "d.csv").write_text("\n".join(["path,label", *lines]) + "\n")  # those without a label in between
    train, held = load_held_out(tmp_path / "d.csv", _of("fedproto"), share=0.25)
    assert (train.counts(3).sum(), (train.y < 0).sum(), len(held)) == (9, 5, 3)
    assert (held.y >= 0).all()
    assert train.x.base is held.x.base is train.labelled.x.base
    assert rows(train.labelled) == sorted(set(sorted_rows(X, Y)) - set(rows(held)))
    few, asked = load_held_out(tmp_path / "d.csv", _of("fedproto"), share=0.25, most=8)
    assert (few.y >= 0).all()  # of many photos those without a label are the first that are not looked at
    assert (few.counts(3).tolist(), asked.counts(3).tolist()) == ([2] * 3, [1] * 3)  # a class keeps its only one


def test_a_broken_photo_moves_none_from_one_part_to_the_other(tmp_path: Path) -> None:
    root = _folders(tmp_path / "d")
    (root / "train" / LABELS[1] / "0000-torn.png").write_bytes(png(X[0])[:60])
    train, held = load_held_out(root, manifest())
    assert rows(train) == sorted_rows(X[:6], Y[:6])
    assert rows(held) == sorted_rows(X[9:], Y[9:])


def test_an_archive_is_divided_without_mixing_up_its_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    train, held = load_held_out(tmp_path / "d.npz", manifest(), share=0.25)
    assert (len(train), len(held)) == (9, 3)
    assert sorted(rows(train) + rows(held)) == sorted_rows(X, Y)
