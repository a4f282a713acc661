"""Six faults in a real fleet: does the operator's page name each, with its device, and lead to what to do?

    python -m benchmarks.living.six_faults [--seed N]          prints the page's address, and runs until Ctrl-C
    python -m benchmarks.living.six_faults --check [--seed 0] [--shots FOLDER] [--keep FOLDER] [--json FILE]

The first is a drill: an operator who did not write this opens the address, and is to find which device has which fault
(gone, wrong bundle, wrong clock, liar, certificate expired, disk full) without a terminal. Ctrl-C prints the solution.

`--check` looks itself, through Chromium, and ends: nine devices with shipped photos behind a Mosquitto with
certificates, a signed bundle that is rolled out in two stages, and the six faults one after the other
(`faulty_fleet.py`). For each, the first screen has to have a line with the device and a link to its part of the
runbook, which opens; and the device's own page has to have it, too. Then the aggregator is killed with -9 while the
page is open: the page has to recover by itself, and each device's state has to become right again. At last the
certificate is renewed and the disk is emptied, as the runbook says: the two lines have to go. The exit code is 1 where
something of that does not hold.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.living.faulty_fleet import FAULTS, NAMES, FaultyFleet, needs, until_interrupted
from benchmarks.living.parts import StalledError
from tests.support.browser import Page, chromium

CAUSES = {
    "gone": "gone",
    "wrong bundle": "old-bundle",
    "wrong clock": "clock",
    "liar": "left-out",
    "certificate": "certificate",
    "disk full": "disk",
}
WORDS = {"certificate": "expired"}  # before that day it says when it will
PATIENCE_S, AWAY_S = 600.0, 5.0
_LINE = """(([device, cause]) => [...document.querySelectorAll('#cares li')].find((line) => {
    const links = [...line.querySelectorAll('a')].map((link) => decodeURIComponent(link.hash));
    return links.includes(`#device=${device}`) && links.includes(`#runbook=${cause}`);
})?.textContent ?? "")"""
_ON_SCREEN = """(([device, cause]) => [...document.querySelectorAll('#cares li')].some((line) =>
    line.textContent.startsWith(device) && line.getBoundingClientRect().bottom <= innerHeight))"""
_STATES = "Object.fromEntries([...devices.values()].map((one) => [one.name, one.presence]))"


@dataclass(frozen=True)
class Found:
    """A fault, as the page has it.

    Attributes:
        says: the line of the first screen.
        after_s: from the fault to the line.
    """

    fault: str
    device: str
    says: str
    after_s: float


class Operator:
    """Who looks at the page in Chromium, and nowhere else."""

    def __init__(self, fleet: FaultyFleet, page: Page, shots: Path | None) -> None:
        self._fleet, self._page, self._shots = fleet, page, shots
        self.wrong: list[str] = []

    def until(self, script: str, what: str, timeout_s: float = PATIENCE_S) -> Any:
        """What the script gives once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._asked(script)):
            if time.monotonic() > deadline:
                seen = self._page.run("document.body.innerText")
                raise StalledError(f"{what}, expected within {timeout_s:g} s, got\n{seen}")
            time.sleep(0.1)
        return found

    def _asked(self, script: str) -> Any:
        """What the script gives; None while the page is being loaded."""
        try:
            return self._page.run(script)
        except AssertionError:
            return None

    def line(self, fault: str) -> str:
        """What the first screen says of a fault, once it does."""
        asked = json.dumps([self._fleet.faulty[fault], CAUSES[fault]])
        has_it = f"((line) => line.includes({json.dumps(WORDS.get(fault, ''))}) && line)({_LINE}({asked}))"
        line = str(self.until(has_it, f"a line about {fault}"))
        if not self._page.run(f"{_ON_SCREEN}({asked})"):
            self.wrong.append(f"{fault}: its line is not on the first screen")
        return line

    def follow(self, fault: str) -> None:
        """From the line to the runbook, and to the device's own page; and back."""
        device, cause = self._fleet.faulty[fault], CAUSES[fault]
        for target, words in ((f"runbook={cause}", ("Means", "Look at", "Do", "Not")), (f"device={device}", (cause,))):
            self._page.tap(f"#cares a[href='#{target}']")
            body = self.until("!document.getElementById('one').hidden && document.getElementById('one-body').innerText",
                              f"the page of {target}")  # fmt: skip
            for word in words:
                has_it = f"document.getElementById('one-body').innerText.includes({json.dumps(word)})"
                self.until(has_it, f"{word} on {target}")
            self.shot(target.replace("=", "-"))
            assert body
            self._page.run("location.hash = ''")
            self.until("!document.getElementById('fleet').hidden", "the first screen again")

    def shot(self, name: str) -> None:
        """Pictures of what is seen, wide and narrow, where somebody asks for them."""
        if self._shots is None:
            return
        for width in (1400, 400):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            self._page.ask("Emulation.setDeviceMetricsOverride", **size)
            self._page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
            wide = self._page.run("document.documentElement.scrollWidth")
            if wide > width:
                self.wrong.append(f"{name}: {wide} pixels wide on a screen of {width}")
            self._page.shot(self._shots / f"{name}-{width}.png")
        self._page.ask("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)


def check(fleet: FaultyFleet, operator: Operator) -> tuple[list[Found], dict[str, float]]:
    """Everything; what the page said of each fault, and the seconds that other things took."""
    seconds: dict[str, float] = {}
    operator.until(
        f"parts.top?.well && parts.rounds.some((one) => one.closed) && "
        f"Object.values({_STATES}).filter((state) => state === 'online').length === {len(NAMES)}",
        "nine devices online, and all well",
    )
    operator.shot("well")
    asked_at = time.monotonic()
    fleet.roll_out()
    operator.until(
        f"[...devices.values()].filter((one) => one.bundle.startsWith('3 ')).length === {len(NAMES) - 1}",
        "eight devices with the next bundle",
    )
    operator.until(f"parts.rollout.counts.healthy === {len(NAMES) - 1}", "eight devices that are healthy with it")
    seconds["roll-out to eight of nine devices"] = time.monotonic() - asked_at
    operator.until("[...devices.values()].every((one) => one.presence === 'online')", "all online after the roll-out")
    found = []
    for fault in ("wrong bundle", *(each for each in FAULTS if each != "wrong bundle")):
        fleet.make(fault)
        began = time.monotonic()
        says = operator.line(fault)
        found.append(Found(fault, fleet.faulty[fault], says, time.monotonic() - began))
        print(f"{found[-1].after_s:6.1f} s  {fault}: {says}", file=sys.stderr, flush=True)
    operator.shot("six-faults")
    for fault in FAULTS:
        operator.line(fault)
        operator.follow(fault)
    seconds |= restart(fleet, operator)
    for each in found:
        operator.line(each.fault)
    seconds |= mend(fleet, operator)
    return found, seconds


def restart(fleet: FaultyFleet, operator: Operator) -> dict[str, float]:
    """The aggregator is killed while the page is open, and starts again."""
    away = {fleet.faulty[fault] for fault in ("gone", "certificate", "disk full")}
    wanted = json.dumps({name: "gone" if name in away else "online" for name in NAMES})
    right = f"JSON.stringify(Object.entries({_STATES}).sort()) === JSON.stringify(Object.entries({wanted}).sort())"
    operator.until(right, "each device's state before the aggregator is killed")
    fleet.aggregator.kill()
    operator.until("!document.getElementById('alone').hidden", "that it is not connected")
    operator.shot("alone")
    time.sleep(AWAY_S)
    fleet.aggregator.start()
    began = time.monotonic()
    operator.until("document.getElementById('alone').hidden && parts.top.runs", "the page to recover")
    recovered_s = time.monotonic() - began
    operator.until(right, "each device's state to become right again")
    right_s = time.monotonic() - began
    operator.shot("again")
    return {"page after kill -9 of the aggregator": recovered_s, "states right after it": right_s}


def mend(fleet: FaultyFleet, operator: Operator) -> dict[str, float]:
    """What the runbook says of the certificate and of the disk; the lines go."""
    began = time.monotonic()
    fleet.mend_certificate()
    fleet.free_disk()
    seconds = {}
    for fault, what in (("certificate", "certificate renewed"), ("disk full", "disk emptied")):
        asked = json.dumps([fleet.faulty[fault], CAUSES[fault]])
        operator.until(f"!{_LINE}({asked})", f"the line about {fault} to go")
        seconds[f"{what}, and the line is gone"] = time.monotonic() - began
    return seconds


def table(found: list[Found], seconds: dict[str, float]) -> str:
    """As results/operator.md has it."""
    lines = ["| fault | what the first screen says | there after |", "| --- | --- | ---: |"]
    lines += [f"| {one.fault} | {one.says} | {one.after_s:.0f} s |" for one in found]
    lines += ["", "| beside it | after |", "| --- | ---: |"]
    return "\n".join([*lines, *(f"| {what} | {after:.0f} s |" for what, after in seconds.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="look through Chromium, and end")
    parser.add_argument("--seed", type=int, help="which device has which fault; drawn anew by default, 0 with --check")
    parser.add_argument("--shots", type=Path, help="a folder for pictures of the page")
    parser.add_argument("--keep", type=Path, help="a folder for logs and stores; a temporary one otherwise")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, too
    if why := needs():
        raise SystemExit(f"error: {why}")
    if given.shots:
        given.shots.mkdir(parents=True, exist_ok=True)
    seed = given.seed if given.seed is not None else 0 if given.check else time.time_ns()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        fleet = FaultyFleet(folder, seed)
        with fleet.running():
            sys.exit(checked(fleet, given) if given.check else drill(fleet))


def checked(fleet: FaultyFleet, given: argparse.Namespace) -> int:
    """The exit code."""
    with chromium() as browser:
        deadline = time.monotonic() + PATIENCE_S
        while "page at http" not in (fleet.folder / "logs" / "aggregator.log").read_text():
            if time.monotonic() > deadline:
                raise StalledError(f"no page: {fleet.aggregator.tail()}")
            time.sleep(0.1)
        operator = Operator(fleet, browser.open(fleet.url), given.shots)
        try:
            found, seconds = check(fleet, operator)
        except StalledError as error:
            print(f"result: {error}")
            return 1
    print(table(found, seconds))
    if given.json:
        told: dict[str, object] = {"faults": [asdict(one) for one in found], "seconds": seconds}
        given.json.write_text(json.dumps({"schema": "protofleet.benchmark.six-faults/1", **told}, indent=1) + "\n")
    print("\n".join(f"result: {line}" for line in operator.wrong) or "result: the page names each, and recovers")
    return int(bool(operator.wrong))


def drill(fleet: FaultyFleet) -> int:
    """The faults are made, and stay."""
    import threading

    def happens() -> None:
        time.sleep(30.0)
        fleet.roll_out()
        time.sleep(45.0)
        for fault in FAULTS:
            fleet.make(fault)

    print(fleet.url, flush=True)
    threading.Thread(target=happens, daemon=True).start()
    until_interrupted()
    print("\n" + "\n".join(f"{device}: {fault}" for fault, device in fleet.faulty.items()))
    return 0


if __name__ == "__main__":
    main()
