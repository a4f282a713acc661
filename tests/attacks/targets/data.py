"""Data that somebody put where a device looks for its photos: it is read, or refused in one line.

The first byte says which kind: a CSV of paths, a `.npz`, an image, a parquet file in the Hub's layout. Parquet's bytes
are pyarrow's, and so are only its columns and metadata others here.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from aggregator_samples import manifest
from PIL import Image

from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.data.decode import decode_image
from protofleet.edge_client.data.load import load_data, load_held_out
from tests.attacks.choices import Choices
from tests.attacks.guard import scratch
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 2048
MANIFEST = manifest()
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP")


def run(data: bytes) -> None:
    choices = Choices(data)
    with scratch() as folder:
        path = choices.one_of((_csv, _npz, _image, _parquet))(choices, folder)
        for read in (load_data, load_held_out):
            try:
                found = read(path, MANIFEST)
            except (DataError, UsageError) as error:
                is_one_line(error)
                continue
            for each in found if isinstance(found, tuple) else (found,):
                assert each.x.dtype == np.uint8
                assert each.x.shape == (len(each.y), *MANIFEST.input_shape)
                assert len(each.y) == 0 or -1 <= each.y.min() <= each.y.max() < MANIFEST.classes


def _csv(choices: Choices, folder: Path) -> Path:
    (folder / "a.png").write_bytes(_good_image("PNG"))
    rows = bytearray(b"path,label,split\na.png,class-0,train\na.png,class-1,\nb.png,class-2,test\n")
    path = folder / "photos.csv"
    path.write_bytes(_spliced(bytes(rows), choices))
    return path


def _npz(choices: Choices, folder: Path) -> Path:
    arrays = {}
    for _ in range(choices.below(4)):
        name = choices.one_of(("x", "y", "x_train", "y_train", "x_test", "y_test", choices.text() or "z"))
        shape = tuple(choices.below(4) for _ in range(choices.below(6))) if choices.chance() else (2, 4, 4, 1)
        dtype = choices.one_of(("u1", "<i8", "<f4", ">u2", "S3", "?", "<c8", "<M8[s]", "<U2"))
        arrays[name if "/" not in name else "z"] = np.zeros(shape, dtype)
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays or {"x": np.zeros((2, 4, 4, 1), np.uint8), "y": np.arange(2)}))
    path = folder / "photos.npz"
    path.write_bytes(_spliced(buffer.getvalue(), choices))
    return path


def _image(choices: Choices, folder: Path) -> Path:
    for label in ("class-0", "class-1"):
        (folder / "photos" / label).mkdir(parents=True)
        (folder / "photos" / label / "good.png").write_bytes(_good_image("PNG"))
    data = _spliced(_good_image(choices.one_of(FORMATS)), choices)
    (folder / "photos" / "class-0" / "a.jpg").write_bytes(data)
    for shape in ((4, 4, 1), (3, 5, 3), (2, 2, 4)):
        _refused(lambda shape=shape: decode_image(data, shape).shape == shape)
    return folder / "photos"


def _refused(act: Callable[[], object]) -> None:
    try:
        assert act()
    except DataError as error:
        is_one_line(error)


def _parquet(choices: Choices, folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = _good_image("PNG")
    images = [{"bytes": choices.one_of((good, good, None, b"")), "path": None} for _ in range(2)]
    cells = choices.one_of((images, images, [None, None], [1, 2], [b"x", b"y"]))
    labels = choices.one_of(([0, 1], [0, 1], [0, -1], [None, 1], [2**40, 0], [0.5, 1.0], ["a", "b"]))
    names = ["class-0", "class-1", "class-2"]
    told = json.dumps({"info": {"features": {"label": {"names": names}}}}).encode()
    columns = {choices.one_of(("image", "img", "label")): cells}
    columns[choices.one_of(("label", "labels", "class", choices.text()))] = labels
    table = pa.table(columns)
    if choices.chance():
        table = table.replace_schema_metadata({b"huggingface": _spliced(told, choices)})
    path = folder / "photos.parquet"
    pq.write_table(table, path)
    return path


@functools.cache
def _good_image(kind: str) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 255, (6, 5, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def _spliced(data: bytes, choices: Choices) -> bytes:
    for _ in range(choices.below(4)):
        at, cut, put = choices.below(len(data) + 1), choices.below(8), choices.take(choices.below(16))
        data = data[:at] + put + data[at + cut :]
    return data


def seeds() -> Iterable[bytes]:
    for kind in range(4):
        yield bytes([kind, 0, 0, 0])
        for at in range(8):
            yield bytes([kind, at, 1, at * 9, 2, 3, 65, 66, 67, 1, at, 2, 1, 7])
