"""What a day costs a device that stays and has nothing to do: wakes, processor time, and bytes at its socket.

    python -m benchmarks.device.idle_day --seconds 600 --keepalive 60 240

A real aggregator that stays (`--every 7d`), a real Mosquitto, and one real client for each keepalive. Each client takes
part in one round; then nothing happens, and for `--seconds` are counted: voluntary context switches of each of its
threads, its processor time, and what the kernel says of its TCP connection (`ss --tcp --info`): bytes of payload and
segments either way. A segment is taken to cost 52 bytes more, IPv4 and TCP with timestamps; TLS is not counted. One
line of JSON for each keepalive: what was counted, and the same scaled to a day. Keepalives and the look at the photos
(every 600 s) come periodically, so `--seconds` is best a multiple of both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "lab" / "demo" / "shipped"
DAY_S, SEGMENT_BYTES = 86_400.0, 52
COMMAND = [sys.executable, "-m", "protofleet"]


def photos(folder: Path, count: int) -> Path:
    """Images of the demo's bundle, and the CSV that names them."""
    from PIL import Image

    folder.mkdir()
    lines = ["path,label"]
    with np.load(SHIPPED / "images.npz") as images:
        for number, (x, y) in enumerate(zip(images["dealt_x"][:count], images["dealt_y"][:count], strict=True)):
            Image.fromarray(x[..., 0]).save(folder / f"{number}.png")
            lines.append(f"{number}.png,{images['labels'][y]}")
    (folder / "photos.csv").write_text("\n".join(lines))
    return folder / "photos.csv"


def wakes(pid: int) -> dict[str, int]:
    """Voluntary context switches so far, by thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        (switches,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
        found[task.name] = int(switches)
    return found


def processor_s(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def traffic(pid: int, port: int) -> dict[str, int]:
    """Bytes of payload and segments of a process's connection to the broker, as the kernel counts them."""
    shown = subprocess.run(
        ["ss", "--tcp", "--info", "--processes", "--no-header", "--oneline", "dst", f"127.0.0.1:{port}"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (line,) = [line for line in shown.splitlines() if f"pid={pid}," in line]
    names = ("bytes_sent", "bytes_received", "segs_out", "segs_in")
    return {name: int((re.findall(rf"\b{name}:(\d+)", line) or ["0"])[0]) for name in names}


def counted(pid: int, port: int) -> dict[str, float]:
    return {"wakes": sum(wakes(pid).values()), "processor_s": processor_s(pid), **traffic(pid, port)}


def measure(seconds: float, keepalives: list[int], count: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "m.conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
        data = photos(folder / "photos", count)
        common = ["--bundle", str(SHIPPED / "fleet.bundle"), "--broker", f"mqtt://127.0.0.1:{port}", "--quiet"]
        mosquitto = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin") or "mosquitto"
        started = [subprocess.Popen([mosquitto, "-c", str(folder / "m.conf")], stderr=subprocess.DEVNULL)]
        try:
            time.sleep(1.0)
            served = ["--store", str(folder / "s"), "--every", "7d", "--window", "20s"]
            served += ["--min-clients", str(len(keepalives))]
            started.append(subprocess.Popen([*COMMAND, "aggregate", *common, *served]))
            clients = []
            for keepalive in keepalives:
                own = ["--id", f"d{keepalive}", "--data", str(data), "--state", str(folder / f"d{keepalive}")]
                clients.append(subprocess.Popen([*COMMAND, "client", *common, *own, "--keepalive", str(keepalive)]))
            started += clients
            for keepalive in keepalives:
                while not (folder / f"d{keepalive}" / "history.jsonl").exists():
                    time.sleep(0.5)
            time.sleep(10.0)  # what follows a round has been said
            before = [counted(client.pid, port) for client in clients]
            began = time.monotonic()
            time.sleep(seconds)
            after = [counted(client.pid, port) for client in clients]
            lasted = time.monotonic() - began
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(30)
    lines = []
    for keepalive, was, now in zip(keepalives, before, after, strict=True):
        found = {name: round(now[name] - was[name], 3) for name in was}
        segments = found["segs_out"] + found["segs_in"]
        bytes_ = found["bytes_sent"] + found["bytes_received"] + SEGMENT_BYTES * segments
        day = DAY_S / lasted
        lines.append(
            {"keepalive_s": keepalive, "seconds": round(lasted, 1), **found}
            | {"wakes_a_day": round(found["wakes"] * day), "bytes_a_day": round(bytes_ * day)}
            | {"processor_s_a_day": round(found["processor_s"] * day, 1)}
        )
    return lines


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--keepalive", type=int, nargs="+", default=[60, 240])
    parser.add_argument("--photos", type=int, default=200)
    given = parser.parse_args()
    for line in measure(given.seconds, given.keepalive, given.photos):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
