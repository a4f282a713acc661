"""The aggregator of a fleet without rounds, without its network: standing sums, ingest and the store.

    take:     a batch of messages → decide each → replace sums, and counters, in one transaction → decisions
    advance:  what is due: an operator's order, or a new head of all standing sums; durable before it is returned

The caller publishes what the coordinator returns, as with `aggregator/coordinators/round_coordinator.py`.

If the process dies anywhere, a new one on the same store adds up the stored sums: the same integers, in any order
(`aggregator/merging/exact_sums.py`). A digest tells whether the stored head was made of these sums. So a head that was
due is made after the restart.

Standing sums are exactly what all present devices sent. Unlike in rounds, no device is left out or counts for less.
`--max-samples` bounds how many samples one device may say it has, and FFC's sums must be those of unit features
(`aggregator/ingest/validation.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from protofleet.aggregator.coordinators.coordinator_core import Core
from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.aggregator.ingest.ingest import Decision, Ingest, View, largest_contribution_bytes
from protofleet.aggregator.ingest.validation import Terms
from protofleet.aggregator.merging.exact_sums import ExactSum, Standing
from protofleet.aggregator.merging.forgotten_classes import as_kept, had_sent, held_by, kept_of, left_of, with_class
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.monitoring.class_drift import moved
from protofleet.aggregator.rollout.rollout_stages import Moved
from protofleet.aggregator.rounds.presence import NoRounds, Presence
from protofleet.aggregator.settings import Settings, check_heads, check_limit, standing_method
from protofleet.aggregator.store.durable_store import OUTCOMES, DurableStore, as_written, global_parts
from protofleet.aggregator.store.operator_orders import FORGOTTEN, OF_A_CLASS, Obeyed
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import StandingMark, Tally
from protofleet.aggregator.store.standing_tables import WITHDREW, Stands, Taken, with_taken
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.fleet_compatibility import further_bundles
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Method
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Contribution, Receipt

__all__ = ["MAX_SAMPLES", "Solved", "StandingCoordinator"]

MAX_SAMPLES = 10_000_000  # of one device: its sums stay far below `protofleet.contract.sums.fixed_point.LARGEST`


@dataclass(frozen=True)
class _Head:
    """A global state, and what is told of its making."""

    state: GlobalState
    told: str
    doubt: str


@dataclass(frozen=True)
class Solved:
    """A new head was made of the standing sums. The caller publishes it."""

    version: int
    devices: int
    samples: int
    classes: int


class StandingCoordinator(Core):
    """One run of one fleet without rounds.

    Attributes:
        rounds: which devices are online, and when something is due. `aggregator/server/server.py` asks it as it asks
            rounds.
        told, doubt: which choices were made for the last head, and why it may be bad; empty for nothing.

    Args:
        store: a store of this mode, or a new one.
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        settings: with `standing_every_s`.
        shorter: the bundles of the same extractor that it extends: sha256 and number of classes.
        now: seconds of a steady clock, as in `take` and `advance`.
        wall: gives seconds since the epoch, to record when something came.

    Raises:
        UsageError: the settings do not fit the bundle, or the store is of rounds or of another method.
        StoreError: the store holds rows that no aggregator wrote.
    """

    def __init__(
        self,
        store: DurableStore,
        manifest: Manifest,
        bundle: bytes,
        settings: Settings,
        *,
        now: float,
        shorter: Mapping[bytes, int] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        assert settings.standing_every_s is not None
        self._method = standing_method(manifest, settings)
        check_heads(settings, (self.method.name,))
        check_limit(manifest, settings)
        if settings.max_samples > MAX_SAMPLES:
            raise UsageError(
                "--max-samples", expected=f"at most {MAX_SAMPLES:,} with --standing", got=settings.max_samples
            )
        super().__init__(store, manifest, bundle, settings, now=now, shorter=shorter)
        self._wall = wall
        self._settled, self._columns = self._hyper(self.method), self._width(self.method)
        self._claim()
        self._presence = Presence()
        self._ingest = Ingest(lambda round, method, device: False)
        self.told = self.doubt = ""
        self.standing = Standing(self._zero(), settings.standing_every_s)
        self._digests: dict[str, bytes] = {}  # of what stands, by device
        self._behind: dict[str, int] = {}  # for how many devices each gateway stands
        self._untold: list[Decision] = []
        with as_written(self._tables.path):
            self._resume(now)
        self.rounds = NoRounds(self._presence, self._due_in_s)

    def _claim(self) -> None:
        """A store has rounds or standing sums, of one method, and never both."""
        stored_method = self._store.meta.get("standing")
        rounds = self._store.last_round()
        if stored_method != self.method.name and (stored_method is not None or rounds):
            raise UsageError(
                "--standing",
                expected=f"a store of standing sums of {self.method.name}, or a new one",
                got=f"one of {stored_method}" if stored_method else f"one with {rounds} rounds",
                hint="another --store",
            )
        if stored_method is None:
            self._store.meta.put("standing", self.method.name)

    def _resume(self, now: float) -> None:
        """Add up what stands."""
        self.standing.generations = self._tables.generations()
        self.standing.paused = self._store.meta.get("paused") == "yes"
        for device, payload in self._tables.payloads():
            message = held_by(payload)
            self.standing.total = self.standing.total.add(self._exact_of(message))
            self.standing.present.add(device)
            self._behind[device] = message.devices
            self._digests[device] = digest_of(payload)
        if self._store.meta.get("standing solved") != self._digest() and (self.standing.present or self.state.version):
            self.standing.changed(now)

    # ── what the server asks ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def method(self) -> Method:
        """The method whose sums stand."""
        return self._method

    @property
    def largest_message_bytes(self) -> int:
        """The largest useful message."""
        return max(self.limit_bytes, largest_contribution_bytes(self._view()))

    @property
    def is_finished(self) -> bool:
        """Always false: standing sums have no end."""
        return False

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        """What every device should know now; see `Coordinator.announcement`."""
        return Announcement(
            run=self.run,
            round=0,
            phase="standing",
            method=self.method.name,
            bundle=self._bundle,
            global_version=self.state.version,
            encoding=self._encoding,
            min_samples=self._settings.min_samples,
            limit_bytes=self.limit_bytes if limit_bytes is None else limit_bytes,
            others=further_bundles((), self._shorter),
            extractor=self._extractor,
            class_lists=self._lists.digests,
            offer=self.rollouts.offer,
            withheld=self._withheld,
            epoch=self._store.epoch,
            max_samples=self._settings.samples_told,
        )

    def status(self, device: str, payload: bytes, now: float, *, is_ours: bool = False, is_news: bool = True) -> bool:
        """Take a device's birth or death; returns whether it changed who is online.

        A message that is no status is counted and answered.
        """
        message = self._read_status(device, payload, is_ours=is_ours, is_news=is_news)
        if message is None:
            return False
        note = self._presence.birth if message.online else self._presence.death
        changed = note(device, message.instance)
        if changed and message.online:
            self._tell(device)
            self._tell_held(device)
        return changed

    def _tell_held(self, device: str) -> None:
        """Tell a device with an older copy of its state directory that newer sums are held.

        This helps also when its samples are those of the older copy. The receipt's round is no generation, so for any
        other device it means nothing.
        """
        mark = self._mark_of(device)
        if mark.digest and not self._refusal(device):
            receipt = Receipt(self.run, MAX_ROUND, self.method.name, "late", held=mark.generation)
            self._untold.append(Decision(device, receipt.status, 0, receipt))

    def _tell(self, device: str) -> None:
        """See to it that a device of which nothing stands any more learns it, and whether it may send again: what it
        sent last had a receipt, so it would wait for photos to change."""
        mark = self._mark_of(device)
        lacks = self._taken.get("", {}).get(device) == mark.generation  # rows of a class that is admitted again
        if not mark.generation or (mark.digest and not lacks):
            return
        refusal = self._refusal(device)
        receipt = Receipt(
            self.run,
            mark.generation,
            self.method.name,
            "rejected" if refusal else "late",
            refusal[:200],
            held=0 if refusal else mark.generation,
        )
        self._untold.append(Decision(device, receipt.status, 0, receipt, reason=refusal))

    def stalled(self, now: float) -> list[Decision]:
        """The questions to devices whose chunks have stopped coming, and the receipts for devices taken out."""
        untold, self._untold = self._untold, []
        return untold + self._ingest.stalled(now, self._view(), self._presence.is_online)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """Decide on (device, payload) messages and make the accepted ones durable.

        Receipts may be sent after the return.

        Raises:
            StoreError: the disk refuses; then nothing was committed, nothing may be acknowledged, and this object can
                no longer be used.
        """
        view = self._view()
        decisions, newer, taken = [], dict[str, tuple[Stands, Contribution]](), Taken()
        for name, sent in batch:
            decision = self._ingest.decide(name, sent, view, now)
            decisions.append(decision)
            accepted = decision.accepted
            if accepted is None:
                continue
            assert accepted.message is not None
            withdrawn = accepted.message.standing == "withdrawn"
            if withdrawn:  # what follows it in this batch is refused
                self._refused[name] = WITHDREW
            payload, received_bytes = (None, 0) if withdrawn else (accepted.payload, accepted.received_bytes)
            newer[name] = Stands(name, accepted.round, payload, received_bytes), accepted.message
            for number in accepted.without:
                taken = with_taken(taken, self._manifest.labels[number], {name: accepted.round})
        tally = self._uncounted + Counter((0, d.outcome) for d in decisions if d.outcome in OUTCOMES)
        if newer or tally:
            self._keep(list(newer.values()), tally, taken, now)
        self._uncounted.clear()
        self._ingest.forget_accepted()
        return decisions

    def _keep(self, newer: Sequence[tuple[Stands, Contribution]], tally: Tally, more: Taken, now: float) -> None:
        """Make a batch durable; `more` is what is to be added to `classes_taken`."""
        for stands, message in newer:
            former = self._tables.payload(stands.device)
            self._replace(stands.device, stands.generation, former, stands.payload, message, now)
        taken = self._taken
        for name, generations in more.items():
            taken = with_taken(taken, name, generations)
        self._tables.commit([stands for stands, _ in newer], tally, self._wall(), taken if more else None)
        self._taken = taken

    def _replace(
        self,
        device: str,
        generation: int,
        former: bytes | None,
        payload: bytes | None,
        message: Contribution | None,
        now: float,
    ) -> None:
        """What is held of a device changes in the total, from `former` to `payload`, which is `message`."""
        former_message = None if former is None else held_by(former)
        self._behind[device] = 0 if message is None else message.devices
        self._digests[device] = b"" if payload is None else digest_of(payload)
        newer = None if payload is None or message is None else message
        self.standing.replace(
            device,
            generation,
            None if former_message is None else self._exact_of(former_message),
            None if newer is None else self._exact_of(newer),
            now,
        )
        if former_message is not None and newer is not None and not (former_message.devices or newer.devices):
            self.class_drift.hear(
                device, moved(self._sums_of(former_message), self._sums_of(newer)), self._manifest.labels
            )

    def _view(self) -> View:
        return View(
            run=self.run,
            bundle=self._bundle,
            classes=self._manifest.classes,
            width=self._columns,
            round=0,
            method=self.method.name,
            open=True,
            limit_bytes=self._settings.limit_bytes,
            terms=Terms(
                encoding=self._encoding,
                min_samples=self._settings.min_samples,
                max_samples=self._settings.max_samples,
                extractor=self._extractor,
                standing=True,
                lists=self._lists,
                withheld=self._withheld,
            ),
            refusal=self._refusal,
            opened=self._opened,
            held=self._mark_of,
            gateways=self._settings.gateways,
        )

    def _mark_of(self, device: str) -> StandingMark:
        return StandingMark(self.standing.held(device), self._digests.get(device, b""))

    # ── what is due ─────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float, wall: float) -> Solved | Obeyed | Moved | None:
        """Do the next due step or order, durably, and return it; None when nothing is due.

        Args:
            wall: seconds since the epoch, for the record.
        """
        order = None if self.closing.has_work else self._next_order(now)  # it waits until the head is recorded
        if order is not None:
            return self._obey(order, now, wall)
        moved = self.rollouts.advance(wall)
        if moved is not None:
            return moved
        return self._head(now)

    def _head(self, now: float) -> Solved | None:
        """A new head of what stands when it is due; what comes while it is made is in the next."""
        if self.standing.due(now) and not self.closing.has_work:
            self.standing.solved(now)
            self._solve()
        return self.closing.step()

    def _due_in_s(self, now: float) -> float:
        """Seconds until a head is due, or the next look for orders."""
        wait_s, orders_s = self.standing.due_in_s(now), max(0.0, self._orders_at - now)
        return orders_s if wait_s is None else min(wait_s, orders_s)

    def _solve(self) -> None:
        """Begin to make a head of what stands now."""
        solver, total, devices = self._solver(), self.standing.total, self.devices

        def work() -> Callable[[], Solved]:
            head, digest, counts = solver(), self._digest_of(total), total.counts

            def record() -> Solved:
                self._tables.solved(global_parts(head.state), digest)
                self.state, self.told, self.doubt = head.state, head.told, head.doubt
                return Solved(head.state.version, devices, int(counts.sum()), int((counts > 0).sum()))

            return record

        self.closing.begin(work)

    @property
    def devices(self) -> int:
        """How many devices have standing sums. Devices behind gateways count, the gateways do not."""
        return sum(self._behind.get(device, 0) or 1 for device in self.standing.present)

    def _solver(self) -> Callable[[], _Head]:
        """Makes the head of what stands now, whenever it is called; nothing of the one before stays in it."""
        method, total, columns, settled = self.method, self.standing.total, self._columns, self._settled
        empty = replace(self.state, rows={})

        def make() -> _Head:
            merged = total.statistic(method.statistic, columns)
            state = next_global(empty, method, merged, round=empty.version + 1, hyper=settled)
            return _Head(state, method.told(merged, settled), method.doubt(merged, settled))

        return make

    def _next(self) -> GlobalState:
        """The global state of what stands now, at once."""
        head = self._solver()()
        self.told, self.doubt = head.told, head.doubt
        return head.state

    def _obey(self, order: Order, now: float, wall: float) -> Obeyed:
        before, wrong = self.state.version, self._unfit(order)
        if order.what in ("forget", "withdraw") and not wrong:
            outcome = self._take_out(order, now, wall)
        elif order.what in OF_A_CLASS and not wrong:
            forgets = order.what == "forget class"
            outcome = self._forget_class(order, now, wall) if forgets else self._admit_class(order, wall)
        else:
            outcome = wrong or self._carry_out_standing(order, wall)
            self._store.orders.done(order, wall, outcome, before, before)
        if not wrong and order.what in ("forget", "admit"):
            self._tell(order.device)
        return Obeyed(order, outcome, self.state.version)

    def _take_out(self, order: Order, now: float, wall: float) -> str:
        """Remove all that is held of a device; what comes back is of what remains, at once and also while paused."""
        device, before = order.device, self.state.version
        stands = device in self.standing.generations
        payload = self._tables.payload(device)
        if payload is not None:
            self.standing.replace(device, self.standing.held(device), self._exact(payload), None, now)
            self._digests.pop(device)
        state, parts, digest = self._anew()
        reason = WITHDREW if order.what == "withdraw" else FORGOTTEN
        outcome = "done" if stands else "done: nothing was held of it"
        self._tables.take_out(
            order,
            parts,
            digest,
            at=wall,
            before=before,
            after=state.version,
            reason=reason,
            outcome=outcome,
        )
        self.state = state
        self.standing.solved(now)
        self._refused[device] = reason
        self._store.drift.forget(device)
        self._store.policies.forget(device)
        self.class_drift.look()
        self.rollouts.forget(device)
        self._orders_at = now  # there may be more, and what the log holds of it is to be overwritten
        return outcome

    def _forget_class(self, order: Order, now: float, wall: float) -> str:
        """Take a class out of all that stands; what comes back is of what remains, at once and also while paused."""
        number, before, holders = self._manifest.labels.index(order.detail), self.state.version, []
        for device in sorted(self.standing.present):
            message = held_by(self._payload(device))
            if not message.holds((number,)):
                continue
            reduced = left_of(message, (number,))
            newer = None if reduced is None else self._exact_of(reduced)
            self.standing.replace(device, self.standing.held(device), self._exact_of(message), newer, now)
            self._digests[device] = b"" if reduced is None else digest_of(as_kept(reduced))
            holders.append(device)
        state, parts, digest = self._anew()
        whole = "until those devices send again without it" if self.method.statistic.has_triangle() else ""
        taken = with_taken(self._taken, order.detail, {device: self.standing.held(device) for device in holders})
        outcome, forgotten = had_sent(holders, whole=whole), with_class(self._forgotten, order.detail)
        self._tables.class_done(
            order,
            forgotten,
            taken,
            ((device, kept_of(self._payload(device), number)) for device in holders),
            parts,
            digest,
            at=wall,
            before=before,
            after=state.version,
            outcome=outcome,
        )
        self.state, self._forgotten, self._taken = state, forgotten, taken
        self.class_drift.look()
        self.standing.solved(now)
        self._orders_at = now
        return outcome

    def _admit_class(self, order: Order, wall: float) -> str:
        """As without standing sums; whose rows were taken out is told that they do not count, if it has not heard."""
        outcome = super()._admit_class(order, wall)
        for device in self.standing.generations:
            if self._presence.is_online(device):
                self._tell(device)
        return outcome

    def _anew(self) -> tuple[GlobalState, list[tuple[int, int, bytes]], str]:
        """The global state of what stands now, its parts for the store, and the digest of what it is made of; no parts
        where it is as it was."""
        digest = self._digest()
        changed = self._store.meta.get("standing solved") != digest and (self.state.version or self.standing.present)
        state = self._next() if changed else self.state
        return state, global_parts(state) if changed else [], digest

    def _carry_out_standing(self, order: Order, wall: float) -> str:
        """The orders that change no sum."""
        outcome = self._carry_out(order, wall)
        self.standing.paused = self._store.meta.get("paused") == "yes"
        instead = "; forget DEVICE makes the head as if it had never been there" if order.what == "rollback" else ""
        return outcome or f"refused: {order.what} is for rounds, and sums stand here{instead}"

    # ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _zero(self) -> ExactSum:
        return ExactSum.zero(self.method.statistic, self._manifest.classes, self._columns)

    def _payload(self, device: str) -> bytes:
        """What stands of a device, of which something does."""
        payload = self._tables.payload(device)
        assert payload is not None
        return payload

    def _exact(self, payload: bytes) -> ExactSum:
        return self._exact_of(held_by(payload))

    def _exact_of(self, message: Contribution) -> ExactSum:
        return ExactSum.sent_in(message, self.method.statistic, self._manifest.classes, self._columns)

    def _sums_of(self, message: Contribution) -> Statistic:
        return message.statistic(self.method.statistic, self._manifest.classes, self._columns)

    def _digest(self) -> str:
        """Of what a global state is made of: what stands, and the settings that it is solved with."""
        return self._digest_of(self.standing.total)

    def _digest_of(self, total: ExactSum) -> str:
        settings = repr(sorted(self._settled.items()))
        return hashlib.sha256(f"{total.digest()} {settings}".encode()).hexdigest()
