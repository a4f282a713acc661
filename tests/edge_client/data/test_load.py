"""edge_client/data: every source gives the same samples, and everything that is wrong says so in one line."""

from __future__ import annotations

import builtins
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from edge_samples import FASHION, FASHION_LABELS
from PIL import Image

from protofleet.contract.bundle.bundle_file import SCHEMA, Extends, Manifest
from protofleet.contract.errors import DataError
from protofleet.contract.extras import install_command
from protofleet.edge_client.data.load import load_data


def manifest(
    labels: tuple[str, ...] = ("ant", "bee", "cat"), shape: tuple[int, int, int] = (4, 6, 3), *, trains: bool = True
) -> Manifest:
    return Manifest(
        schema=SCHEMA, version=1, protofleet="0", backbone="none", provenance="none", method="fedproto", head="local",
        hyper={}, labels=labels, features=8, input_shape=shape, mean=(0.0,) * shape[2], std=(1.0,) * shape[2], batch=4,
        opset=20, state=(), members={"train_step.onnx": ""} if trains else {},
    )  # fmt: skip


def samples(count: int = 9, shape: tuple[int, int, int] = (4, 6, 3)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 3


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(root: Path, x: np.ndarray, y: np.ndarray, labels: tuple[str, ...]) -> Path:
    for row, (pixels, number) in enumerate(zip(x, y, strict=True)):
        (root / labels[number]).mkdir(parents=True, exist_ok=True)
        (root / labels[number] / f"{row:04}.png").write_bytes(png(pixels))
    return root


def write_parquet(path: Path, x: np.ndarray, y: np.ndarray, names: tuple[str, ...] | None) -> Path:
    table = pa.table(
        {
            "image": pa.array([{"bytes": png(pixels), "path": None} for pixels in x]),
            "label": pa.array(y.tolist(), pa.int64()),
        }
    )
    if names is not None:
        label = {"names": list(names), "_type": "ClassLabel"}
        info = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
    pq.write_table(table, path)
    return path


def sorted_rows(x: np.ndarray, y: np.ndarray) -> list[tuple[int, bytes]]:
    return sorted((int(number), pixels.tobytes()) for pixels, number in zip(x, y, strict=True))


def test_folder_npz_and_parquet_give_the_same_samples(tmp_path: Path) -> None:
    x, y = samples()
    labels = manifest().labels
    np.savez(tmp_path / "d.npz", x=x, y=y.astype(np.uint8))
    sources = (
        write_folder(tmp_path / "folder", x, y, labels),
        tmp_path / "d.npz",
        write_parquet(tmp_path / "d.parquet", x, y, labels),
    )
    for source in sources:
        data = load_data(source, manifest())
        assert (data.x.dtype, data.y.dtype) == (np.uint8, np.int64)
        assert sorted_rows(data.x, data.y) == sorted_rows(x, y), source


def test_hidden_files_and_folders_are_no_samples(tmp_path: Path) -> None:
    """What file managers leave beside pictures, macOS a `._NAME` for each, is not read, be it an image or not."""
    x, y = samples()
    folder = write_folder(tmp_path / "folder", x, y, manifest().labels)
    picture = next(folder.rglob("*.png"))
    picture.with_name(f"._{picture.name}").write_bytes(picture.read_bytes())
    (folder / ".thumbnails").mkdir()
    data = load_data(folder, manifest())
    assert sorted_rows(data.x, data.y) == sorted_rows(x, y)


def test_parquet_numbers_are_mapped_by_name(tmp_path: Path) -> None:
    """A file that numbers its classes differently from the bundle must not be read by number."""
    x, y = samples()
    theirs = ("cat", "ant", "bee")
    data = load_data(write_parquet(tmp_path / "d.parquet", x, y, theirs), manifest())
    assert [manifest().labels[number] for number in data.y] == [theirs[number] for number in y]


def test_parquet_is_read_by_number_when_either_side_has_no_names(tmp_path: Path) -> None:
    x, y = samples()
    assert load_data(write_parquet(tmp_path / "a.parquet", x, y, None), manifest()).y.tolist() == y.tolist()
    numbered = manifest(("0", "1", "2"))
    named = write_parquet(tmp_path / "b.parquet", x, y, ("cat", "ant", "bee"))
    assert load_data(named, numbered).y.tolist() == y.tolist()


def test_a_list_of_numbers_that_grew_means_the_same_numbers(tmp_path: Path) -> None:
    """And one whose names are the bundle's, in another order, is read by name."""
    x, y = samples()
    grown = msgspec.structs.replace(manifest(("0", "1", "2", "hamster")), extends=(Extends("11" * 32, 3),))
    named = write_parquet(tmp_path / "b.parquet", x, y, ("cat", "ant", "bee"))
    assert load_data(named, grown).y.tolist() == y.tolist()
    other = write_parquet(tmp_path / "c.parquet", x, y, ("2", "1", "0"))
    assert (
        load_data(other, grown).y.tolist() == (2 - y).tolist() == load_data(other, manifest(("0", "1", "2"))).y.tolist()
    )
    with pytest.raises(DataError, match="unknown class"):
        load_data(write_parquet(tmp_path / "d.parquet", x, y, ("cat", "ant", "bee", "rat")), grown)


def test_a_folder_whose_disk_writes_accents_apart_is_its_class(tmp_path: Path) -> None:
    x, y = samples()
    write_folder(tmp_path / "photos", x, y, ("ant", "cafe\u0301", "cat"))
    assert sorted(set(load_data(tmp_path / "photos", manifest(("ant", "caf\u00e9", "cat"))).y.tolist())) == [0, 1, 2]


def test_a_parquet_directory_is_read_by_split(tmp_path: Path) -> None:
    x, y = samples()
    write_parquet(tmp_path / "train-00000-of-00002.parquet", x[:3], y[:3], None)
    write_parquet(tmp_path / "train-00001-of-00002.parquet", x[3:6], y[3:6], None)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", x[6:], y[6:], None)
    assert sorted_rows(*vars_of(load_data(tmp_path, manifest()))) == sorted_rows(x[:6], y[:6])
    assert len(load_data(tmp_path, manifest(), purpose="test")) == 3
    (tmp_path / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match="has no test split"):
        load_data(tmp_path, manifest(), purpose="test")


def test_the_shipped_fashion_mnist_reads(tmp_path: Path) -> None:
    data = load_data(FASHION / "test.parquet", manifest(FASHION_LABELS, (28, 28, 1)), purpose="test")
    assert data.x.shape == (1000, 28, 28, 1)
    assert data.counts(10).tolist() == [100] * 10


def test_images_are_converted_resized_and_turned_upright(tmp_path: Path) -> None:
    (tmp_path / "ant").mkdir()
    (tmp_path / "bee").mkdir()
    Image.new("RGB", (60, 40), (255, 0, 0)).save(tmp_path / "ant" / "red.jpg")
    Image.fromarray(np.full((40, 60), 0x8000, np.uint16)).save(tmp_path / "ant" / "sixteen.png")
    turned = Image.new("L", (4, 6))
    turned.paste(255, (0, 0, 4, 3))  # top half white as stored, and EXIF says: rotate by 90 degrees
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "bee" / "turned.png", exif=exif)
    data = load_data(tmp_path, manifest(shape=(4, 6, 1)))
    red, sixteen, turned_pixels = data.x[..., 0]
    assert abs(int(red.mean()) - 76) <= 2  # the luma of pure red
    assert (sixteen == 0x80).all()  # scaled from sixteen bits, not clipped
    assert (turned_pixels[:, 3:] > 200).all()
    assert (turned_pixels[:, :3] < 50).all()


