"""The aggregator without its network: rounds, ingest, merging and the store, joined in the order that keeps promises.

    take:     a batch of messages → decide each → commit the accepted ones in one transaction → decisions
    advance:  what is due: open a round, extend it, or close it

A round closes in three parts. Only the second is long (`aggregator/coordinators/background_work.py`,
docs/decisions/166):

    1. Late contributions stand in. The store records that the round is being closed: from then on nobody adds to it.
    2. The contributions are streamed from the store, compared and merged. The next global state is made.
    3. If the store still holds the same contributions, result and state are recorded in one transaction.

The caller publishes what the coordinator returns: receipts for decisions, and after a step an announcement and the
global state.

If the process dies anywhere, a new coordinator on the same store continues at the same place: an open round is open
with the promised contributions, and nothing is counted a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from protofleet.aggregator.coordinators.coordinator_core import Core
from protofleet.aggregator.coordinators.forgetting import Remaking, state_without, state_without_class
from protofleet.aggregator.coordinators.joint_heads import META, JointHead, joint_head
from protofleet.aggregator.coordinators.late_contributions import LateContributions
from protofleet.aggregator.coordinators.rollback import roll_back
from protofleet.aggregator.database import Connection
from protofleet.aggregator.ingest.ingest import Decision, Ingest, View, largest_contribution_bytes
from protofleet.aggregator.ingest.validation import Terms
from protofleet.aggregator.merging.forgotten_classes import (
    cannot_forget,
    emptied,
    had_sent,
    held_by,
    kept_of,
    with_class,
)
from protofleet.aggregator.merging.merge_round import RoundEnd, Some, merge_round, traits_of
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.monitoring.accuracy import AccuracyReport, FleetAccuracy, fleet_accuracy
from protofleet.aggregator.rollout.rollout_stages import Moved
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES, Closed, Opened, Rounds, Step, plan
from protofleet.aggregator.screening.outliers import Finding, Screening, Suspects, Traits
from protofleet.aggregator.settings import Settings, check_gateways, check_heads, check_limit, own_method
from protofleet.aggregator.store.blinded_tables import check_open_round
from protofleet.aggregator.store.durable_store import (
    OUTCOMES,
    Store,
    as_written,
    contributions,
    devices_of,
    global_parts,
)
from protofleet.aggregator.store.meta_table import put_meta
from protofleet.aggregator.store.operator_orders import FORGOTTEN, OF_A_CLASS, Obeyed
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import Key, RoundRecord
from protofleet.contract.accuracy import read_accuracy
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.fleet_compatibility import further_bundles
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Method
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import check_rule
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.joint_heads import JOINT
from protofleet.contract.wire.messages import Announcement, Chunk, Contribution, Receipt, Status

__all__ = ["Coordinator", "Settings"]

CONTRADICTS_S = 15.0  # after a death of an enrolled device that is awaited: one that lives says so within ten
SETTLE_S = 2.0  # retained births arrive right after the subscription; devices that must reconnect take longer


class Coordinator(Core):
    """One run of one fleet.

    Attributes:
        findings: about devices whose contribution to the last closed round does not count, or counts in part.
        doubt: why the head of the last closed round may be bad; empty when nothing speaks against it.
        told: which choices were made for the last closed round's result, in words.
        verdicts: the receipts for devices that were ever left out, by name: whether they count in the newest closed
            round that they took part in.
        accuracy_batches: how often accuracy reports became durable.

    Args:
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        others: sha256 of further bundles that agree with it, as checked by
            `protofleet.contract.bundle.fleet_compatibility`.
        shorter: the bundles of the same extractor that it extends: sha256 and number of classes.
        now: seconds of a steady clock, as in `take` and `advance`.
        wall: seconds since the epoch, to know how long ago a round was opened; None as if it was opened just now.

    Raises:
        UsageError: the settings do not fit the bundle.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        bundle: bytes,
        settings: Settings,
        *,
        now: float,
        others: tuple[bytes, ...] = (),
        shorter: Mapping[bytes, int] | None = None,
        wall: float | None = None,
    ) -> None:
        mode = store.meta.get("standing")
        if mode is not None:
            raise UsageError(
                "this store", expected="one of rounds, or a new one", got=f"standing sums of {mode}", hint="--standing"
            )
        first_method = method_of(own_method(manifest, settings))
        rounds = first_method.rounds if settings.rounds is None else settings.rounds
        methods = plan(first_method.name, rounds, settings.calibrate)
        shared = next((m for m in map(method_of, methods) if m.extractor == "bundle"), None)
        if others and shared is not None:
            raise UsageError(
                f"a round of {shared.title}",
                expected="one backbone",
                got=f"{1 + len(others)} bundles",
                hint="--no-calibrate",
            )
        check_heads(settings, methods)
        check_rule(settings.rule, method_of(methods[0]).statistic)
        check_limit(manifest, settings)
        check_gateways(settings, manifest, methods)
        super().__init__(store, manifest, bundle, settings, now=now, shorter=shorter)
        self._others = others
        self.rounds = self._machine(methods)
        self._traits: dict[str, Traits] = {}  # of the open round's contributions, as far as this process took them
        self.findings: tuple[Finding, ...] = ()
        self.doubt, self.told = "", ""
        self._ingest, self._late_contributions = Ingest(self._is_stored, patient=store.shared), LateContributions()
        self._doubted: dict[str, tuple[bytes, float]] = {}  # deaths of who is awaited, and from when on they are true
        self._told_accuracy: dict[tuple[int, str], AccuracyReport] = {}  # not durable yet
        self.accuracy_batches = 0
        self._paused = self._store.meta.get("paused") == "yes"
        self._resume(now, wall)
        self.verdicts: Mapping[str, Receipt] = self._store.verdicts()
        self._leave: set[str] = set()  # whose owners allow a joint head
        self.joint: JointHead | None = None
        with as_written(self._tables.path):
            joint_text = self._store.meta.get(META)
            self.joint = JointHead.read(joint_text, store.run) if joint_text else None
        with as_written(self._tables.path):
            check_open_round(store.blinded, self.rounds, blinded=settings.helper is not None)

    def _machine(self, methods: tuple[str, ...]) -> Rounds:
        """When rounds open and close."""
        return Rounds(methods, self._settings.policy, always=self._settings.gateways)

    @property
    def largest_message_bytes(self) -> int:
        """The largest useful message. A contribution that was made for a larger limit is still taken whole."""
        methods = {*self.rounds.plan, *(record.method for record in self._newest_round())}
        views = [replace(self._view(), method=name, width=self._width(method_of(name))) for name in methods]
        return max([self.limit_bytes, *map(largest_contribution_bytes, views)])

    @property
    def method(self) -> Method:
        """The method of the current round."""
        return method_of(self.rounds.method)

    @property
    def is_finished(self) -> bool:
        """Whether the store already holds every planned round."""
        return self.rounds.phase == "waiting" and self.rounds.is_done

    def record(self, round: int) -> RoundRecord:
        """What the store knows of a round that was opened."""
        return self._store.record(round)

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        """What every device should know now.

        Args:
            limit_bytes: the largest message that both the broker and this aggregator take; None for the limit of
                this aggregator.
        """
        rounds, settings = self.rounds, self._settings
        return Announcement(
            run=self.run,
            round=rounds.number,
            phase="closed" if rounds.phase == "waiting" or rounds.held else rounds.phase,
            method=rounds.method,
            bundle=self._bundle,
            deadline_s=settings.policy.limit_s,
            fraction=settings.policy.fraction,
            seed=rounds.seed,
            global_version=self.state.version,
            encoding=self._encoding,
            min_samples=settings.min_samples,
            limit_bytes=settings.limit_bytes if limit_bytes is None else limit_bytes,
            others=further_bundles(self._others, self._shorter),
            extractor=self._extractor,
            class_lists=self._lists.digests if self._extractor else (),
            offer=self.rollouts.offer,
            withheld=self._withheld,
            epoch=self._store.epoch,
            max_samples=settings.samples_told,
        )

    def status(self, device: str, payload: bytes, now: float, *, is_ours: bool = False, is_news: bool = True) -> bool:
        """Take a device's birth or death; returns whether it changed who is online.

        A message that is no status is counted and answered.
        """
        message = self._read_status(device, payload, is_ours=is_ours, is_news=is_news)
        if message is None:
            return False
        self._hear_accuracy(device, message)
        news = 0.0 if device in self._refused else message.metrics.get("samples_new", 0.0)
        self.rounds.schedule.heard(device, news)
        self._hear_leave(device, message)
        if message.online:
            self._doubted.pop(device, None)
            self.rounds.leaves_out(device, is_apart=device in self._apart, now=now)
            return self.rounds.birth(device, message.instance, now)
        if device in self.gate.enrolled and self.rounds.awaits(device):
            self._doubted.setdefault(device, (message.instance, now + CONTRADICTS_S))
            return False
        return self.rounds.death(device, message.instance)

    def verdict(self, device: str) -> Receipt | None:
        return self.verdicts.get(device)

    def _hear_leave(self, device: str, message: Status) -> None:
        """Whether a device's owner allows a joint head; a last will says nothing of it."""
        if not message.versions:
            return
        if JOINT not in message.versions:
            self._leave.discard(device)
            self._end_joint(device)
        elif len(self._leave) < MAX_DEVICES:
            self._leave.add(device)

    def _end_joint(self, device: str | None = None) -> None:
        """The joint head is no longer given: that of this device, or any.

        Raises:
            StoreError: the disk refuses.
        """
        if self.joint is not None and (device is None or device in self.joint.members):
            self._store.meta.put(META, "")
            self.joint = None

    def joint_of(self, device: str) -> JointHead | None:
        """The joint head for a left-out device, made of the devices that agree with it; None when there is none."""
        verdict, joint = self.verdicts.get(device), self.joint
        if joint is None or verdict is None or verdict.counts or device not in joint.members or device in self._refused:
            return None
        return joint if (verdict.round, verdict.run) == (joint.state.round, joint.state.run) else None

    def _hear_accuracy(self, device: str, message: Status) -> None:
        """What a birth says of the device's accuracy after a round of this run; kept with the next batch."""
        reported = read_accuracy(message.metrics, self.run, max_samples=self._settings.max_samples)
        if reported is not None and self._store.awaits_accuracy(reported[0], device):
            self._told_accuracy.setdefault((reported[0], device), AccuracyReport(reported[0], device, reported[1]))

    def accuracy(self, round: int) -> FleetAccuracy | None:
        """The accuracy that devices reported after a round; None when none did."""
        return fleet_accuracy(self._store.accuracy(round))

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """Decide on (device, payload) messages and make the accepted ones durable.

        Receipts may be sent after the return.

        Raises:
            StoreError: the disk refuses; then nothing was committed, and nothing may be acknowledged.
        """
        view = self._view()
        decisions = [self._ingest.decide(device, payload, view, now) for device, payload in batch]
        keeps_late = self.rounds.policy.stays and not self._store.shared  # another process may close the round
        for decision, (_, payload) in zip(decisions, batch if keeps_late else (), strict=False):
            self._late_contributions.hear(decision, payload, view)
        refused = [d for d in decisions if d.outcome == "rejected" and _answers(d, view)]
        tally = self._uncounted + Counter((d.round, d.outcome) for d in decisions if d.outcome in OUTCOMES)
        accepted = [d.accepted for d in decisions if d.accepted is not None]
        stored_elsewhere: Collection[Key] = ()
        if accepted or tally:
            stored_elsewhere = self._store.commit(accepted, tally, [(d.round, d.device) for d in refused])
        self._uncounted.clear()
        if stored_elsewhere:
            decisions = [self._known_elsewhere(decision, stored_elsewhere) for decision in decisions]
            accepted = [d.accepted for d in decisions if d.accepted is not None]
        if self._told_accuracy:
            self._store.keep_accuracy(list(self._told_accuracy.values()))
            self._told_accuracy.clear()
            self.accuracy_batches += 1
        self._ingest.forget_accepted()
        for decision in decisions:
            if decision.outcome != "malformed" and decision.cause != "intruder":
                self.rounds.heard(decision.device, now)
        for contribution in accepted:
            self.rounds.contributed(contribution.device)
        self._traits |= {d.device: d.traits for d in decisions if d.traits is not None}
        for decision in refused:
            self.rounds.refused(decision.device)
        return decisions

    def _known_elsewhere(self, decision: Decision, stored_elsewhere: Collection[Key]) -> Decision:
        """What another process has committed meanwhile is a duplicate here."""
        accepted = decision.accepted
        if accepted is None or (accepted.round, accepted.method, accepted.device) not in stored_elsewhere:
            return decision
        assert decision.receipt is not None
        self.rounds.contributed(decision.device)
        self._uncounted[(decision.round, "duplicate")] += 1
        receipt = replace(decision.receipt, status="duplicate")
        return replace(decision, outcome="duplicate", receipt=receipt, accepted=None, traits=None)

    def learn(self) -> bool:
        """Read what other processes committed to the open round; returns whether that was anything.

        Raises:
            StoreError: the server refuses.
        """
        rounds = self.rounds
        if rounds.phase != "open":
            return False
        devices, refused = self._store.taken(rounds.number, rounds.method)
        newer = [device for device in devices if device not in rounds.contributions]
        for device in newer:
            rounds.contributed(device)
        for device in refused:
            rounds.refused(device)
        return bool(newer)

    def decide_again(self) -> None:
        """Forget the last decisions: they were not committed."""
        self._ingest.forget_accepted()

    def chunk_of(self, device: str, payload: bytes) -> Chunk | None:
        """The chunk of a contribution that may still count; None for any other message."""
        return self._ingest.chunk_of(device, payload, self._view())

    def stalled(self, now: float) -> list[Decision]:
        """The questions to devices whose chunks have stopped coming."""
        is_online = (lambda device: True) if self._store.shared else self.rounds.is_online  # who leads hears of it
        return self._ingest.stalled(now, self._view(), is_online)

    def advance(self, now: float, wall: float) -> Step | Obeyed | Moved | None:
        """Do the next due step or an operator's order, durably, and return it; None when nothing is due.

        Args:
            wall: seconds since the epoch, for the record.
        """
        for device, (instance, due_at) in list(self._doubted.items()):
            if now >= due_at:
                del self._doubted[device]
                self.rounds.death(device, instance)
        order = self._next_order(now)
        if order is not None:
            with self._store.alone():
                return self._obey(order, wall)
        moved = self.rollouts.advance(wall)
        if moved is not None:
            return moved
        if self._paused and self.rounds.phase == "waiting" and not self.is_finished:
            return None
        return self._step(now, wall)

    def _next_order(self, now: float) -> Order | None:
        """What changes what is summed, or what comes of it, waits until a round that is being closed is recorded."""
        return None if self.closing.has_work or self._is_left else super()._next_order(now)

    @property
    def _is_left(self) -> bool:
        """Whether a process that has gone has begun to close the round."""
        return self.rounds.held

    def _step(self, now: float, wall: float) -> Step | None:
        """What rounds themselves make due, done and durable."""
        if self.closing.has_work:
            return self.closing.step()
        if self._is_left:
            self._close(wall)
            return self.closing.step()
        step = self.rounds.advance(now)
        if isinstance(step, Opened):
            self._store.open_round(step.round, step.method, step.seed, wall)
            self._traits.clear()
        elif isinstance(step, Closed):
            self.rounds.hold()
            with self._store.alone():  # who commits beside it comes before this, or late
                self._let_stand_in(step)
                self._store.begin_close(step.round)
            self._close(wall)
            return self.closing.step()
        return step

    def _close(self, wall: float) -> None:
        """Begin to merge the round that is held, as the store has it."""
        number, method, known_traits = self.rounds.number, self.method, dict(self._traits)
        hyper, make = self._hyper(method), self._maker(method)

        def work() -> Callable[[], Closed | None]:
            with self._store.snapshot() as db:
                devices = devices_of(db, number, method.name)

                def messages(only: Collection[str] = frozenset(devices)) -> Iterator[tuple[str, Contribution]]:
                    stored, wanted_devices = contributions(db, number, method.name), frozenset(only)
                    with as_written(self._tables.path):  # a contribution that is counted has its bytes
                        for device, (_, payload) in zip(devices, stored, strict=True):
                            self.closing.go_on()
                            if device in wanted_devices:
                                yield device, held_by(payload)

                # some were taken before a restart, or by others
                traits = known_traits if known_traits.keys() >= set(devices) else traits_of(method, messages, hyper)
                result = make(messages, {device: traits[device] for device in devices})
            return lambda: self._record(devices, result, wall)

        self.closing.begin(work)

    def _maker(self, method: Method) -> Callable[[Some, Mapping[str, Traits]], RoundEnd]:
        """Makes what the held round comes to of what devices sent, and of nothing that changes meanwhile."""
        number, before, rule = self.rounds.number, self.state, self._settings.rule
        hyper, screening, leave, run = self._hyper(method), self._screening(method), frozenset(self._leave), self.run
        classes, width, labels = self._manifest.classes, self._width(method), self._manifest.labels

        def make(messages: Some, traits: Mapping[str, Traits]) -> RoundEnd:
            result = merge_round(
                method,
                lambda: messages(traits),
                traits,
                hyper,
                classes=classes,
                width=width,
                rule=rule,
                how=screening,
                labels=labels,
                some=messages,
            )
            state = next_global(before, method, result.merged, round=number, hyper=hyper)
            joint = joint_head(
                method, messages, traits, hyper, result, leave, run=run, round=number, classes=classes, width=width
            )
            return RoundEnd(
                int(result.merged.present.sum()),
                state,
                screening,
                result.findings,
                result.doubt,
                result.told,
                joint="" if joint is None else joint.written(),
            )

        return make

    def _record(self, devices: list[str], result: RoundEnd, wall: float) -> Closed | None:
        """The held round's result, durable; None where the store has other contributions by now: then all again."""
        number, method = self.rounds.number, self.rounds.method

        def also(db: Connection) -> None:
            self._store.blinded.replaced(db, method)
            put_meta(db, META, result.joint)

        with self._store.alone():
            merged_all = devices == list(self._store.record(number).uplink_bytes)
            if merged_all:
                self._store.close_round(
                    number,
                    wall,
                    result.classes,
                    result.state,
                    result.screening,
                    result.findings,
                    also=also,
                )
        if not merged_all:
            self._close(wall)
            return None
        self.state = result.state
        self.findings, self.doubt, self.told = result.findings, result.doubt, result.told
        self.verdicts = self._store.verdicts()
        self.joint = JointHead.read(result.joint, self.run) if result.joint else None
        for device in () if self.joint is None else set(self.joint.members) - self._leave:
            self._end_joint(device)  # it took its leave back meanwhile
        return self.rounds.end()

    def _obey(self, order: Order, wall: float) -> Obeyed:
        before, wrong = self.state.version, self._unfit(order)
        if order.what == "forget" and not wrong:
            outcome = self._forget(order, wall)
        elif order.what == "rollback" and not wrong:
            outcome = self._roll_back(order, wall)
        elif order.what in OF_A_CLASS and not wrong:
            change = self._forget_class if order.what == "forget class" else self._admit_class
            outcome = change(order, wall)
        else:
            outcome = wrong or self._carry_out(order, wall) or self.rounds.steer(order.what)
            if order.device in self._refused:
                self._late_contributions.forget(order.device)
                self.rounds.schedule.heard(order.device, 0.0)
            self._paused = self._store.meta.get("paused") == "yes"
            self._store.orders.done(order, wall, outcome, before, before)
        return Obeyed(order, outcome, self.state.version)

    def _forget(self, order: Order, wall: float) -> str:
        """Remove all that is held of a device, and make anew what it may be in."""
        device, records = order.device, self._store.rounds()
        self._end_joint(device)
        self._leave.discard(device)
        blinded = self._store.blinded.sums()  # whose parts nobody has
        remade = [record for record in records if record.method not in blinded and self._has_result(record)]
        state = self._without(device, remade)
        parts = [] if state is self.state else global_parts(state)
        before, after = self.state.version, state.version
        trained = sorted({r.method for r in records if device in r.uplink_bytes and method_of(r.method).trains})
        outcome = f"done, but for what devices trained in rounds of {', '.join(trained)}" if trained else "done"
        outcome += self._still_in(device, records)
        self._tables.take_out(
            order, parts, None, at=wall, before=before, after=after, reason=FORGOTTEN, outcome=outcome
        )
        self.state = state
        self._refused[device] = FORGOTTEN
        self._traits.pop(device, None)
        self.verdicts = self._store.verdicts()
        self._late_contributions.forget(device)
        self._store.drift.forget(device)
        self._store.policies.forget(device)
        self.rollouts.forget(device)
        self.rounds.schedule.heard(device, 0.0)
        self.rounds.contributions.discard(device)
        self.rounds.refused(device)
        return outcome

    def _has_result(self, record: RoundRecord) -> bool:
        """Whether something came of a round: nothing is kept of a blinded one that closed without a result."""
        was_summed = record.classes_merged or not (record.closed and record.uplink_bytes)
        return bool(was_summed) or next(self._store.contributions(record.number, record.method), None) is not None

    def _still_in(self, device: str, records: list[RoundRecord]) -> str:
        """Where a device stays in a sum that it cannot be taken out of, as part of an outcome."""
        blinded = self._store.blinded.sums().values()
        summed = [str(n) for n in blinded if any(n == r.number and device in r.uplink_bytes for r in records)]
        return f"; the sum of round {', '.join(summed)} has it until one without it is opened" if summed else ""

    def _without(self, device: str, records: list[RoundRecord]) -> GlobalState:
        return state_without(device, self.state, records, self._messages, self._remaking)

    def _roll_back(self, order: Order, wall: float) -> str:
        """Make what devices had before the last rounds what they get now."""
        self._end_joint()
        back = roll_back(self._store, order, self.state, wall)
        self.state = back.state
        return back.outcome

    @property
    def _remaking(self) -> Remaking:
        rule = self._settings.rule
        return Remaking(self._hyper, self._manifest.classes, self._width, rule, self._screening)

    def _unfit(self, order: Order) -> str:
        if order.what != "forget class":
            return super()._unfit(order)
        if self._store.blinded.sums():
            return "refused: a class cannot be taken out of a blinded round's sum, try a new --store without it"
        methods = {*self.rounds.plan, *(record.method for record in self._store.rounds())}
        return cannot_forget(methods) or super()._unfit(order)

    def _forget_class(self, order: Order, wall: float) -> str:
        """Take a class out of all that is kept of rounds, and make anew what it may be in."""
        number, before = self._manifest.labels.index(order.detail), self.state.version
        self._end_joint()
        payloads = self._tables.round_payloads()
        affected = {stored: key for stored, key, payload in payloads if held_by(payload).holds((number,))}
        holders = set(affected.values())
        state = self._without_class(number, holders)
        whole = {key for key in holders if method_of(key[1]).statistic.has_triangle()}
        outcome = had_sent({device for _, _, device in holders}, whole="until the next round" if whole else "")
        forgotten = with_class(self._forgotten, order.detail)
        self._tables.class_done(
            order,
            forgotten,
            {},
            ((stored, self._left_of_round(stored, key[0], number)) for stored, key in affected.items()),
            [] if state is self.state else global_parts(state),
            at=wall,
            before=before,
            after=state.version,
            outcome=outcome,
        )
        self.state, self._forgotten = state, forgotten
        self._late_contributions.clear()
        self._traits.clear()  # read again of what is left
        return outcome

    def _without_class(self, number: int, holders: Collection[Key]) -> GlobalState:
        rounds = [record for record in self._store.rounds() if self._has_result(record)]
        return state_without_class(number, holders, self.state, rounds, self._messages, self._remaking)

    def _left_of_round(self, stored: int, round: int, number: int) -> bytes | None:
        """The payload that remains of a contribution without a class; None for nothing.

        A device that took part in the open round sends nothing more in it. So its contribution stays with no sample,
        and the round does not wait for it in vain.
        """
        payload = self._tables.round_payload(stored)
        reduced = kept_of(payload, number)
        is_open = self.rounds.phase == "open" and round == self.rounds.number
        return emptied(payload) if reduced is None and is_open else reduced

    def _let_stand_in(self, step: Closed) -> None:
        """Late contributions count for devices of which the round has nothing."""
        heard = {*self.rounds.contributions, *self._store.refusals(step.round)}
        late = self._late_contributions.due(
            step.round, step.method, lambda d: d not in heard and self.rounds.is_sampled(d)
        )
        if late:
            self._store.commit(late, {})

    def _screening(self, method: Method) -> Screening:
        return Screening(self._settings.max_share, self._suspects(method), self._settings.vouched)

    def _suspects(self, method: Method) -> Suspects:
        """What becomes of devices that contradict others: means of different backbones' own features always do."""
        return "ignore" if self._others and method.extractor == "local" else self._settings.suspects

    def _is_stored(self, round: int, method: str, device: str) -> bool:
        """Whether a contribution is in the store; for the open round that is known without asking it."""
        rounds = self.rounds
        is_open = rounds.phase == "open" and not rounds.held  # else others may have committed what we have not heard of
        if is_open and (round, method) == (rounds.number, rounds.method):
            return device in rounds.contributions
        return self._store.holds(round, method, device) and not self._late_contributions.stood(round, device)

    def _newest_round(self) -> list[RoundRecord]:
        """The one that was opened last, if any was."""
        return self._store.rounds(after=self._store.last_round() - 1)

    def _resume(self, now: float, wall: float | None) -> None:
        records = self._newest_round()
        if not records:
            return
        last = records[-1]
        self.rounds.resume(
            last.number,
            last.method,
            last.seed,
            contributions=None if last.closed else list(last.uplink_bytes),
            refused=self._store.refusals(last.number),
            now=now,
            settle_s=SETTLE_S,
            age_s=0.0 if wall is None else wall - last.opened_at,
        )
        if self._store.closing() == last.number and not last.closed:
            self.rounds.hold()

    def _view(self) -> View:
        rounds = self.rounds
        return View(
            run=self.run,
            bundle=self._bundle,
            classes=self._manifest.classes,
            width=self._width(self.method),
            round=rounds.number,
            method=rounds.method,
            open=rounds.phase == "open" and not rounds.held,
            seed=rounds.seed,
            fraction=self._settings.policy.fraction,
            limit_bytes=self._settings.limit_bytes,
            others=further_bundles(self._others, self._shorter),
            terms=Terms(
                encoding=self._encoding,
                min_samples=self._settings.min_samples,
                max_samples=self._settings.max_samples,
                noise=self.method.mechanism(self._hyper(self.method)),
                extractor=self._extractor,
                lists=self._lists,
                withheld=self._withheld,
            ),
            refusal=self._refusal,
            opened=self._opened,
            gateways=self._settings.gateways,
        )

    def _messages(self, round: int, method: str) -> Iterator[Contribution]:
        """The contributions of a round, ordered by device."""
        for payload in self._store.contributions(round, method):
            yield held_by(payload)


def _answers(decision: Decision, view: View) -> bool:
    """Whether a refusal was of the very contribution that the open round waits for."""
    receipt = decision.receipt
    return view.open and decision.round == view.round and receipt is not None and receipt.method == view.method
