"""What a round of many small clients costs in the lab, beside a bare torch loop and beside fluke.

    python -m benchmarks.lab.lab_speed --fluke ENV/bin/python

Every way trains the same network (FedHP's two convolutions and a linear head) on the same number of batches of the
shipped images: `--clients` clients with `--samples` each, `--epochs` epochs, SGD, one thread. The bare loop is what
nobody can do without: images are float tensors beforehand; each client gets the global weights and a new optimiser, and
its weights are averaged. It knows nothing of seeds, of clients that differ, nor of evaluation. Nobody evaluates here.

fluke (fluke-fl 0.8.1) runs in an environment of its own, `lab_speed_fluke.py` there; `--make-fluke ENV` makes it from
the package index. Where the wheel protofleet-kernels is installed, its form of the devices' step is a way, too.

Figures are the least of `--rounds` rounds: processor time of all processes, and wall time, which tells something only
where nothing else runs. Ways take turns, round by round, so that a load meets all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.native_kernels import FORM, installed_kernels
from protofleet.edge_client.data import LocalData
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.algorithms import ALGORITHMS
from protofleet.lab.data.datasets import DataSet, load_dataset, take
from protofleet.lab.engine.deployed import Course, simulate
from protofleet.lab.engine.device_turns import TorchSteps
from protofleet.lab.engine.weight_averaging import Federation
from protofleet.lab.training.local_training import EagerModel
from protofleet.lab.training.torch_device import torch_device
from protofleet.lab.workers.engines import open_workers
from protofleet.lab.workers.workers import Workers, limited_threads

BACKBONE, MEAN, STD = "fedhp_mnist", 0.286, 0.353
LR, MOMENTUM = 0.01, 0.9


@dataclass
class Way:
    """One way: `turn` runs a round; its costs in seconds, by round."""

    name: str
    turn: Callable[[], tuple[float, float] | None]
    processor: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """One round; a turn that measures itself says what it came to."""
        began, before = time.perf_counter(), _processor_s()
        found = self.turn() or (_processor_s() - before, time.perf_counter() - began)
        self.processor.append(found[0])
        self.wall.append(found[1])


def main() -> None:
    """Measure, and print a table."""
    options = _options()
    data = load_dataset("fashion_mnist_subset")
    shares = _shares(data, options.clients, options.samples)
    with ExitStack() as stack:
        stack.enter_context(limited_threads(1))
        many = stack.enter_context(open_workers("processes", options.jobs))
        ways = [
            Way("a bare torch loop", _bare(shares, options)),
            Way("FedAvg, one process", stack.enter_context(_fedavg(shares, options, None))),
            Way(f"FedAvg, {many.jobs} processes", stack.enter_context(_fedavg(shares, options, many))),
            *_fedproto(data, shares, options, many),
        ]
        if options.fluke:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ways += [stack.enter_context(_fluke(name, shares, options, folder)) for name in ("FedAvg", "FedProto")]
        for _ in range(options.rounds + 1):
            for way in ways:
                way.measure()
    bare = min(ways[0].processor[1:])
    print(f"{options.clients} clients x {options.samples} samples, batch {options.batch}, {options.epochs} epochs")
    print("| way | processor time of a round, s | of the bare loop | wall time, s |\n| --- | ---: | ---: | ---: |")
    for way in ways:
        least, wall = min(way.processor[1:]), min(way.wall[1:])  # the first round loads and compiles
        print(f"| {way.name} | {least:.2f} | {least / bare:.2f} | {wall:.2f} |")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"clients": 100, "samples": 60, "batch": 32, "epochs": 5, "rounds": 5, "jobs": None}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fluke", help="the Python of an environment that has fluke-fl")
    parser.add_argument("--make-fluke", type=Path, help="make such an environment here, and use it")
    options = parser.parse_args()
    if options.make_fluke:
        subprocess.run([sys.executable, "-m", "venv", options.make_fluke], check=True)
        options.fluke = str(options.make_fluke / "bin" / "python")
        subprocess.run([options.fluke, "-m", "pip", "install", "-q", "fluke-fl==0.8.1"], check=True)
    return options


def _shares(data: DataSet, clients: int, samples: int) -> list[LocalData]:
    chosen = np.random.default_rng(0).choice(
        len(data.train), (clients, samples), replace=clients * samples > len(data.train)
    )
    return [take(data.train, each) for each in chosen]


def _model() -> EagerModel:
    net, width = build_backbone(BACKBONE, (28, 28, 1), seed=0)
    return EagerModel(net, classes=10, features=width, mean=(MEAN,), std=(STD,), seed=0)


def _bare(shares: list[LocalData], options: argparse.Namespace) -> Callable[[], None]:
    net, width = build_backbone(BACKBONE, (28, 28, 1), seed=0)
    model, at = nn.Sequential(net, nn.Linear(width, 10)).to(memory_format=torch.channels_last), torch_device()
    model.to(at)
    images = [torch.from_numpy((share.x.astype(np.float32) / 255 - MEAN) / STD).permute(0, 3, 1, 2) for share in shares]
    images, labels = [x.to(at) for x in images], [torch.from_numpy(share.y).to(at) for share in shares]

    def turn() -> None:
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for x, y in zip(images, labels, strict=True):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
            for _ in range(options.epochs):
                for chosen in torch.randperm(len(y)).split(options.batch):
                    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    loss.item()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / len(shares)
        model.load_state_dict(total)

    return turn


class _fedavg:
    """Our FedAvg: a round of `lab/engine/weight_averaging.py`, in these workers or in this process."""

    def __init__(self, shares: list[LocalData], options: argparse.Namespace, workers: Workers | None) -> None:
        given = {"lr": LR, "momentum": MOMENTUM, "epochs": options.epochs}
        hyper = ALGORITHMS["fedavg"].resolve(given)
        course = Course(rounds=10**6, calibrate=False)
        self._federation = Federation(ALGORITHMS["fedavg"], _model(), shares, course, hyper, batch=options.batch)
        self._workers, self._stack, self._round = workers, ExitStack(), 0

    def __enter__(self) -> Callable[[], None]:
        if self._workers is not None:
            self._stack.enter_context(self._federation.at(self._workers))
        return self._turn

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _turn(self) -> None:
        self._round += 1
        self._federation.run_round(self._round)


def _fedproto(data: DataSet, shares: list[LocalData], options: argparse.Namespace, many: Workers) -> list[Way]:
    """Our FedProto, on the devices' own core. A run evaluates its last round, which is not among those measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.bundle"
        hyper = {"lr": LR, "momentum": MOMENTUM, "epochs": options.epochs}
        build_bundle(
            backbone=BACKBONE,
            method_name="fedproto",
            labels=data.labels,
            input_shape=(28, 28, 1),
            out=path,
            hyper=hyper,
            batch=options.batch,
            seed=0,
            mean=(MEAN,),
            std=(STD,),
            for_kernels=installed_kernels() is not None,
        )
        whole = read_bundle(path)
    bundle = replace(whole, forms={})
    nothing = take(data.test, np.arange(0))
    by_torch = TorchSteps([build_backbone(BACKBONE, (28, 28, 1), seed=0)[0]] * len(shares))

    def way(name: str, workers: Workers | None, torch_steps: TorchSteps | None, bundle: Bundle = bundle) -> Way:
        steps = _rounds_of(
            lambda on_round: simulate(
                bundle,
                shares,
                nothing,
                Course(options.rounds + 3, calibrate=False, evaluate_every=10**6),
                on_round=on_round,
                workers=workers,
                torch=torch_steps,
            )
        )
        return Way(name, lambda: next(steps))

    ways = [
        way("FedProto, torch trains, one process", None, by_torch),
        way(f"FedProto, torch trains, {many.jobs} processes", many, by_torch),
        way("FedProto, the devices' graphs, one process", None, None),
        way(f"FedProto, the devices' graphs, {many.jobs} processes", many, None),
    ]
    if FORM in whole.forms:
        form = replace(bundle, train_step=whole.forms[FORM])
        ways.append(way("FedProto, their form for protofleet-kernels, one process", None, None, form))
    return ways


