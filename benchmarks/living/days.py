"""A simulated month as it goes: days, kills, orders, evenings. See benchmarks/living/month.py."""

from __future__ import annotations

import argparse
import heapq
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.living.books import Book, Naive, StoreContents, store_contents
from benchmarks.living.check import compare_rounds, compare_standing, stands_as_photos
from benchmarks.living.parts import COMMAND, Aggregator, Process, StalledError, Worker, broker, command, wait_for
from benchmarks.living.photos import Owners, Photos
from benchmarks.living.plan import Event, plan
from benchmarks.living.rollout import Operator, Signed, bad_board
from protofleet.aggregator.store.operator_orders import await_done, give
from protofleet.contract.methods import method
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.lab.data.datasets import load_dataset

WORKERS, AWAKE_S, SLOW_S, SETTLE_S, LAST_S = 4, (0.5, 1.5), 120.0, 60.0, 300.0
AT_ONCE = 40  # devices that are woken together in the end
WITHDRAWS_WITH = ("bundle", "broker", "id", "state", "fleet", "trust", "identity")
SEGMENT_BYTES = 52  # IPv4 and TCP with timestamps, as in idle_day.py


class Month:
    """The fleet, its parts and its books.

    Attributes:
        days: what was counted, day by day.
        faults: what went wrong, a line each.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.day_s = folder, options, options.day_seconds
        self.rng = np.random.default_rng(options.seed)
        for name in ("logs", "devices"):
            (folder / name).mkdir()
        fashion = load_dataset("fashion_mnist_subset").train
        self.world = Photos(folder / "photos", fashion.x, fashion.y.astype(np.int64))
        self.signed = Signed(folder)
        self.old, self.new = self.signed.old, self.signed.new
        first, bundle = self.signed.bundles
        self.owners = Owners(self.world, first, bundle, self.rng)
        extractor, found = CompiledGraphs(bundle).shared_extractor(), method(options.method)
        self.naive = Naive(bundle, found, extractor, "f64" if found.name == "ffc" else "f32", self.world)
        self.plan = plan(
            options.days, options.devices, self.rng, folder / "devices", self.old, bundle.manifest.classes - 1
        )
        self.books = {book.name: book for book in [*self.plan.books, *self.plan.sleepers]}
        self.days, self.faults, self.killed = list[dict[str, Any]](), list[str](), Counter[str]()
        self.orders, self.wakes, self.cut_short = Counter[str](), 0, 0
        self._make_parts()
        self._jobs, self._awake = itertools.count(1), dict[int, tuple[Book, float]]()
        self._counted, self._traffic = dict[str, dict[str, Any]](), Counter[str]()
        self._told_traffic = set[int]()
        self._due, self._serial = list[tuple[float, int, Event]](), itertools.count()
        self.held: StoreContents | None = None

    def _make_parts(self) -> None:
        folder, logs, day_s = self.folder, self.folder / "logs", self.day_s
        made, self.url = broker(self.options.broker, folder)
        own = ["--method", self.options.method, "--sign", str(self.signed.secret)]
        own += ["--enrolled"] if self.options.sign else []
        own += ["--sums-encoding", "f64"] if self.options.method == "ffc" else []  # the books hold triangles to photos
        clock = ("--every", f"{day_s / 2}s", "--window", f"{day_s / 2}s")
        least = ("--min-clients", str(max(2, len(self.plan.sleepers) // 5)), "--no-calibrate")
        standing = Aggregator(
            "living", self.url, folder / "living.sqlite", logs, *own, "--standing", "--every", f"{day_s / 24}s"
        )
        windows = Aggregator("windows", self.url, folder / "windows.sqlite", logs, *own, *clock, *least)
        self.aggregators = {"living": standing.serves(self.old), "windows": windows.serves(self.old)}
        self.workers = [Worker(index, max(0.5, day_s / 144), logs) for index in range(WORKERS)]
        self.whole = {book.name: Process(book.name, self._client(book), logs) for book in self.plan.books if book.whole}
        self.bad = self.plan.books[0]
        self.whole[self.bad.name].environment = bad_board(folder)
        self.operator = Operator(standing.store, self.new, day_s, small=self.options.devices < 40)
        workers = {worker.name: worker for worker in self.workers}
        self.parts: dict[str, Any] = {"broker": made, **self.aggregators, **workers, **self.whole}
        self._away = set(self.parts)

    def _settings(self, book: Book) -> dict[str, Any]:
        told = {"bundle": book.bundle, "broker": self.url, "id": book.name, "state": book.state, "data": book.data}
        told["trust"] = self.signed.trust
        told |= {"identity": self.signed.key_of(book.name)} if self.options.sign else {}
        more = {"fleet": book.fleet, "hold_out": 0.0, "rollout": book.name not in self.plan.copied}
        return {name: str(value) for name, value in told.items()} | more

    def _client(self, book: Book) -> list[str]:
        told = {name: value for name, value in self._settings(book).items() if name != "rollout"}
        given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in told.items()]
        return [*COMMAND, "client", *itertools.chain.from_iterable(given)]

    # ── the month ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        for book in self.books.values():
            self.owners.deal(book, int(self.rng.integers(20, 41)))
        for name in self.parts:
            self._start(name)
        stores = [each.store for each in self.aggregators.values()]
        wait_for(lambda: all(store.exists() for store in stores), "stores", SLOW_S, self._turn)
        if self.options.sign:
            self._enrol()
        for day in range(1, self.options.days + 1):
            self._day(day)
            self._evening(day)
        self._bring_up_to_date()
        self.faults += [f"in the end: {fault}" for fault in self._settled(last=True)]

    def _enrol(self) -> None:
        """The operator has every device's key before the first one comes."""
        orders = [
            (store, give(store, "enrol", book.name, "operator", detail=self.signed.public_of(book.name))[0])
            for book in self.books.values()
            for store in [self.aggregators[book.fleet].store]
        ]
        for store, order in orders:
            if not (await_done(store, order, SLOW_S).outcome or "").startswith("done"):
                raise StalledError(f"{order.device} was not enrolled within {SLOW_S:g} s")

    def rolled_out(self) -> dict[str, Any]:
        """How far the roll-out came, what the operator asked for, and what became of the bad board."""
        told = self.operator.look() if self.operator.began else {"state": "not begun", "fraction": 0.0, "counts": {}}
        found = {name: told[name] for name in ("state", "fraction", "counts")}
        return found | {"bad_board": self.signed.refused_new(self.bad), "asked": self.operator.did}

    def end(self) -> None:
        """Whatever still runs is killed."""
        for name, part in self.parts.items():
            if name not in self._away:
                part.kill()

    def _day(self, day: int) -> None:
        began = time.monotonic()
        if day == self.plan.extends:
            self._kill("living")
            self.aggregators["living"].serves(self.new, self.old)
            self._start("living")
            self.operator.begin(day)
        self._schedule(day, began)
        while self._due or time.monotonic() < began + self.day_s:
            while self._due and self._due[0][0] <= time.monotonic():
                self._happens(heapq.heappop(self._due)[2])
            self._turn()
            time.sleep(0.01)

    def _schedule(self, day: int, began: float) -> None:
        events = [event for event in self.plan.events if day <= event.at < day + 1]
        for book in self.books.values():
            if not book.joins <= day <= book.leaves:
                continue
            if self.plan.copied.get(book.name) == day:
                events.append(Event(day, "copy", book.name))
            for at in self._wakes(book, day):
                events.append(Event(day + at, "wake", book.name))
        for event in events:
            if event.what != "withdraw":  # in the evening, when the device sleeps
                self._later(began + (event.at - day) * self.day_s, event)

    def _change(self, book: Book) -> None:
        """Photos come and go, of the class that came later, too, where a device has the bundle for good."""
        book.longer = book.longer or book.bundle == self.new or self.signed.runs_new(book)
        self.owners.change(book)

    def _wakes(self, book: Book, day: int) -> list[float]:
        if book.pattern == 0:
            return [float(self.rng.random())]
        if book.pattern < 1:
            return [float(self.rng.uniform(0.0, 0.4)), float(self.rng.uniform(0.5, 0.9))]
        asleep = (day - book.joins + sum(book.name.encode()) * (day > book.joins)) % round(book.pattern)
        return [] if asleep else [float(self.rng.uniform(0.0, 0.9))]

    def _later(self, at: float, event: Event) -> None:
        heapq.heappush(self._due, (at, next(self._serial), event))

    def _happens(self, event: Event) -> None:
        book = self.books.get(event.who)
        if event.what == "wake" and book is not None:
            if not book.whole:
                self._change(book)
                self._wake(book)
        elif event.what == "copy" and book is not None:
            self._copy(book)
        elif event.what == "kill":
            self._kill_one(event.who)
        elif event.what == "start":
            self._start(event.who)
        else:
            self._order(event.what, event.who)

    # ── devices ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self, book: Book, awake_s: float | None = None) -> None:
        if self._is_awake(book):
            return
        running = [worker for worker in self.workers if worker.name not in self._away]
        if not running:
            return
        worker = min(running, key=lambda each: len(each.jobs))
        job, wakes_s = next(self._jobs), awake_s or float(self.rng.uniform(*AWAKE_S))
        always = book.pattern == 0
        worker.jobs.add(job)
        self._awake[job] = (book, float("inf") if always else time.monotonic() + wakes_s + SLOW_S)
        self.wakes += 1
        worker.ask("wake", job, awake_s=None if always else wakes_s, settings=self._settings(book))

    def _is_awake(self, book: Book) -> bool:
        return any(awake is book for awake, _ in self._awake.values())

    def _copy(self, book: Book) -> None:
        """The longer bundle is copied to a device, which is started with it."""
        book.bundle = self.new
        for job, (awake, _) in self._awake.items():
            if awake is book and book.pattern == 0:
                for worker in self.workers:
                    if job in worker.jobs and worker.name not in self._away:
                        worker.ask("sleep", job)

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _kill_one(self, kind: str) -> None:
        names = {"worker": [worker.name for worker in self.workers], "whole": list(self.whole)}.get(kind, [kind])
        name = str(self.rng.choice(names))
        if name not in self._away:
            self.killed[kind] += 1
            self._restart(name)

    def _restart(self, name: str) -> None:
        self._kill(name)
        self._later(time.monotonic() + float(self.rng.uniform(0.0, 1.0)), Event(0.0, "start", name))

    def _kill(self, name: str) -> None:
        part = self.parts[name]
        part.kill()
        self._away.add(name)
        if isinstance(part, Worker):
            self.cut_short += len(part.jobs)
            for job in part.jobs:
                self._awake.pop(job, None)
            part.jobs = set()
            self._counted.pop(name, None)
        elif name in self.whole:
            self._change(self.books[name])

    def _start(self, name: str) -> None:
        if name in self._away:
            self.parts[name].start()
            self._away.discard(name)

    def _turn(self) -> None:
        """Hear what became of what was asked."""
        for worker in self.workers:
            while not worker.told.empty():
                told = worker.told.get()
                if "traffic" in told:
                    self._count(worker.name, told)
                    continue
                worker.jobs.discard(told["job"])
                book, _ = self._awake.pop(told["job"], (None, 0.0))
                if told["failed"] and book is not None:
                    self.faults.append(f"{book.name} failed: {told['failed']}")
        for name, part in self.parts.items():
            if name not in self._away and not part.runs:
                raise StalledError(f"{name} ended by itself: {part.tail()}")
        now = time.monotonic()
        for book, until in self._awake.values():
            if now > until:
                raise StalledError(f"{book.name} did not go to sleep in {SLOW_S:g} s")

    # ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, what: str, name: str) -> None:
        store, book = self.folder / "living.sqlite", self.books[name]
        if what != "admit":
            self._see_that_it_stands(book)
        self.orders[what] += 1
        if what == "withdraw":
            wait_for(lambda: not self._is_awake(book), f"{name} asleep", SLOW_S, self._turn)
            given = {name: value for name, value in self._settings(book).items() if name in WITHDRAWS_WITH}
            options = itertools.chain.from_iterable((f"--{option}", value) for option, value in given.items())
            command("client", *options, "--withdraw")
        elif what == "forget":
            command("forget", name, "--store", store)
        else:
            command("fleet", "admit", name, "--store", store)
        book.out = what != "admit"

    def _see_that_it_stands(self, book: Book) -> None:
        """On a busy machine it may not have come so far."""

        def stands() -> bool:
            return store_contents(self.folder / "living.sqlite").stands.get(book.name, (0, None))[1] is not None

        def turn() -> None:
            for name in list(self._away):
                self._start(name)
            self._wake(book)
            self._turn()

        wait_for(stands, f"sums of {book.name} in the store", SLOW_S, turn)

    # ── evenings ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _evening(self, day: int) -> None:
        while self._due:
            self._happens(heapq.heappop(self._due)[2])
        wait_for(self._asleep, "every device asleep", SLOW_S + AWAKE_S[1], self._turn)
        for event in self.plan.events:
            if event.what == "withdraw" and day <= event.at < day + 1:
                self._order("withdraw", event.who)
        rollout = self.operator.evening(day)
        found = self._settled()
        self.faults += [f"day {day}: {fault}" for fault in found]
        told, living = self._counts(), self.aggregators["living"]
        present = sum(book.joins <= day <= book.leaves and not book.whole for book in self.books.values())
        stands = [payload for _, payload in self.held.stands.values() if payload is not None]
        row = {
            "day": day,
            "stand": len(stands),
            "samples": int(self.naive.total(map(self.naive.of_payload, stands))[-1].sum()),
            "version": 0 if self.held.state is None else self.held.state.version,
            "wakes": self.wakes - sum(earlier["wakes"] for earlier in self.days),
            "kills": self.killed.total() - sum(earlier["kills"] for earlier in self.days),
            "bytes_per_device": round((told["bytes"] + SEGMENT_BYTES * told["segments"]) / present),
            "rss_mb": round(living.rss_mb, 1),
            "store_mb": living.store_mb[0],
            "log_mb": living.store_mb[1],
            "rollout": rollout,
            "exact": not found,
        }
        self.days.append(row)
        print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()), flush=True)

    def _asleep(self) -> bool:
        return all(book.pattern == 0 for book, _ in self._awake.values())

    def _settled(self, last: bool = False) -> list[str]:
        """What is wrong once it has had time to come right; nothing as soon as nothing is."""
        until = time.monotonic() + SETTLE_S
        while True:
            self._turn()
            found, self.held = compare_standing(self.plan.books, self.folder / "living.sqlite", self.naive, last)
            found += compare_rounds(self.plan.sleepers, self.folder / "windows.sqlite", 3 * self.day_s + SETTLE_S)
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.2)

    def _counts(self) -> Counter[str]:
        """Bytes and segments since the last evening."""
        self._traffic.clear()
        asked = {worker.name: next(self._jobs) for worker in self.workers}
        for worker in self.workers:
            worker.ask("count", asked[worker.name])
        wait_for(lambda: set(asked.values()) <= self._told_traffic, "bytes told", SLOW_S, self._turn)
        return self._traffic

    def _count(self, name: str, told: dict[str, Any]) -> None:
        before = self._counted.get(name, {})
        for owner, counts in told["traffic"].items():
            for what, number in counts.items():
                self._traffic[what] += number - before.get(owner, {}).get(what, 0)
        self._counted[name] = told["traffic"]
        self._told_traffic.add(told["job"])

    def _bring_up_to_date(self) -> None:
        """Wake whoever is there until what stands is of the photos that it has, and it has the longer bundle."""
        self.operator.finish()
        until = time.monotonic() + LAST_S
        while True:
            _, self.held = compare_standing(self.plan.books, self.folder / "living.sqlite", self.naive, False)
            behind = [book for book in self.plan.books if self._is_there(book) and self._is_behind(book)]
            if not behind:
                return
            if time.monotonic() > until:
                names = ", ".join(book.name for book in behind[:5])
                raise StalledError(f"{len(behind)} devices are not up to date in {LAST_S:g} s, {names} among them")
            for book in behind[:AT_ONCE]:
                if not book.whole:
                    self._wake(book, 3.0)
            wait_for(self._asleep, "every device asleep", SLOW_S + 3.0, self._turn)

    def _is_there(self, book: Book) -> bool:
        return book.joins <= self.options.days <= book.leaves and not book.out

    def _is_behind(self, book: Book) -> bool:
        assert self.held is not None
        if not stands_as_photos(book, self.held, self.naive):
            return True
        if book is self.bad:
            return not self.signed.refused_new(book)
        return book.bundle != self.new and book.name not in self.plan.copied and not self.signed.runs_new(book)
