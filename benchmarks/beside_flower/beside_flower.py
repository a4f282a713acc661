"""Protofleet beside Flower: bytes at the socket, idle bytes, memory of all processes, time to the first round.

    python -m benchmarks.beside_flower.beside_flower [--clients 2 5] [--flower 1.41.0 1.22.0] [--rounds 3] [--idle 90]
                                       [--flower-python PATH …] [--work FOLDER] [--json FILE]

The same on both sides: one bundle (small_cnn, 28×28×1, ten classes, D = 128), the same shipped Fashion-MNIST images for
each client, and the same training step, by the device's core on ONNX Runtime, one epoch a round. What differs is who
carries it, and what is sent:

    protofleet, prototypes   `protofleet aggregate` and `protofleet client` over Mosquitto, or the embedded broker
    flower, prototypes       `MethodStrategy` and `bundle_mod` (`protofleet.flower`) in a SuperLink and SuperNodes
    flower, plain arrays     the same class means and counts in an ArrayRecord, as an app without Protofleet would
    flower, FedAvg           Flower's own strategy, and all 421,834 trained numbers of the same network as float32

Bytes are the payload of TCP, counted by a proxy between clients and server (`counting.py`): MQTT, HTTP or gRPC and all
that they wrap, but no header of IP and TCP, and no TLS, which is off on both sides. A round's are of the later ones:
from the end of the first to the end of the last, divided by rounds and clients; so is its processor time. The first,
with connecting and, in Flower, the app's files, is told apart. Idle bytes are of clients that are connected with
nothing to do, both ways, all defaults. Memory is the peak of each client's processes and of the server's, its app and
its broker among them. Time counts from the start of the first process until the first round is merged, `flwr run`
included; it depends on what else the machine does.

Environments with flwr are made from the package index under `--work`, unless `--flower-python` names some. As root on
Linux, everything but that runs in a network namespace of its own, from which nothing outside can be reached; otherwise
on loopback ports. Flower's telemetry and its look for newer versions are off.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.beside_flower.counting import CountingProxy, Watch
from benchmarks.beside_flower.flower_network import (
    ROOT,
    TESTED,
    FlowerNetwork,
    environment,
    flower_version,
    free_port,
    wait_for_port,
)

sys.path.insert(0, str(ROOT))
INSIDE, LIMIT_S = "--inside-a-namespace", 600.0
COMMAND = [sys.executable, "-m", "protofleet"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Row:
    """One way of one number of clients; bytes are of one client, memory of one client or of the server."""

    way: str
    clients: int
    up_bytes_a_round: int
    first_round_up_bytes: int
    idle_bytes_a_minute: int
    client_pss_mb: float
    client_rss_mb: float
    server_pss_mb: float
    client_processor_s_a_round: float
    first_round_s: float
    round_s: float


def measured(
    way: str, clients: int, proxy: CountingProxy, began: float, closed: Sequence[float], idle: int, watch: Watch
) -> Row:
    """A row, of the moments when rounds were closed."""
    up, _ = proxy.counted(closed[0], closed[-1])
    first, _ = proxy.counted(began, closed[0])
    later, client = clients * (len(closed) - 1), watch.peaks["client"]
    return Row(
        way=way,
        clients=clients,
        up_bytes_a_round=round(up / later),
        first_round_up_bytes=round(first / clients),
        idle_bytes_a_minute=idle,
        client_pss_mb=round(client.pss_bytes / clients / 1e6, 1),
        client_rss_mb=round(client.rss_bytes / 1e6, 1),
        server_pss_mb=round(watch.peaks["server"].pss_bytes / 1e6, 1),
        client_processor_s_a_round=round(client.processor_s(closed[0], closed[-1]) / later, 2),
        first_round_s=round(closed[0] - began, 1),
        round_s=round((closed[-1] - closed[0]) / (len(closed) - 1), 1),
    )


def idle_bytes(proxy: CountingProxy, clients: int, seconds: float) -> int:
    """Of one client a minute, both ways, of this many seconds from now on."""
    began = time.time()
    time.sleep(seconds)
    return round(sum(proxy.counted(began, time.time())) / clients / seconds * 60)


def protofleet_way(folder: Path, clients: int, rounds: int, idle_s: float) -> list[Row]:
    """Our own commands over a broker."""
    port, started, began = free_port(), [], time.time()
    mosquitto = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    broker = [*COMMAND, "broker", "--listen", f"127.0.0.1:{port}"]
    if mosquitto:
        (folder / "m.conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
        broker = [mosquitto, "-c", str(folder / "m.conf")]

    def start(name: str, command: list[str]) -> int:
        with open(folder / f"{name}.log", "wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT))
        return started[-1].pid

    try:
        servers = [start("broker", broker)]
        wait_for_port(port)
        proxy = CountingProxy(port)
        common = ["--bundle", str(folder / "fleet.bundle")]
        told = ["--rounds", str(rounds), "--min-clients", str(clients), "--no-calibrate"]
        files = ["--store", str(folder / "store"), "--json", str(folder / "summary.json")]
        to = ["--broker", f"mqtt://127.0.0.1:{port}"]
        servers.append(start("aggregator", [*COMMAND, "aggregate", *common, *to, *told, *files]))
        devices = []
        for number in range(clients):
            own = ["--id", str(number), "--data", str(folder / f"{number}.npz"), "--state", str(folder / f"d{number}")]
            through = ["--broker", f"mqtt://127.0.0.1:{proxy.port}", "--hold-out", "0"]
            devices.append(start(f"client-{number}", [*COMMAND, "client", *common, *through, *own]))
        with Watch({"client": devices, "server": servers}) as watch:
            closed = closings(folder / "summary.json", rounds)
        time.sleep(15.0)  # what follows a round has been said
        idle = idle_bytes(proxy, clients, idle_s)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)
    proxy.close()
    return [measured("protofleet, prototypes", clients, proxy, began, closed, idle, watch)]


def closings(summary: Path, rounds: int) -> list[float]:
    """When the aggregator wrote of each round that it was closed."""
    closed: list[float] = []
    deadline = time.monotonic() + LIMIT_S
    while len(closed) < rounds:
        if time.monotonic() > deadline:
            raise SystemExit(f"error: rounds of our own, expected {rounds}, got {len(closed)} in {LIMIT_S:g} s")
        time.sleep(0.02)
        if summary.exists():
            done = len(json.loads(summary.read_text())["rounds"])
            closed += [time.time()] * (done - len(closed))
    return closed


def flower_ways(python: Path, folder: Path, clients: int, rounds: int, idle_s: float) -> list[Row]:
    """Prototypes by either way and FedAvg, one run after the other over the same SuperNodes."""
    proxies: list[CountingProxy] = []

    def between(port: int) -> int:
        proxies.append(CountingProxy(port))
        return proxies[0].port

    rows, name = [], f"flower {flower_version(python)}"
    with FlowerNetwork(python, folder, clients, between) as network:
        network.wait_connected()
        connected_s = time.time() - network.began
        idle = idle_bytes(proxies[0], clients, idle_s)
        groups = {"client": [node.pid for node in network.supernodes], "server": [network.superlink.pid]}
        for kind, what in (("own", "prototypes"), ("arrays", "plain arrays"), ("fedavg", "FedAvg")):
            run_began = time.time()
            with Watch(groups) as watch:
                network.run(kind, rounds=rounds, mark=kind, timeout_s=LIMIT_S)
            closed = json.loads((folder / f"{kind}.json").read_text())[1:]  # the first is of the start
            row = measured(f"{name}, {what}", clients, proxies[0], run_began, closed, idle, watch)
            waited = {
                "first_round_s": round(row.first_round_s + connected_s, 1)
            }  # as if the run had been asked for at once
            rows.append(Row(**{**asdict(row), **waited}))
    proxies[0].close()
    return rows


def prepare(folder: Path, clients: int, photos: int) -> None:
    """The bundle, and each client's images, of all classes."""
    from protofleet.advice.frozen_fleet import deal
    from protofleet.lab.data.datasets import load_dataset

    folder.mkdir(parents=True)
    exported = [*COMMAND, "export", "--backbone", "small_cnn", "--method", "fedproto", "--classes", "10"]
    words = ["--input", "28x28x1", "--set", "epochs=1", "--out", str(folder / "fleet.bundle")]
    subprocess.run([*exported, *words], check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    train = load_dataset("fashion_mnist_subset").train
    for number, rows in enumerate(deal(train.y, clients)):
        chosen = np.concatenate([rows[train.y[rows] == label][: photos // 10] for label in range(10)])
        np.savez(folder / f"{number}.npz", x=train.x[chosen], y=train.y[chosen])


def isolated() -> bool:
    """Whether processes can be given a network of their own here."""
    try:
        return not subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True).returncode
    except OSError:
        return False


def table(rows: list[Row]) -> str:
    """As Markdown."""
    heads = ["way", "clients", "up, B a round", "first round, B up", "idle, B a minute"]
    heads += ["client, MB PSS", "client, MB RSS", "server, MB PSS"]
    heads += ["client, processor s a round", "first round, s", "round, s"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [[f"{v:,}" if isinstance(v, int) else str(v) for v in asdict(row).values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--flower", nargs="+", default=list(TESTED), help="versions of flwr")
    parser.add_argument("--flower-python", type=Path, nargs="+", help="pythons with flwr, in place of --flower")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=int, default=60, help="of each client, of ten classes alike")
    parser.add_argument("--idle", type=float, default=90.0, help="seconds")
    parser.add_argument("--work", type=Path, help="where environments are kept; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rounds < 2 or min(given.clients) < 2 or given.idle <= 0:
        parser.error("expected 2 rounds, 2 clients and some idle time at least")
    with tempfile.TemporaryDirectory(prefix="beside-flower-") as name:
        work = given.work or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        if given.inside_a_namespace:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        pythons = given.flower_python or [environment(work.resolve() / f"flwr-{each}", each) for each in given.flower]
        if isolated() and not given.inside_a_namespace:
            options = [*map(str, given.clients), "--rounds", str(given.rounds), "--idle", str(given.idle)]
            options += ["--photos", str(given.photos)]
            options += ["--json", str(given.json)] if given.json else []
            again = [
                "-m",
                "benchmarks.beside_flower.beside_flower",
                "--flower-python",
                *map(str, pythons),
                INSIDE,
                "--clients",
                *options,
            ]
            inner = subprocess.Popen(["unshare", "--net", sys.executable, *again])
            try:
                sys.exit(inner.wait())
            finally:
                inner.terminate()
                inner.wait()
        where = "a network namespace of its own" if given.inside_a_namespace else "loopback ports"
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, in {where}", flush=True)
        rows = compare(pythons, Path(name), given)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def compare(pythons: list[Path], folder: Path, given: argparse.Namespace) -> list[Row]:
    """Every way with every number of clients; each row is told when it is known."""
    rows: list[Row] = []
    for clients in given.clients:
        prepare(made := folder / f"clients-{clients}", clients, given.photos)
        told = (clients, given.rounds, given.idle)
        ways = [lambda at, told=told: protofleet_way(at, *told)]
        ways += [lambda at, told=told, python=python: flower_ways(python, at, *told) for python in pythons]
        for number, way in enumerate(ways):
            shutil.copytree(made, at := folder / f"{clients}-{number}")
            rows += (found := way(at))
            for row in found:
                print(f"{row} at load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
