"""When a round opens and closes, and who is awaited: a state machine without sockets, files or clock.

Time is an argument, in seconds of any steady clock.

    waiting ──enough devices online──▶ open ──enough contributions, none awaited or deadline passed──▶ closed
       ▲                                                                                                 │
       └───────────────── the plan has a further round ◀─────────────────────────────────────────────────┘
                                                         ▶ finished

`plan` says which method each round runs. A round opens when K sampled devices (`Policy.to_open`) are online. It closes
when at least K contributions are in and no device that is online and sampled is still awaited, or the deadline has
passed; a deadline that finds fewer than K extends the round by as much again. A device that was refused is not awaited:
it will not send that contribution a second time, and it does not count.

Presence expires. A device that was awaited through a whole deadline and said nothing may be a birth without its will
(a broker that was killed publishes none): it is no longer online, and `take_lost` names it, so that the owner can ask.
If it is there after all it says so. It then counts as online, but is not awaited before it has sent something or
started anew: one that is connected but silent costs a single deadline, not one in each round.

So a round with K contributions closes within a deadline, whatever the others do. One that cannot get K, because nobody
is left to send one, cannot close; `nobody` says so.

An aggregator that stays has no end of its plan: it goes through it again and again, and `schedule.py` says when a round
is due. Its devices may sleep most of the time, so a round is a window: it opens when `open_clients` are online, and
stays open for `window_s`, whoever is online at one moment. It closes then, with at least K contributions, or before
when `max_clients` are in; a window that ends with too few goes on until they are there. `close` ends it at once.

Who is online and says that it cannot take part, since its bundle does not fit, counts for nothing (`leaves_out`).

Sampling is stateless (`contract.sampling`): the announced seed decides, and each round's seed is the first from the
configured one on that samples at least K of the devices online. Otherwise a small fleet could open a round that nobody
takes part in, and wait for ever.

The owner tells what happens (`birth`, `death`, `contributed`, `refused`) and calls `advance` until it returns None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from aggregator.schedule import Schedule
from contract.errors import UsageError
from contract.methods import closing_method
from contract.methods import method as method_of
from contract.sampling import sampled
from contract.terminal import counted

__all__ = [
    "DEADLINE_S",
    "MAX_DEVICES",
    "Closed",
    "Extended",
    "Finished",
    "Held",
    "Opened",
    "Policy",
    "Rounds",
    "Step",
    "plan",
]

MAX_DEVICES = 100_000  # births beyond that are not followed: a flood of status messages must not eat the memory
DEADLINE_S = 600.0  # a Pi trains a round of photos in less; see docs/decisions/080
_SEED_TRIALS = 200_000


@dataclass(frozen=True)
class Policy:
    """When rounds open and close.

    Attributes:
        min_clients: K, how many contributions close a round.
        deadline_s: how long a round stays open for devices that are online but silent; 0 for as long as it takes,
            which is for ever when one of them is not there.
        fraction, seed: see `contract.sampling`.
        open_clients: how many sampled devices that are online open a round; K when None.
        every_s, when_new: see `schedule.Schedule`; with either the aggregator stays, and rounds are windows.
        window_s: how long a round of an aggregator that stays is open.
        max_clients: how many contributions close a window before its time; 0 for none do.
    """

    min_clients: int = 1
    deadline_s: float = DEADLINE_S
    fraction: float = 1.0
    seed: int = 0
    open_clients: int | None = None
    every_s: float = 0.0
    when_new: int = 0
    window_s: float = 0.0
    max_clients: int = 0

    @property
    def stays(self) -> bool:
        """Whether there is no last round."""
        return self.every_s > 0 or self.when_new > 0

    @property
    def to_open(self) -> int:
        """How many devices open a round."""
        return self.min_clients if self.open_clients is None else self.open_clients

    @property
    def limit_s(self) -> float:
        """How long a round is open for devices that say nothing; 0 for as long as it takes."""
        return self.window_s if self.stays else self.deadline_s


@dataclass(frozen=True)
class Opened:
    """A round is open now; announce it."""

    round: int
    method: str
    seed: int


@dataclass(frozen=True)
class Extended:
    """The deadline passed with too few contributions; the round goes on for as long again."""

    round: int
    contributions: int


@dataclass(frozen=True)
class Closed:
    """The round is over; merge what it gathered."""

    round: int
    method: str


@dataclass(frozen=True)
class Held:
    """The round takes no more, and has no result yet: the helper is asked for the sum over so many devices."""

    round: int
    devices: int


@dataclass(frozen=True)
class Finished:
    """The plan is done."""

    rounds: int


Step = Opened | Extended | Closed | Held | Finished


def plan(method: str, rounds: int, calibrate: bool) -> tuple[str, ...]:
    """The method of each round: `rounds` of one, then, when calibrating, one of the method that closes runs.

    That is after rounds that trained, or alone; what trains nothing has a result of its own already.

    SphereFed's devices send nothing while they train, so its rounds gather only who took part.

    Raises:
        UsageError: when there would be no round at all.
        MethodError: for an unknown method.
    """
    if rounds < 0 or (rounds == 0 and not calibrate):
        raise UsageError("--rounds", expected="1 or more", got=rounds)
    own = method_of(method)
    return (own.name,) * rounds + ((closing_method().name,) if calibrate and (own.trains or rounds == 0) else ())


@dataclass
class Rounds:
    """The machine.

    Attributes:
        plan: the method of round 1, 2, …
        number: the round that is open, or the last one that was; 0 before the first.
        method, seed: of round `number`.
        phase: `waiting` before the first round and between rounds.
        settled_at: no round closes before that time, see `resume`.
        unsampled: devices enough are online, but no seed was found that samples K of them.
        held: the open round takes no more and awaits nobody; it ends when its result is here (`hold`).
        always: devices that take part in every round, whoever is sampled.
    """

    plan: tuple[str, ...]
    policy: Policy
    number: int = 0
    method: str = ""
    seed: int = 0
    phase: Literal["waiting", "open", "finished"] = "waiting"
    settled_at: float = 0.0
    unsampled: bool = False
    held: bool = False
    contributions: set[str] = field(default_factory=set)
    always: Collection[str] = ()
    _online: dict[str, bytes] = field(default_factory=dict)
    _awaited: dict[str, float] = field(default_factory=dict)  # since when nothing was heard of it
    _silent: set[str] = field(default_factory=set)  # silent through a whole deadline, and not heard since
    _lost: dict[str, bytes] = field(default_factory=dict)  # of those, the ones that have not answered yet
    _apart: set[str] = field(default_factory=set)  # cannot take part, online or not
    _newly_lost: list[tuple[str, bytes]] = field(default_factory=list)
    _refused: set[str] = field(default_factory=set)
    _deadline: float = 0.0
    _overtime: bool = False  # a window that ended with too few
    _closing: bool = False  # somebody asked for the end of the open round
    _in_vain: int = 0  # with so many contributions its result could not be had
    _presence_changed: bool = True

    def __post_init__(self) -> None:
        self.method = self.method or self.plan[0]
        policy = self.policy
        self.schedule = Schedule(policy.every_s, policy.when_new, policy.min_clients, MAX_DEVICES)

    @property
    def stays(self) -> bool:
        """Whether there is no last round."""
        return self.policy.stays

    @property
    def is_done(self) -> bool:
        """Whether nothing of the plan is left to open."""
        return not self.policy.stays and self.number >= len(self.plan)

    def opens_in_s(self, now: float) -> float | None:
        """Between windows, how long until the next is due, devices or not; None where only devices are missing, or
        news."""
        due_s = self.schedule.due_in_s(now) if self.policy.stays and self.phase == "waiting" else None
        return due_s or None

    @property
    def online(self) -> int:
        """How many devices are online that can take part."""
        return len(self._online) - sum(device in self._online for device in self._apart)

    @property
    def awaited(self) -> frozenset[str]:
        """The devices that are online, sampled, and have neither contributed nor been refused."""
        return frozenset(self._awaited)

    def is_online(self, device: str) -> bool:
        return device in self._online

    def awaits(self, device: str) -> bool:
        """Whether the open round waits for this device."""
        return device in self._awaited

    @property
    def awaited_count(self) -> int:
        return len(self._awaited)

    @property
    def refused_count(self) -> int:
        """The devices whose contribution to the open round was rejected for good."""
        return len(self._refused)

    @property
    def nobody(self) -> bool:
        """Whether the open round needs more contributions and there is nobody to send one."""
        if self.policy.stays:  # whoever sleeps will come
            return False
        short = not self._awaited and len(self.contributions) < self.policy.min_clients
        return self.phase == "open" and not self.held and short

    def is_sampled(self, device: str) -> bool:
        """Whether `device` takes part in round `number`."""
        return device in self.always or sampled(device, self.number, self.seed, self.policy.fraction)

    def resume(
        self,
        number: int,
        method: str,
        seed: int,
        *,
        contributions: Iterable[str] | None,
        refused: Iterable[str] = (),
        now: float,
        settle_s: float,
        age_s: float = 0.0,
    ) -> None:
        """Take up where a store left off.

        Args:
            number, method, seed: the last round that was opened; its own method stands, whatever the plan says now.
            contributions: who has contributed to it, or None when it has been closed.
            refused: who was refused in it.
            settle_s: how long to wait for the births of devices that are online, before a round may close. Without
                it a restarted aggregator would see nobody online, await nobody, and close at once.
            age_s: how long ago the round was opened, by a clock that may have been set meanwhile: what is left of a
                window follows from it. A deadline begins anew.
        """
        self.number, self.method, self.seed = number, method, seed
        self.settled_at = now + settle_s
        if contributions is not None:
            self._open(number, method, seed, set(contributions), now)
            self._refused = set(refused)
            if self.policy.stays:
                self._deadline -= min(max(age_s, 0.0), self.policy.window_s)
        self.schedule.opened(now, age_s)

    def birth(self, device: str, instance: bytes, now: float) -> bool:
        """A device is online, as process `instance`. False when it was known to be, or there are too many."""
        known = len(self._online) + len(self._lost)
        before = self._online.get(device)
        if before == instance or (before is None and device not in self._lost and known >= MAX_DEVICES):
            return False
        if self._lost.pop(device, before) != instance:
            self._silent.discard(device)  # started anew, and may do what the process before it did not
        self._online[device] = instance
        self._presence_changed = True
        if self.phase == "open":
            self._await((device,), now)
        return True

    def death(self, device: str, instance: bytes) -> bool:
        """A device's process ended. A late word about an older process of the same device changes nothing."""
        if self._online.get(device) != instance:
            return False
        del self._online[device]
        self._awaited.pop(device, None)
        self._presence_changed = True
        return True

    def heard(self, device: str, now: float) -> None:
        """Something of this device's for the run came, so it is there and at work."""
        if device in self._awaited:
            self._awaited[device] = now
        self._silent.discard(device)
        instance = self._lost.pop(device, None)
        if instance is not None:
            self.birth(device, instance, now)

    def leaves_out(self, device: str, *, is_apart: bool, now: float) -> None:
        """Whether a device can take part in what is announced: one that cannot does not count, nor is it awaited."""
        if is_apart == (device in self._apart) or (is_apart and len(self._apart) >= MAX_DEVICES):
            return
        self._presence_changed = True
        if is_apart:
            self._apart.add(device)
            self._awaited.pop(device, None)
            return
        self._apart.discard(device)
        if self.phase == "open" and device in self._online:
            self._await((device,), now)

    def contributed(self, device: str) -> None:
        """The open round has this device's contribution, durably."""
        self.contributions.add(device)
        self._awaited.pop(device, None)
        self.schedule.contributed(device)

    def refused(self, device: str) -> None:
        """This device's contribution to the open round was rejected for good."""
        if self._awaited.pop(device, None) is not None:
            self._refused.add(device)

    def take_lost(self) -> list[tuple[str, bytes]]:
        """Device and instance of those that were silent through a whole deadline since the last call."""
        lost, self._newly_lost = self._newly_lost, []
        return lost

    def close(self) -> bool:
        """End the open round with what it has; False where there is nothing to end it with."""
        self._closing = self.phase == "open" and bool(self.contributions)
        return self._closing

    @property
    def closing(self) -> bool:
        """Whether somebody asked for the end of the open round."""
        return self._closing

    def hold(self) -> None:
        """The round that has just closed has no result yet: it is open, nothing is due, and nobody is awaited."""
        self.phase, self.held, self._closing = "open", True, False
        self._awaited.clear()

    def release(self, now: float) -> Extended:
        """The held round cannot have a result of what is here: it goes on, for as long again."""
        self.held, self._in_vain, self._closing = False, len(self.contributions), False
        self._deadline, self._overtime = now + self.policy.limit_s, True
        self._await(self._online, now)
        return Extended(self.number, len(self.contributions))

    def end(self) -> Closed:
        """The held round is over."""
        self.phase, self.held, self._presence_changed = "waiting", False, True
        self._awaited.clear()
        return Closed(self.number, self.method)

    def steer(self, what: str) -> str:
        """Do what an operator asks of rounds, `open-round` or `close-round`; what became of it."""
        if what == "close-round":
            return "done" if self.close() else "refused: no round is open that has a contribution"
        if what != "open-round":
            return f"refused: {what} is not for rounds"
        if self.phase == "open":
            return f"refused: round {self.number} is open"
        if not self.policy.stays:
            return "refused: there is no schedule, aggregate --every or --when-new; rounds open by themselves"
        self.schedule.order()
        needed = self.policy.to_open
        return f"done: it opens once {counted(needed, 'device')} {'is' if needed == 1 else 'are'} online"

    def advance(self, now: float) -> Step | None:
        """The next thing that is due, done to the machine; None when nothing is."""
        if self.phase == "open":
            return self._advance_open(now)
        if self.phase == "finished":
            return None
        if self.is_done:
            self.phase = "finished"
            return Finished(self.number)
        if self.policy.stays and not self.schedule.is_due(now):
            return None
        if not self._presence_changed or self.online < self.policy.to_open:
            return None
        self._presence_changed = False
        seed = self._choose_seed(self.number + 1)
        self.unsampled = seed is None
        if seed is None:
            return None
        self._open(self.number + 1, self.plan[self.number % len(self.plan)], seed, set(), now)
        self.schedule.opened(now)
        return Opened(self.number, self.method, self.seed)

    def due_in_s(self, now: float) -> float | None:
        """Seconds until `advance` may have something to do without anything happening; None when never."""
        if self.phase == "waiting" and self.policy.stays and self.online >= self.policy.to_open:
            return self.opens_in_s(now)
        if self.phase != "open" or self.held:
            return None
        times = [self.settled_at] if now < self.settled_at else []
        times += [self._deadline] if self.policy.limit_s else []
        return max(0.0, min(times) - now) if times else None

    def _advance_open(self, now: float) -> Step | None:
        overdue = self.policy.limit_s > 0 and now >= self._deadline
        if overdue and now >= self.settled_at:
            self._lose_the_silent(now)
        if self._closing or self._may_close(now, overdue):
            self.phase, self._presence_changed = "waiting", True
            self._awaited.clear()
            return Closed(self.number, self.method)
        if overdue and len(self.contributions) < self.policy.min_clients:
            self._deadline, self._overtime = now + self.policy.limit_s, True
            return Extended(self.number, len(self.contributions))
        return None

    def _may_close(self, now: float, overdue: bool) -> bool:
        here, policy = len(self.contributions), self.policy
        if here < policy.min_clients or now < self.settled_at or (here <= self._in_vain and not overdue):
            return False
        if policy.stays:
            return overdue or self._overtime or 0 < policy.max_clients <= here
        return overdue or not self._awaited

    def _lose_the_silent(self, now: float) -> None:
        for device, since in list(self._awaited.items()):
            if now - since >= self.policy.limit_s:
                del self._awaited[device]
                self._silent.add(device)
                self._lost[device] = self._online.pop(device)
                self._newly_lost.append((device, self._lost[device]))
                self._presence_changed = True

    def _open(self, number: int, method: str, seed: int, contributions: set[str], now: float) -> None:
        self.number, self.method, self.seed, self.phase = number, method, seed, "open"
        self.contributions, self._awaited, self._refused = contributions, {}, set()
        self._deadline, self._overtime, self._closing = now + self.policy.limit_s, False, False
        self.held, self._in_vain = False, 0
        self._await(self._online, now)

    def _await(self, devices: Iterable[str], now: float) -> None:
        if self.held:
            return
        done = self.contributions | self._refused | self._silent | self._apart
        self._awaited.update((d, now) for d in devices if d not in done and self.is_sampled(d))

    def _choose_seed(self, number: int) -> int | None:
        present = self._online.keys() - self._apart
        trials = 1 if self.policy.fraction >= 1 else max(1, min(1000, _SEED_TRIALS // len(self._online)))
        for trial in range(trials):
            seed = (self.policy.seed + trial) % 2**32
            fraction, always = self.policy.fraction, self.always
            taking_part = sum(d in always or sampled(d, number, seed, fraction) for d in present)
            if taking_part >= self.policy.to_open:
                return seed
        return None
