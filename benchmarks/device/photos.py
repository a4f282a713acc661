"""How long photos take to be read, and how much memory: the first time, every other time, and by a plain loop.

    python -m benchmarks.device.photos [--photos 20000] [--side 128] [--plain 400] [--small] [--folder DIR] [--json
        FILE]

Makes a folder of JPEGs of mixed sizes (640 x 480 to 4000 x 3000, some lying on their side by EXIF), ten classes: sixty
different photos under as many names as are asked for (hard links, so that reading them costs no disk: what is timed is
the work). With `--small` all are 160 x 120, so that a hundred thousand take little time. Then, each in a process of
its own with a device's settings of malloc:

1. a plain loop over some of them, one thread: open, turn upright, convert, resize. That is the yardstick;
2. `load_data` with an empty cache: listing, decoding, writing;
3. `load_data` again, which finds the cache, and then what training does: batches of 16 in random order through all of
   it, giving pages back, and once through it from front to back;
4. `load_data` with one photo more, which is decoded, while the others are copied;
5. nothing but the imports.

Prints seconds, for step 4 those of the processor as well, photos a second, and peak RSS (VmHWM) of each in MB of
1,000,000 bytes. Exits with 1 when a process takes more than 60 MB above the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest
from protofleet.contract.console.logs import told
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.data.samples import release_pages
from protofleet.edge_client.hardware.process_metrics import peak_rss_bytes

SIZES = ((640, 480),) * 5 + ((1280, 960),) * 3 + ((1600, 1200), (4000, 3000))
SMALL = ((160, 120),) * 10
VARIANTS, CLASSES, ABOVE_MB = 6, 10, 60.0
ROOT = Path(__file__).parents[2]


def make_photos(folder: Path, count: int, sizes: tuple[tuple[int, int], ...]) -> None:
    """`count` files under `folder`, a subfolder for each class."""
    rng, originals = np.random.default_rng(0), folder.with_name(folder.name + "-originals")
    originals.mkdir()
    paths = []
    for width, height in sizes:
        for _ in range(VARIANTS):
            small = rng.integers(0, 256, (height // 40, width // 40, 3), np.uint8)
            image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
            grain = rng.normal(0, 6, (height, width, 1))
            exif = Image.Exif()
            exif[0x0112] = int(rng.choice([1, 1, 1, 6, 8]))
            paths.append(originals / f"{len(paths)}.jpg")
            pixels = (np.asarray(image) + grain).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(paths[-1], quality=88, exif=exif)
    for number in range(CLASSES):
        (folder / f"class-{number}").mkdir(parents=True)
    for row in range(count):
        os.link(paths[row * 7 % len(paths)], folder / f"class-{row % CLASSES}" / f"IMG_{row:06}.JPG")


def manifest(side: int) -> Manifest:
    """Of a bundle that takes RGB images of that height and width."""
    return Manifest(
        schema=SCHEMA, version=1, protofleet="0", backbone="none", provenance="none", method="fedproto", head="local",
        hyper={}, labels=tuple(f"class-{n}" for n in range(CLASSES)), features=8, input_shape=(side, side, 3),
        mean=(0.0,) * 3, std=(1.0,) * 3, batch=16, opset=20, state=(), members={},
    )  # fmt: skip


def some_of(folder: Path, count: int) -> list[Path]:
    """`count` of the photos, evenly from all."""
    files = sorted(folder.rglob("*.JPG"))
    return files[:: max(len(files) // count, 1)][:count]


def plainly(files: list[Path], side: int) -> None:
    """What one would write first."""
    for file in files:
        with Image.open(file) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            np.asarray(upright.resize((side, side), Image.Resampling.BILINEAR))


def passes(data: LocalData) -> None:
    """An epoch of training, and one of feature extraction, without the arithmetic."""
    batch = np.empty((16, *data.x.shape[1:]), np.uint8)
    order = np.random.default_rng(0).permutation(len(data))
    for start in range(0, len(order) - 15, 16):
        np.take(data.x, order[start : start + 16], axis=0, out=batch)
        release_pages(data.x)
    for start in range(0, len(data), 16):
        data.x[start : start + 16].max()
        release_pages(data.x)


def child(what: str, folder: Path, cache: Path, side: int, plain: int) -> dict[str, float]:
    """One of the five, in this process."""
    files = some_of(folder, plain) if what == "plain" else []
    began, worked, count, passed_s = time.perf_counter(), time.process_time(), len(files), 0.0
    if what == "plain":
        plainly(files, side)
    elif what != "imports":
        with told(lambda line: print(line, file=sys.stderr)):
            data = load_data(folder, manifest(side), cache=cache)
        count = len(data)
    seconds, processor_s = time.perf_counter() - began, time.process_time() - worked
    if what == "again":
        began = time.perf_counter()
        passes(data)
        passed_s = time.perf_counter() - began
    found = {"seconds": seconds, "processor_s": processor_s}
    return found | {"photos": count, "passes_s": passed_s, "peak_mb": peak_rss_bytes() / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=128, help="height and width of what they are decoded to")
    parser.add_argument("--plain", type=int, default=400, help="how many the plain loop takes")
    parser.add_argument("--small", action="store_true", help="photos of 160 x 120 alone")
    parser.add_argument("--folder", type=Path, help="where photos and cache are made; on a disk with room")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, folder, cache = options.child
        print(json.dumps(child(what, Path(folder), Path(cache), options.side, options.plain)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder, cache = Path(place) / "photos", Path(place) / "state" / "images"
        make_photos(folder, options.photos, SMALL if options.small else SIZES)
        found = {what: _run(what, folder, cache, options) for what in ("imports", "plain", "first", "again")}
        os.link(next(folder.rglob("*.JPG")), folder / "class-0" / "one_more.JPG")
        found["more"] = _run("more", folder, cache, options)
        file_mb = sum(file.stat().st_size for file in cache.glob("*.images")) / 1e6
    rates = {what: one["photos"] / one["seconds"] for what, one in found.items()}
    for what in ("plain", "first", "again", "more"):
        photos, seconds, peak_mb = (found[what][name] for name in ("photos", "seconds", "peak_mb"))
        print(f"{what:6} {photos:7,} photos {seconds:8.1f} s  {rates[what]:9,.0f}/s  peak {peak_mb:6.1f} MB")
    print(f"one photo more: {found['more']['processor_s']:.2f} s of the processor")
    faster = rates["first"] / rates["plain"]
    print(f"first time against the plain loop: {faster:.1f} times as many a second, on {os.cpu_count()} cores")
    print(f"two passes over the cache of {file_mb:,.0f} MB: {found['again']['passes_s']:.1f} s")
    above = {what: found[what]["peak_mb"] - found["imports"]["peak_mb"] for what in ("first", "again", "more")}
    for what, mb in above.items():
        met = "met" if mb <= ABOVE_MB else "MISSED"
        print(f"{what:6} {mb:6.1f} MB above the imports   target {ABOVE_MB:.0f} MB   {met}")
    if options.json is not None:
        facts = {"schema": "protofleet.bench.photos/1", "side": options.side, **found}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if max(above.values()) <= ABOVE_MB else 1


def _run(what: str, folder: Path, cache: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", what, str(folder), str(cache)]
    command += ["--side", str(options.side), "--plain", str(options.plain)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "524288", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