def test_grey_npz_without_a_channel_axis_reads(tmp_path: Path) -> None:
    x, y = samples(shape=(4, 6, 1))
    np.savez(tmp_path / "d.npz", x=x[..., 0], y=y)
    assert load_data(tmp_path / "d.npz", manifest(shape=(4, 6, 1))).x.shape == (9, 4, 6, 1)


def vars_of(data: Any) -> tuple[np.ndarray, np.ndarray]:
    return data.x, data.y


X, Y = samples()
BAD_NPZ: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "float": ({"x": X.astype(np.float32), "y": Y}, r"x, expected uint8 pixels, 0 to 255, got float32, try "),
    "NaN": ({"x": np.full(X.shape, np.nan), "y": Y}, r"got float64 with NaN"),
    "NaN labels": ({"x": X, "y": np.full(9, np.nan)}, r"y, expected \(N,\) integer labels, got float64 .* with NaN"),
    "wrong shape": ({"x": X[:, :3], "y": Y}, r"x, expected \(N, 4, 6, 3\), got \(9, 3, 6, 3\)"),
    "no y": ({"x": X}, r"expected arrays x and y, got x, try"),
    "too few labels": ({"x": X, "y": Y[:5]}, r"expected a label for each of 9 images, got 5 labels"),
    "no samples": ({"x": X[:0], "y": Y[:0]}, r"is empty, expected at least one image"),
    "label too high": ({"x": X, "y": Y + 1}, r"a label is out of range, expected 0 to 2, got 3"),
    "label negative": ({"x": X, "y": Y - 1}, r"a label is out of range, expected 0 to 2, got -1"),
    "objects": ({"x": X, "y": np.array([None] * 9)}, r"is not a whole \.npz"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_bad_npz(tmp_path: Path, case: str) -> None:
    arrays, line = BAD_NPZ[case]
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=line) as caught:
        load_data(tmp_path / "d.npz", manifest())
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def _empty(root: Path) -> Path:
    root.mkdir()
    return root


