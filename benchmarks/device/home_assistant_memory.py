"""What `--home-assistant` costs a client that has a camera: memory, bytes, and processor time.

    python -m benchmarks.device.home_assistant_memory [--seconds 30] [--repeats 3] [--json FILE]

A real Mosquitto, and a real client with the demo's bundle and a folder as its camera, which gets one photo in a second:
without Home Assistant, with `--home-assistant`, and with `--home-assistant-photo`, too. After `--seconds` are read, for
each: the resident set and its proportional share (VmRSS, Pss), its peak (VmHWM), and the processor time since the
client was ready. What was published for Home Assistant is counted by who listens there. The median of the repeats is
printed, in MB of 1,000,000 bytes. Exits with 1 where Home Assistant takes more than the target.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import paho.mqtt.client as mqtt

from benchmarks.device.device_memory import pss_mb, rss_mb
from protofleet.edge_client.hardware.process_metrics import board_name, versions
from protofleet.lab.demo.processes import free_port

SHIPPED = Path(__file__).parents[2] / "lab" / "demo" / "shipped"
TARGET_MB = 3.0
WAYS: dict[str, tuple[str, ...]] = {
    "without": (),
    "with --home-assistant": ("--home-assistant", "fleet"),
    "and --home-assistant-photo": ("--home-assistant", "fleet", "--home-assistant-photo"),
}


@dataclass(frozen=True)
class Result:
    """Of one client; MB of 1,000,000 bytes, and bytes of payload."""

    rss_mb: float
    pss_mb: float
    peak_mb: float
    processor_s: float
    messages: int
    payload_bytes: int


def measure(folder: Path, more: tuple[str, ...], seconds: int) -> Result:
    """One client's first seconds."""
    (folder / "camera").mkdir(parents=True)
    (folder / "policy.toml").write_text("answers = true\n")
    port = free_port()
    (folder / "broker.conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        sys.exit("mosquitto, expected on PATH, got none, try apt-get install mosquitto")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    broker = subprocess.Popen([found, "-c", str(folder / "broker.conf")], **quiet)  # type: ignore[call-overload]
    url = f"mqtt://127.0.0.1:{port}"
    words = ["--bundle", SHIPPED / "fleet.bundle", "--broker", url, "--id", "pi-1", "--state", folder / "state"]
    words += ["--camera", f"folder:{folder / 'camera'}", "--every", "0.2", "--policy", folder / "policy.toml", *more]
    client = None
    try:
        sizes = _listen(port)
        command = [sys.executable, "-m", "protofleet", "client", *map(str, words)]
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert client.stderr is not None
        while "connected to mqtt" not in client.stderr.readline():
            assert client.poll() is None, "the client ended"
        threading.Thread(target=client.stderr.read, daemon=True).start()
        began_s = _processor_s(client.pid)
        _show(folder / "camera", seconds)
        status = Path(f"/proc/{client.pid}/status").read_text()
        (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        read = rss_mb(client.pid)[0], pss_mb(client.pid), peak * 1024 / 1e6
        return Result(*read, _processor_s(client.pid) - began_s, len(sizes), sum(sizes))
    finally:
        if client is not None:
            client.send_signal(signal.SIGTERM)
            client.wait(60)
        broker.terminate()
        broker.wait(60)


def _listen(port: int) -> list[int]:
    """The sizes of the messages for Home Assistant, as they come."""
    sizes: list[int] = []
    ready = threading.Event()
    listener = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    listener.on_connect = lambda one, *_: one.subscribe([("homeassistant/#", 1), ("protofleet/#", 1)])
    listener.on_subscribe = lambda *_: ready.set()
    listener.on_message = lambda client, data, message: sizes.append(len(message.payload))
    deadline = time.monotonic() + 30
    while True:
        try:
            listener.connect("127.0.0.1", port)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    listener.loop_start()
    ready.wait(30)
    return sizes


def _show(camera: Path, seconds: int) -> None:
    from PIL import Image

    with np.load(SHIPPED / "images.npz") as images:
        x = images["dealt_x"]
    for number in range(seconds):
        Image.fromarray(x[number % len(x)][..., 0]).save(camera / f"{number}.png")
        time.sleep(1.0)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{board_name()}, {versions()}, {options.seconds} photos in {options.seconds} s\n")
    print("| client with a camera | RSS | Pss | peak | processor time | messages | payload |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    medians = {}
    for name, more in WAYS.items():
        results = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(Path(folder), more, options.seconds))
        columns = zip(*(asdict(result).values() for result in results), strict=True)
        m = medians[name] = Result(*map(statistics.median, columns))
        print(
            f"| {name} | {m.rss_mb:.1f} MB | {m.pss_mb:.1f} MB | {m.peak_mb:.1f} MB | {m.processor_s:.2f} s "
            f"| {m.messages:.0f} | {m.payload_bytes:,.0f} bytes |",
            flush=True,
        )
    plain, *others = medians.values()
    more_mb = max(other.rss_mb for other in others) - plain.rss_mb
    met = more_mb <= TARGET_MB
    print(f"\nat most {more_mb:.1f} MB more of RSS, target {TARGET_MB:.0f} MB, {'met' if met else 'MISSED'}")
    if options.json is not None:
        facts = {name: asdict(result) for name, result in medians.items()}
        options.json.write_text(json.dumps({"schema": "protofleet.bench.home-assistant/1", **facts}, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
