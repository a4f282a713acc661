"""A camera's stream, read for one picture now and then: how old its pictures are, and what that takes.

    python -m benchmarks.device.camera_stream [--every 5] [--pictures 12] [--size 1280x720] [--key-s 2] [--rate 25]
                                              [--kbit 2000] [--on-motion moving|still] [--url rtsp://…] [--json FILE]

A real RTSP server on this machine (`tests/support/rtsp_server.py`, Debian's gst-rtsp-server) draws its clock into every
picture. A process of its own reads it as `protofleet predict --camera` does, brings each picture to 128 x 128, and
notes when. Prints the ages by that clock, the processor time of the reading process from the first picture to the last
as a share of one core, and how much memory it has after the last picture more than before the camera was opened. What
answers cost is no part of it. `--url` reads another stream instead; its age is then not known.

With `--on-motion` each key frame is looked at, at most one a second, and a picture is one in which something has moved.
The clock moves all the time: `moving` counts it, and so has a picture each `--every`; `still` crops it away. Processor
time is then over `--pictures` times `--every` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from protofleet.edge_client.data.decode import fit_pixels
from tests.support.rtsp_server import drawn_s

BELOW_THE_CLOCK = (0, 64, 1280, 656)
SERVER = Path(__file__).parents[2] / "tests" / "support" / "rtsp_server.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=float, default=5.0, help="seconds")
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--key-s", type=float, default=2.0, help="seconds between two key frames")
    parser.add_argument("--rate", type=int, default=25, help="pictures a second")
    parser.add_argument("--kbit", type=int, default=2000, help="of the stream, a second")
    parser.add_argument("--on-motion", default="", choices=["", "moving", "still"])
    parser.add_argument("--url", default="", help="of another stream")
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read, options.every, options.pictures, options.on_motion)))
        return 0
    found = read_elsewhere(options.url, options) if options.url else with_server(options)
    ages = found["ages_s"]
    if ages:
        print(f"age by the clock in the picture: median {statistics.median(ages):.3f} s, largest {max(ages):.3f} s")
    if options.on_motion:
        print(f"{found['looked']} looks, {found['pictures']} pictures")
    print(f"processor time: {found['core_share']:.2%} of a core over {found['wall_s']:.0f} s")
    print(f"memory: {found['before_mb']:.1f} MB before, {found['after_mb'] - found['before_mb']:.1f} MB more after")
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.camera-stream/1", **found}, indent=1))
    return 0


def with_server(options: argparse.Namespace) -> dict:
    """What `read` gives, of the server's stream."""
    width, height = options.size.split("x")
    words = ["--width", width, "--height", height, "--rate", options.rate, "--key-s", options.key_s]
    command = ["/usr/bin/python3", str(SERVER), *map(str, words), "--kbit", str(options.kbit), "--noise"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        port = server.stdout.readline().strip()
        return read_elsewhere(f"rtsp://127.0.0.1:{port}/clock", options)
    finally:
        server.kill()


def read_elsewhere(url: str, options: argparse.Namespace) -> dict:
    """What `read` gives, in a process of its own."""
    words = ["--read", url, "--every", str(options.every), "--pictures", str(options.pictures)]
    words += ["--on-motion", options.on_motion]
    done = subprocess.run([sys.executable, "-m", __spec__.name, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def read(url: str, every_s: float, pictures: int, on_motion: str) -> dict:
    """Read a stream, and measure."""

    fit_pixels(np.zeros((720, 1280, 3), np.uint8), (128, 128, 3))
    before, ages, begun, used = resident_mb(), [], 0.0, 0.0
    from protofleet.edge_client.cameras.motion import Motion
    from protofleet.edge_client.cameras.sources import camera_of, pictures_of  # which is part of what a camera takes

    motion = Motion(every_s, BELOW_THE_CLOCK if on_motion == "still" else None) if on_motion else None
    looked = -1
    for picture in pictures_of(camera_of(url), every_s if motion is None else motion.look_s):
        looked += 1
        if motion is None or motion.is_wanted(picture):
            ages.append(time.time() - drawn_s(picture.content))
            picture.fitted((128, 128, 3))
        del picture  # as `predict` does
        if not looked:
            begun, used = time.monotonic(), time.process_time()
        if looked + 1 == pictures if motion is None else time.monotonic() - begun > pictures * every_s:
            break
    wall_s = time.monotonic() - begun
    share = (time.process_time() - used) / wall_s
    known = [age for age in ages if abs(age) < 3600]  # of a server that has no clock in it, nonsense
    return {
        "ages_s": known, "core_share": share, "wall_s": wall_s, "pictures": len(ages), "looked": looked + 1,
        "before_mb": before, "after_mb": resident_mb(),
    }  # fmt: skip


def resident_mb() -> float:
    """Of this process, in 10⁶ bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
