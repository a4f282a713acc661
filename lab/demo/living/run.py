"""`protofleet demo --living`: a simulated month of a fleet that lives, with real processes over a real broker.

1. Take the shipped bundle with nine of its ten classes, and deal the photos over devices and days (`story.py`).
2. Start a broker, and run the month (`life.py`). At the end of each day every device is tested on the test images
   (`figures.py`).
3. Start a fleet in which none of it happened, with the devices and photos of the last day, and compare (`proofs.py`).
4. Write `summary.json` and `report.html`.

Whatever goes wrong, and at Ctrl-C, no process is left behind (`lab/demo/processes.py`).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from protofleet.contract.bundle.bundle_file import write_bundle
from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.reports.page import check_pages
from protofleet.lab.demo.living.figures import Figures
from protofleet.lab.demo.living.fleet import LivingFleet
from protofleet.lab.demo.living.life import Life
from protofleet.lab.demo.living.proofs import compare, head_error, predicted, read_store
from protofleet.lab.demo.living.report import render_living
from protofleet.lab.demo.living.story import DAYS, DEVICES, labels_of, plan
from protofleet.lab.demo.living.summary import Ended, summarise
from protofleet.lab.demo.prerequisites import check_there, fresh_directory
from protofleet.lab.demo.processes import Fleet, check_port, free_port, wait_for_port
from protofleet.lab.demo.shipped import read_images, shipped_bundle
from protofleet.lab.reporting.progress import Stage, stage

__all__ = ["Living", "run_living", "write_short"]

FLEET, NEVER = "living", "never"


@dataclass(frozen=True)
class Living:
    """The options; see `protofleet demo --help`."""

    out: Path = Path("protofleet-demo")
    seed: int = 0
    port: int = 0
    verbose: bool = False


def run_living(living: Living, console: Console) -> dict[str, Any]:
    """Run the month, write `summary.json` and `report.html` into `living.out`, and return the summary.

    Raises:
        UsageError: an option cannot be used.
        LinkError: a process ended early, or did not do its part. The line names its log.
    """
    began = time.monotonic()
    _check(living)
    out = fresh_directory(living.out)
    images, bundle = read_images(), shipped_bundle()
    with stage(console) as shown, _processes(living, out, shown) as processes:
        with shown.part("month", f"{DAYS} days of a fleet", DAYS) as part:
            broker = _start_broker(living, processes)
            fleet = LivingFleet(processes, broker, FLEET, out)
            short = write_short(out / "fleet.bundle", labels_of(images)[:-1])
            life = Life(fleet, images, plan(images, living.seed), Figures(images, bundle), short, out, part)
            life.live()
        with shown.part("proofs", "a fleet in which none of it happened") as part:
            ended = _end(life, LivingFleet(processes, broker, NEVER, out, "never-"), out)
            part.say("the same integers" if ended.never["equal"] else "other integers")
    summary = summarise(life, ended, seed=living.seed)
    summary |= {"seconds": time.monotonic() - began, "seconds_by_phase": shown.seconds}
    (out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render_living(summary), encoding="utf-8")
    return summary


def write_short(path: Path, labels: tuple[str, ...]) -> Path:
    """Write the shipped bundle with these classes only, the first of its own. The fleet starts with it, and gets one
    class more later. Its backbone, weights and features are the shipped ones."""
    bundle = shipped_bundle()
    m = bundle.manifest
    manifest = msgspec.structs.replace(
        m, labels=labels, provenance=f"{m.provenance}; the first {len(labels)} of its classes"
    )
    write_bundle(
        path, manifest, features=bundle.features, train_step=None, params=bundle.params, vectors=bundle.vectors
    )
    return path


def _check(living: Living) -> None:
    check_pages("demo")
    check_there("iotcore", "the demo's broker", "demo")
    for name, value, high in (("--seed", living.seed, 2**31 - 1), ("--port", living.port, 65_535)):
        if not 0 <= value <= high:
            raise UsageError(name, expected=f"0 to {high}", got=value)
    if living.port:
        check_port(living.port)


def _processes(living: Living, out: Path, shown: Stage) -> Fleet:
    return Fleet(out / "logs", on_start=shown.tell, extra=("-v",)) if living.verbose else Fleet(out / "logs")


def _start_broker(living: Living, processes: Fleet) -> str:
    port = living.port or free_port()
    processes.start("broker", ["broker", "--listen", f"127.0.0.1:{port}"])
    wait_for_port(processes, "broker", port)
    return f"mqtt://127.0.0.1:{port}"


def _end(life: Life, never: LivingFleet, out: Path) -> Ended:
    """Start a fleet of the remaining devices on the last day, and make the proofs."""
    left = [device for device in DEVICES if device.is_there(DAYS)]
    names, rows = [device.name for device in left], {d.name: life.month.there(d, DAYS) for d in left}
    np.savez(out / "devices" / "test.npz", x=life.images.test.x, y=life.images.test.y)
    never.start_aggregator(life.bundle.path)
    for name in names:
        never.take_what_was_taught(name, life.fleet)
        never.wake(name, life.bundle.path, "--test", str(out / "devices" / "test.npz"))
    never.await_sums({name: len(device_rows) for name, device_rows in rows.items()})
    never.sleep(*names)
    never.end_aggregator()
    contents = read_store(life.fleet.store, life.bundle.bundle, FLEET)
    everything = [row for device_rows in rows.values() for row in device_rows]
    head, _ = life.figures.head_of(everything)
    answers = predicted(life.fleet, names, life.images.test.x)
    last = life.days[-1]
    return Ended(
        never=compare(contents, read_store(never.store, life.bundle.bundle, NEVER)),
        generations=contents.generations,
        outcomes={device.name: life.fleet.outcomes(device.name, life.has[device.name].sha256) for device in DEVICES},
        histories={device.name: life.fleet.history(device.name) for device in DEVICES},
        shipped={name: never.history(name)[-1]["right"]["shipped"] for name in names},
        head_error=head_error(contents.head, head),
        equal_to_pooled=int((last.fleet.answers == last.pooled.answers).sum()),
        equal_to_predict={name: int((answers[name] == last.devices[name].answers).sum()) for name in names},
    )
