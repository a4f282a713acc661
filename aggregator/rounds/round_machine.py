"""When a round opens and closes, and which devices it awaits: a state machine without sockets, files or clock.

Time is an argument, in seconds of any steady clock.

    waiting ──enough devices online──▶ open ──enough contributions, none awaited or deadline passed──▶ closed
       ▲                                                                                                 │
       └───────────────── the plan has a further round ◀─────────────────────────────────────────────────┘
                                                         ▶ finished

`plan` says which method each round runs.

- A round opens when K sampled devices (`Policy.to_open`) are online.
- A round closes when at least K contributions are in, and either no online sampled device is still awaited or the
  deadline has passed.
- A deadline with fewer than K contributions extends the round by the same time.
- A refused device is not awaited: it will not send that contribution again. It does not count.

Presence expires. A device may be awaited through a whole deadline and say nothing. Its birth may have lost its will: a
broker that was killed publishes no will. Such a device is no longer online, and `take_lost` names it, so that the owner
of the machine can ask. A living device answers. It then counts as online, but it is not awaited until it has sent
something or started again. So a connected but silent device costs one deadline, not one in each round.

So a round with K contributions closes within a deadline, whatever the other devices do. A round cannot close when no
device is left that could bring it to K; `nobody` says so.

An aggregator that stays repeats its plan without end, and `schedule.py` says when a round is due. Its devices may sleep
most of the time, so each round is a window:

- the window opens when `open_clients` devices are online;
- it stays open for `window_s`, however many devices are online at one moment;
- it closes then, with at least K contributions, or earlier when `max_clients` contributions are in;
- a window that ends with fewer than K continues until K are in;
- `close` ends it at once.

An online device that says its bundle does not fit cannot take part. It does not count (`leaves_out`).

Sampling is stateless (`protofleet.contract.wire.sampling`): the announced seed decides. The seeds are tried from the
configured one upwards. Each round takes the first seed that samples at least K of the devices online. Otherwise a small
fleet could open a round in which nobody takes part, and wait for ever.

The owner of the machine reports what happens (`birth`, `death`, `contributed`, `refused`) and calls `advance` until it
returns None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from protofleet.aggregator.rounds.schedule import Schedule
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import closing_method
from protofleet.contract.methods import method as method_of
from protofleet.contract.printable import counted
from protofleet.contract.wire.sampling import sampled

__all__ = [
    "DEADLINE_S",
    "MAX_DEVICES",
    "AwaitingSum",
    "Closed",
    "Extended",
    "Finished",
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
        deadline_s: how long a round stays open for devices that are online but silent. 0 means without limit: for ever
            when one of them is not there.
        fraction, seed: see `protofleet.contract.wire.sampling`.
        open_clients: how many sampled online devices open a round; K when None.
        every_s, when_new: see `schedule.Schedule`. With either the aggregator stays, and rounds are windows.
        window_s: how long a round of an aggregator that stays is open.
        max_clients: how many contributions close a window early; 0 means that none do.
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
        """How long a round waits for silent devices; 0 for no limit."""
        return self.window_s if self.stays else self.deadline_s


@dataclass(frozen=True)
class Opened:
    """A round is open now; announce it."""

    round: int
    method: str
    seed: int


@dataclass(frozen=True)
class Extended:
    """The deadline passed with too few contributions. The round continues for the same time."""

    round: int
    contributions: int


@dataclass(frozen=True)
class Closed:
    """The round is over; merge what it gathered."""

    round: int
    method: str


@dataclass(frozen=True)
class AwaitingSum:
    """The round takes no more, and has no result yet. The helper is asked for the sum over `devices` devices."""

    round: int
    devices: int


@dataclass(frozen=True)
class Finished:
    """The plan is done."""

    rounds: int


Step = Opened | Extended | Closed | AwaitingSum | Finished


def plan(method: str, rounds: int, calibrate: bool) -> tuple[str, ...]:
    """The method of each round: `rounds` of `method`, then, with `calibrate`, one of the method that closes runs.

    The closing round follows rounds that trained, or stands alone. A method that trains nothing needs none: its
    rounds already have a result.

    SphereFed's devices send nothing while they train, so its rounds only record which devices took part.

    Raises:
        UsageError: there would be no round at all.
        MethodError: the method is unknown.
    """
    if rounds < 0 or (rounds == 0 and not calibrate):
        raise UsageError("--rounds", expected="1 or more", got=rounds)
    first_method = method_of(method)
    return (first_method.name,) * rounds + (
        (closing_method().name,) if calibrate and (first_method.trains or rounds == 0) else ()
    )


@dataclass
class Rounds:
    """The state machine.

    Attributes:
        plan: the method of round 1, 2, …
        number: the open round, or the last one; 0 before the first.
        method, seed: of round `number`.
        phase: `waiting` before the first round and between rounds.
        settled_at: no round closes before this time, see `resume`.
        unsampled: enough devices are online, but no seed was found that samples K of them.
        held: the open round takes no more contributions and awaits nobody. It ends when its result is there (`hold`).
        always: devices that take part in every round, whatever the sampling says.
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
        """Between windows, the time until the next is due, with or without devices.

        None when only devices are missing, or news.
        """
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
        """Whether the open round needs more contributions and no device is left to send one."""
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
        """Continue where a store left off.

        Args:
            number, method, seed: the last round that was opened; its own method counts, whatever the plan says now.
            contributions: the devices that have contributed to it, or None when it has been closed.
            refused: the devices that were refused in it.
            settle_s: how long to wait for the births of online devices, before a round may close. Without it a
                restarted aggregator would see no device online, await none, and close at once.
            age_s: how long ago the round was opened, by a clock that may have been set meanwhile. The rest of a window
                follows from it. A deadline begins again.
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
        """A device is online, as process `instance`. False when that was known, or when there are too many devices."""
        known_count = len(self._online) + len(self._lost)
        before = self._online.get(device)
        if before == instance or (before is None and device not in self._lost and known_count >= MAX_DEVICES):
            return False
        if self._lost.pop(device, before) != instance:
            self._silent.discard(device)  # started anew, and may do what the process before it did not
        self._online[device] = instance
        self._presence_changed = True
        if self.phase == "open":
            self._await((device,), now)
        return True

    def death(self, device: str, instance: bytes) -> bool:
        """A device's process ended. A late message about an older process of the device changes nothing."""
        if self._online.get(device) != instance:
            return False
        del self._online[device]
        self._awaited.pop(device, None)
        self._presence_changed = True
        return True

    def heard(self, device: str, now: float) -> None:
        """A message of this device for the run came, so the device is there and at work."""
        if device in self._awaited:
            self._awaited[device] = now
        self._silent.discard(device)
        instance = self._lost.pop(device, None)
        if instance is not None:
            self.birth(device, instance, now)

    def leaves_out(self, device: str, *, is_apart: bool, now: float) -> None:
        """Record whether a device cannot take part in what is announced: it is then neither counted nor awaited."""
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
        """This device's contribution to the open round is durable."""
        self.contributions.add(device)
        self._awaited.pop(device, None)
        self.schedule.contributed(device)

    def refused(self, device: str) -> None:
        """This device's contribution to the open round was rejected for good."""
        if self._awaited.pop(device, None) is not None:
            self._refused.add(device)

    def take_lost(self) -> list[tuple[str, bytes]]:
        """Device and instance of each device that was silent through a whole deadline since the last call."""
        lost, self._newly_lost = self._newly_lost, []
        return lost

    def close(self) -> bool:
        """End the open round with what it has. False when it has nothing."""
        self._closing = self.phase == "open" and bool(self.contributions)
        return self._closing

    @property
    def closing(self) -> bool:
        """Whether an order to end the open round was given."""
        return self._closing

    def hold(self) -> None:
        """Keep the round that has just closed open until its result is there: nothing is due, and nobody is awaited."""
        self.phase, self.held, self._closing = "open", True, False
        self._awaited.clear()

    def release(self, now: float) -> Extended:
        """Continue the held round for the same time: its contributions cannot give a result."""
        self.held, self._in_vain, self._closing = False, len(self.contributions), False
        self._deadline, self._overtime = now + self.policy.limit_s, True
        self._await(self._online, now)
        return Extended(self.number, len(self.contributions))

    def end(self) -> Closed:
        """End the held round."""
        self.phase, self.held, self._presence_changed = "waiting", False, True
        self._awaited.clear()
        return Closed(self.number, self.method)

    def steer(self, what: str) -> str:
        """Carry out an operator's order about rounds, `open-round` or `close-round`; returns its outcome."""
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
        """Do the next step that is due and return it; None when nothing is due."""
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
        """Seconds until `advance` may have a step even if nothing happens; None for never."""
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
        contributed, policy = len(self.contributions), self.policy
        if contributed < policy.min_clients or now < self.settled_at or (contributed <= self._in_vain and not overdue):
            return False
        if policy.stays:
            return overdue or self._overtime or 0 < policy.max_clients <= contributed
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