def _empty_class(root: Path) -> Path:
    (root / "ant").mkdir(parents=True)
    return root


def _loose_images(root: Path) -> Path:
    root.mkdir()
    (root / "a.png").write_bytes(png(X[0]))
    return root


def _unknown_class(root: Path) -> Path:
    return write_folder(root, X[:2], Y[:2], ("ant", "be", "cat"))


def _broken_image(root: Path) -> Path:
    (root / "bee").mkdir(parents=True)
    (root / "bee" / "torn.png").write_bytes(png(X[0])[:60])
    return root


def _torn_npz(root: Path) -> Path:
    path = root.with_suffix(".npz")
    np.savez(path, x=X, y=Y)
    path.write_bytes(path.read_bytes()[:200])
    return path


def _torn_parquet(root: Path) -> Path:
    path = write_parquet(root.with_suffix(".parquet"), X, Y, None)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def _other_columns(root: Path) -> Path:
    pq.write_table(pa.table({"text": ["a"]}), root.with_suffix(".parquet"))
    return root.with_suffix(".parquet")


def _null_image(root: Path) -> Path:
    cells = pa.array([{"bytes": png(X[0]), "path": None}, None], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    pq.write_table(pa.table({"image": cells, "label": [0, 1]}), root.with_suffix(".parquet"))
    return root.with_suffix(".parquet")


def _foreign_names(root: Path) -> Path:
    return write_parquet(root.with_suffix(".parquet"), X, Y, ("ant", "bees", "cat"))


def _text_file(root: Path) -> Path:
    path = root.with_suffix(".txt")
    path.write_text("1,2,3")
    return path


def _npy_by_another_name(root: Path) -> Path:
    np.save(root.with_suffix(".npy"), X)
    return root.with_suffix(".npy").rename(root.with_suffix(".npz"))


def _member_without_a_header(root: Path) -> Path:
    with zipfile.ZipFile(root.with_suffix(".npz"), "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr':[[[[[[  ")
        archive.writestr("y.npy", b"")
    return root.with_suffix(".npz")


def _flipped_deflate(root: Path) -> Path:
    np.savez_compressed(root.with_suffix(".npz"), x=X, y=Y)
    raw = bytearray(root.with_suffix(".npz").read_bytes())
    raw[60:90] = b"\xff" * 30  # zlib complains before any checksum can
    root.with_suffix(".npz").write_bytes(raw)
    return root.with_suffix(".npz")


def _lists_of_labels(root: Path) -> Path:
    cells = pa.array([{"bytes": png(image), "path": None} for image in X])
    pq.write_table(pa.table({"image": cells, "label": [[1]] * len(X)}), root.with_suffix(".parquet"))
    return root.with_suffix(".parquet")


BAD_PATHS: dict[Callable[[Path], Path], str] = {
    lambda root: root / "absent": r"no data at .*absent, expected a folder of images, a \.csv",
    _empty: r"is empty, expected one subfolder of images for each class",
    _empty_class: r"is empty, expected images in its class folders",
    _loose_images: r"has no class folders, expected one subfolder",
    _unknown_class: r"unknown class, expected a class of the bundle's 3, got 'be', try one of bee",
    _broken_image: r"data: no image of 1 can be read, expected whole image files, got bee/torn\.png \(",
    _torn_npz: r"is not a whole \.npz",
    _npy_by_another_name: r"is not a whole \.npz, expected arrays x and y",
    _member_without_a_header: r"is not a whole \.npz, expected arrays x and y",
    _flipped_deflate: r"is not a whole \.npz, expected arrays x and y",
    _lists_of_labels: r"and one of integer labels, got .* label list<",
    _torn_parquet: r"is not a whole parquet file",
    _other_columns: r"expected a column of image structs .* got text string",
    _null_image: r"row 1, expected image bytes and a label, got a null",
    _foreign_names: r"row 1: unknown class, .* got 'bees', try one of bee",
    _text_file: r"cannot tell what .*\.txt is, expected a folder of images, a \.csv of paths, a \.npz or a \.parquet",
}


@pytest.mark.parametrize("make", BAD_PATHS, ids=lambda make: make.__name__.strip("_<>"))
def test_bad_sources(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(DataError) as caught:
        load_data(make(tmp_path / "data"), manifest())
    assert re.search(BAD_PATHS[make], str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "d.parquet", X, Y, None)
    real = builtins.__import__

    def without_pyarrow(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match=r"expected the package pyarrow.*" + re.escape(install_command("parquet"))):
        load_data(path, manifest())


def test_no_float_copy_of_the_set_is_made(tmp_path: Path) -> None:
    """Reading 40 MB of pixels may not take four times as much again, which one float32 copy would."""
    import tracemalloc

    x = np.zeros((40, 1000, 1000, 1), np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(40) % 3)
    tracemalloc.start()
    load_data(tmp_path / "d.npz", manifest(shape=(1000, 1000, 1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * x.nbytes


# ── broken and enormous images ──


def _torn(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64)).save(buffer, "JPEG")
    return buffer.getvalue()[: len(buffer.getvalue()) // 2]


def _with_torn_ones(root: Path, source: str, torn: int) -> Path:
    """Nine good images, and `torn` that lost power while they were written."""
    x, y = samples()
    if source == "folder":
        write_folder(root, x, y, ("ant", "bee", "cat"))
        for index in range(torn):
            (root / "bee" / f"0000-torn-{index}.jpg").write_bytes(_torn(x[0]))
        return root
    cells = [png(pixels) for pixels in x] + [_torn(x[0])] * torn
    labels = [*y.tolist(), *[1] * torn]
    order = np.random.default_rng(0).permutation(len(cells))
    image = pa.array([{"bytes": cells[i], "path": None} for i in order])
    pq.write_table(pa.table({"image": image, "label": pa.array([labels[i] for i in order])}), root / "d.parquet")
    return root


@pytest.mark.parametrize("source", ["folder", "parquet"])
@pytest.mark.parametrize("torn", [1, 40])
def test_broken_images_are_skipped_told_and_counted(source: str, torn: int, tmp_path: Path, said: list[str]) -> None:
    data = load_data(_with_torn_ones(tmp_path, source, torn), manifest())
    assert sorted_rows(*vars_of(data)) == sorted_rows(*samples())
    (line,) = said
    assert line.startswith(f"skipped {torn} of {9 + torn} images of {tmp_path}, which cannot be read: ")
    assert line.lower().count("truncated") == min(torn, 5)
    assert ("bee/0000-torn-0.jpg" if source == "folder" else "d.parquet row ") in line
    assert line.endswith("; and 35 more" if torn == 40 else ")")


def _large(path: Path, width: int, height: int, kind: str) -> Path:
    Image.new("L", (width, height), 200).save(path, kind)
    return path


@pytest.mark.parametrize(("kind", "megapixels", "taken"), [("JPEG", 40, True), ("PNG", 40, False), ("PNG", 200, False)])
def test_an_enormous_image_takes_little_memory(kind: str, megapixels: int, taken: bool, tmp_path: Path) -> None:
    file = _large(tmp_path / "large", 10_000, megapixels * 100, kind)
    code = (
        "import resource, sys, warnings\n"
        "from protofleet.edge_client.data.decode import decode_image\n"
        "from protofleet.contract.errors import DataError\n"
        "warnings.simplefilter('error')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: print(decode_image(sys.argv[1], (32, 32, 3)).mean())\n"
        "except DataError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, more_kb = done.stdout.splitlines()
    assert int(more_kb) < 30_000
    assert said == "200.0" if taken else "pixels" in said
