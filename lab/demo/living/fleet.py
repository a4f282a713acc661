"""The month's processes: an aggregator whose sums stand, devices that wake and sleep, and what they leave on disk.

- To wake a device is to start its `protofleet client`. To put it to sleep is to end the client.
- A device on mains keeps running. SIGUSR1 tells it to look at its photos (`docs/living.md`), since a day of this month
  is shorter than the ten minutes between two looks.
- All knowledge about them comes from their files: the aggregator's `--json`, each device's `history.jsonl`, and its
  journal, from which `protofleet predict --state` answers.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofleet.contract.errors import LinkError
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.data.learned import FILE as LEARNED
from protofleet.edge_client.journal.journal import FILE, Journal, read_kept
from protofleet.lab.demo.processes import Fleet

__all__ = ["FORM", "LivingFleet"]

FORM = "discriminant"  # a class that is new is a rare one (decision 138)
_EVERY = "0.5s"
_POLL_S, _PATIENCE_S = 0.05, 120.0


class LivingFleet:
    """One fleet of the demo.

    Args:
        processes: starts the processes.
        broker: address of the running broker.
        name: name of the fleet.
        out: the demo's directory.
        prefix: prefix of its processes' names and its files; empty for the month's own fleet.
    """

    def __init__(self, processes: Fleet, broker: str, name: str, out: Path, prefix: str = "") -> None:
        self._processes, self._out, self._prefix = processes, out, prefix
        self._common = ["--broker", broker, "--fleet", name]
        self.store = out / f"aggregate.sqlite{prefix and '-' + name}"
        self._json = out / f"aggregate{prefix and '-' + name}.json"
        self._home = out / "devices"
        self._spoke_from: dict[str, int] = {}  # where the log of a process began when it was started last

    # ── the aggregator ──────────────────────────────────────────────────────────────────────────────────────────────

    def start_aggregator(self, bundle: Path) -> None:
        """Start the aggregator, or start it again on the same store."""
        options = ["--bundle", str(bundle), "--store", str(self.store), "--json", str(self._json)]
        self._start(
            "aggregator", ["aggregate", *options, *self._common, "--standing", "--every", _EVERY, "--form", FORM]
        )

    def end_aggregator(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the aggregator."""
        self._processes.end(self._named("aggregator"), how=how)

    def extend(self, bundle: Path, label: str, out: Path) -> None:
        """Run `protofleet export --extend`."""
        self._processes.run("export", ["export", "--extend", str(bundle), "--classes", f"+{label}", "--out", str(out)])

    def forget(self, device: str) -> None:
        """Give the operator's order: `protofleet forget`."""
        self._processes.run(f"forget-{device}", ["forget", device, "--store", str(self.store)])

    def told(self) -> dict[str, Any]:
        """The aggregator's newest summary; no device and version 0 before the first."""
        if not self._json.exists():
            return {"devices": {}, "global_version": 0}
        return dict(json.loads(self._json.read_text(encoding="utf-8")))

    # ── devices ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def write_photo(self, folder: Path, image: NDArray[np.uint8], number: int) -> Path:
        """Write a photo (H, W, 1) into a folder, as a PNG named by its number."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:05}.png"
        Image.fromarray(image[..., 0]).save(path)
        return path

    def photos(self, device: str) -> Path:
        """A device's folder of photos. Devices of the same name in all fleets share it."""
        return self._home / device / "photos"

    def state(self, device: str) -> Path:
        """A device's state directory."""
        return self._home / device / f"{self._prefix}state"

    def wake(self, device: str, bundle: Path, *further: str) -> None:
        """Start a device's client."""
        own = ["--id", device, "--data", str(self.photos(device)), *self._of(device, bundle)]
        self._start(device, ["client", *own, *(further or ("--hold-out", "0"))])

    def look(self, device: str) -> None:
        """Tell a running device to look at its photos."""
        self._processes.send(self._named(device), signal.SIGUSR1)

    def sleep(self, *devices: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End the clients of these devices."""
        self._processes.end(*map(self._named, devices), how=how)

    def awake(self, device: str) -> bool:
        """Whether a device's client runs."""
        return self._processes.runs(self._named(device))

    def withdraw(self, device: str, bundle: Path) -> None:
        """Run `protofleet client --withdraw` for a sleeping device."""
        self._processes.run(f"withdraw-{device}", ["client", "--id", device, *self._of(device, bundle), "--withdraw"])

    def teach(self, device: str, photo: Path, label: str) -> None:
        """Run `protofleet learn`."""
        self._processes.run(f"learn-{device}", ["learn", str(photo), label, "--state", str(self.state(device))])

    def take_what_was_taught(self, device: str, other: LivingFleet) -> None:
        """Copy the learned examples of the same device from another fleet, before its client starts in this one."""
        source = other.state(device) / LEARNED
        if source.exists():
            self.state(device).mkdir(parents=True)
            shutil.copyfile(source, self.state(device) / LEARNED)

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def await_sums(self, expected: Mapping[str, int]) -> None:
        """Wait until the newest head holds sums of the expected number of photos of each device, and each of these
        devices, which are awake, has that head on its disk.

        Raises:
            LinkError: it takes too long, or a process ended.
        """

        def settled() -> bool:  # all under one head: another may come while one of them is looked at
            summary = self.told()
            return all(self._is_settled(device, samples, summary) for device, samples in expected.items())

        self.wait(settled, lambda: f"the sums of {', '.join(expected)} in one head")

    def spoken(self, name: str) -> int:
        """The length of a process's log so far, in bytes."""
        return self._processes.log(self._named(name)).stat().st_size

    def says(self, name: str, text: str, since: int | None = None) -> bool:
        """Whether a process has logged this since its last start, or since its log had that length."""
        with self._processes.log(self._named(name)).open("rb") as log:
            log.seek(self._spoke_from[name] if since is None else since)
            return text.encode() in log.read()

    def wait(self, holds: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until a condition holds.

        Raises:
            LinkError: it takes too long, or a process ended.
        """
        until_s = time.monotonic() + _PATIENCE_S
        while not holds():
            self._processes.check(lasting=("broker",))
            if time.monotonic() > until_s:
                raise LinkError(
                    what(), expected=f"within {_PATIENCE_S:.0f} s", hint=f"the logs in {self._out / 'logs'}"
                )
            time.sleep(_POLL_S)

    # ── what they have on disk ──────────────────────────────────────────────────────────────────────────────────────

    def history(self, device: str) -> list[dict[str, Any]]:
        """The generations of a device, in order and without repetitions."""
        path = self.state(device) / "history.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        by_generation = {line["standing"]: line for line in lines}
        return [by_generation[generation] for generation in sorted(by_generation)]

    def knows(self, device: str) -> GlobalState | None:
        """The global state by which a device answers; None before the first."""
        return read_kept(self.state(device)).state if (self.state(device) / FILE).exists() else None

    def outcomes(self, device: str, bundle: bytes) -> dict[str, int]:
        """The outcomes of a device's contributions. Its client must have ended.

        Args:
            bundle: sha256 of the device's bundle.
        """
        with Journal(self.state(device), fleet=self._common[-1], device=device, bundle=bundle) as journal:
            return journal.outcomes()

    def _is_settled(self, device: str, samples: int, summary: Mapping[str, Any]) -> bool:
        lines, stands = self.history(device), summary["devices"].get(device)
        if not lines or stands is None or not self.says(device, "connected to"):
            return False
        last, state = lines[-1], self.knows(device)
        return (
            last["samples"] == samples
            and last["outcome"] in ("committed", "duplicate")
            and stands["generation"] == last["standing"]
            and state is not None
            and state.version == summary["global_version"]
        )

    def _of(self, device: str, bundle: Path) -> list[str]:
        return ["--bundle", str(bundle), "--state", str(self.state(device)), *self._common]

    def _named(self, name: str) -> str:
        return self._prefix + name

    def _start(self, name: str, command: Sequence[str]) -> None:
        log = self._processes.log(self._named(name))
        self._spoke_from[name] = log.stat().st_size if log.exists() else 0
        self._processes.start(self._named(name), command)