def _rounds_of(run: Callable[[Callable[[object], None]], object]) -> Iterator[None]:
    """A run that stands still between its rounds: in a thread, which waits for its turn."""
    import threading

    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def on_round(_: object) -> None:
        done.release()
        go.acquire()

    def whole() -> None:
        go.acquire()
        run(on_round)
        done.release()

    threading.Thread(target=whole, daemon=True).start()
    while True:
        go.release()
        done.acquire()
        yield


class _fluke:
    """fluke in its own environment: a process that runs a round for each line that it reads."""

    def __init__(self, name: str, shares: list[LocalData], options: argparse.Namespace, folder: Path) -> None:
        self._name, self._python = name, options.fluke
        given = {"x": np.stack([share.x for share in shares]), "y": np.stack([share.y for share in shares])}
        np.savez(folder / "shares.npz", **given)
        numbers = [LR, MOMENTUM, MEAN, STD, options.epochs, options.batch]
        self._words = [name.lower(), str(folder / "shares.npz"), json.dumps(numbers)]

    def __enter__(self) -> Way:
        script = Path(__file__).with_name("lab_speed_fluke.py")
        self._process = subprocess.Popen(
            [self._python, script, *self._words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return Way(f"fluke's {self._name}", self._turn)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _turn(self) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = next(line for line in self._process.stdout if line.startswith("round "))
        processor, wall = map(float, line.split()[1:])
        return processor, wall


def _processor_s() -> float:
    """Of this process and of our workers, whose parent is a fork server."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            if "lab_speed_fluke.py" not in " ".join(child.cmdline()):
                times = child.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total


if __name__ == "__main__":
    main()
