"""A fleet in one process: the device's core and the aggregator's cores, joined by a function call instead of MQTT.

Every round goes the way it goes in the field:

1. the aggregator's state machine opens it, and each device decides by itself whether it is sampled;
2. a sampled device trains and summarises (`edge_client.device.Device`), and its contribution is encoded to the wire's
   bytes, which are counted, and decoded again, so rounding to f32 or f16 is part of what is simulated;
3. the contributions are merged by the rule (`contract.rules`) and become the next global state (`aggregator.state`);
4. every device is asked about the test images.

`local_only` is the baseline beside it: the same devices, the same seeds, the same number of epochs, and no global
state. What is simulated is what is deployed, except for time: devices take turns, or are spread over processes
(`workers.py`), which makes no difference to what they send; and, asked to, torch computes the steps of
their training in the place of their bundles' graphs (`torch_trainer.py`), which differs by rounding.

With a checkpoint (`lab/engine/checkpoint.py`) a run that was interrupted goes on after the last round that was kept:
past rounds are opened and closed again without training, so that the state machine is where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from aggregator.rounds import Closed, Opened, Policy, Rounds, plan
from aggregator.state import next_global
from contract.bundle import Bundle
from contract.errors import UsageError
from contract.messages import Announcement, ClassRows, Contribution, Encoding
from contract.methods import method
from contract.rules import Rule
from contract.state import GlobalState
from contract.statistics import Statistic
from contract.wire import decode
from edge_client.data import LocalData
from edge_client.device import Device
from edge_client.evaluate import Evaluation
from edge_client.trainer import Weights
from lab.engine.checkpoint import Checkpoint, after_round, past_rounds
from lab.engine.device_accuracy import class_accuracy, each_accuracy, mean_accuracy
from lab.engine.device_turns import Back, Fleet, TorchSteps, Turn, evaluate, run_round
from lab.engine.workers import OneProcess, Settled, Workers, in_order

__all__ = ["Course", "RoundRecord", "Simulation", "local_only", "run_id", "simulate"]

SCHEMA = "protofleet.lab/1"


@dataclass(frozen=True)
class Course:
    """How a federation runs.

    Attributes:
        rounds: of the bundle's own method.
        calibrate: one FFC round after them.
        fraction, seed: stateless sampling, see `contract.sampling`; the seed also fixes the run's id.
        min_samples: classes with fewer local examples are withheld.
        encoding: of class rows on the wire; FFC's sums travel as f64, as the aggregator announces by default.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
    """

    rounds: int = 5
    calibrate: bool = True
    fraction: float = 1.0
    seed: int = 0
    min_samples: int = 1
    rule: Rule = "mean"
    encoding: Encoding = "f32"
    sums_encoding: Encoding = "f64"
    evaluate_every: int = 1


@dataclass(frozen=True)
class RoundRecord:
    """One round as it is reported: a line of JSON.

    Attributes:
        participants: how many devices contributed, or trained alone.
        loss: mean over the devices that trained; None where nothing is trained.
        uplink_bytes: encoded bytes, mean over participants.
        own_classes, all_classes: accuracy by way of answering, as fractions, mean over devices; empty when the round
            was not evaluated.
        clients: each device's accuracy, by `part/way`.
        per_class: the share of each class's test images that were named right, over all devices, by `part/way`; None
            for a class that has none.
        calibration: expected calibration error of heads, mean over devices, by `part/way`; of averaged weights alone,
            since a device answers without probabilities.
    """

    round: int
    method: str
    participants: int
    loss: float | None
    uplink_bytes: float
    own_classes: dict[str, float] = field(default_factory=dict)
    all_classes: dict[str, float] = field(default_factory=dict)
    clients: dict[str, list[float]] = field(default_factory=dict)
    per_class: dict[str, list[float | None]] = field(default_factory=dict)
    calibration: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a simulated run leaves: its records, the last global state, the devices, and their last evaluation."""

    records: list[RoundRecord]
    state: GlobalState
    fleet: Fleet
    evaluations: list[Evaluation]

    @property
    def devices(self) -> list[Device]:
        """Every device, as the run has left it."""
        return self.fleet.devices


OnRound = Callable[[RoundRecord], None]
OnDevice = Callable[[int, int], None]


def run_id(seed: int) -> bytes:
    """A run's 4 bytes, from the seed."""
    return hashlib.sha256(f"protofleet lab {seed}".encode()).digest()[:4]


def simulate(
    bundle: Bundle | Sequence[Bundle],
    shares: Sequence[LocalData],
    test: LocalData,
    course: Course,
    *,
    on_round: OnRound | None = None,
    on_device: OnDevice | None = None,
    checkpoint: Checkpoint | None = None,
    held: Sequence[LocalData] | None = None,
    workers: Workers | None = None,
    torch: TorchSteps | None = None,
) -> Simulation:
    """Run a federation of one device for each of `shares`; one without samples takes no part in it.

    Args:
        bundle: every device's, or one for each device, which must be able to form one fleet (`contract.fleet`).
        test: images that every device is asked about; of all classes.
        on_round: called with each round's record, those of before an interruption, too.
        on_device: called before each device's turn with the round and how many have had theirs.
        held: each device's own test samples, for `lab.engine.personal_evaluation`.
        workers: where devices train and answer; in this process when left out.
        torch: how torch trains the devices; their bundles' graphs do when left out.

    Raises:
        MethodError: when training diverges.
        UsageError: when the course has no round, or the checkpoint is not of this run.
    """
    run = run_id(course.seed)
    names = _names(shares)
    fleet = Fleet(_each(bundle, shares), names, shares, test, run, held, torch)
    there = _with_samples(fleet, shares)
    bundle = fleet.bundle(0)
    policy = Policy(min_clients=1, fraction=course.fraction, seed=course.seed)
    machine = Rounds(plan(bundle.manifest.method, course.rounds, course.calibrate), policy)
    for place in there:
        machine.birth(names[place], names[place].encode(), 0.0)
    records, kept = past_rounds(checkpoint, RoundRecord, on_round)
    state, gathered = _resume(kept, fleet, run), _Gathered()
    _replay(machine, [names[place] for place in there], len(records))
    evaluations: list[Evaluation] = []
    with (workers or OneProcess()).settle(fleet) as at:
        while (step := machine.advance(0.0)) is not None:
            if isinstance(step, Opened):
                announcement = _announce(bundle, course, step, state)
                sampled = [place for place in there if machine.is_sampled(names[place])]
                gathered = _gather(at, fleet, sampled, announcement, state, on_device)
                for place in sampled:
                    machine.contributed(names[place])
            elif isinstance(step, Closed):
                state = _close(step, gathered, state, course.rule, bundle)
                due = step.round == len(machine.plan) or step.round % course.evaluate_every == 0
                evaluations = _evaluate(at, fleet, there, state) if due else evaluations
                records.append(_record(step, gathered, evaluations if due else []))
                after_round(records, checkpoint, partial(_plain, fleet, state), on_round)
    return Simulation(records, state, fleet, evaluations)


def local_only(
    bundle: Bundle | Sequence[Bundle],
    shares: Sequence[LocalData],
    test: LocalData,
    *,
    rounds: int,
    run: bytes,
    names: Sequence[str] | None = None,
    evaluate_every: int = 1,
    on_round: OnRound | None = None,
    on_device: OnDevice | None = None,
    checkpoint: Checkpoint | None = None,
    held: Sequence[LocalData] | None = None,
    workers: Workers | None = None,
    torch: TorchSteps | None = None,
) -> Simulation:
    """The baseline: each device trains as in `rounds` rounds of the bundle's method, and never hears from the others.

    Args:
        bundle: every device's, or one for each device.
        run: fixes, with a device's name and the round, the order in which its samples are taken; that of a federated
            run makes both see the same batches.
        names: the devices' ids; `device-1` and so on when None.
        held, workers, torch: as of `simulate`.

    Raises:
        UsageError: when the bundle does not train, or the checkpoint is not of this run.
    """
    fleet = Fleet(_each(bundle, shares), names or _names(shares), shares, test, run, held, torch)
    there, first = _with_samples(fleet, shares), fleet.bundle(0)
    if not method(first.manifest.method).trains:
        raise UsageError("local training", expected="a method that trains", got=first.manifest.method)
    records, kept = past_rounds(checkpoint, RoundRecord, on_round)
    state = _resume(kept, fleet, run)
    evaluations: list[Evaluation] = []
    with (workers or OneProcess()).settle(fleet) as at:
        for number in range(len(records) + 1, rounds + 1):
            announcement = Announcement(run, number, "open", first.manifest.method, first.sha256)
            backs = _turns(at, fleet, run_round, (announcement, None), there, on_device, number)
            losses = [back.loss for back in backs if back.loss is not None]
            due = number == rounds or number % evaluate_every == 0
            evaluations = _evaluate(at, fleet, there, None) if due else evaluations
            records.append(_record(Closed(number, "local"), _Gathered([], losses, []), evaluations if due else []))
            after_round(records, checkpoint, partial(_plain, fleet, state), on_round)
    return Simulation(records, state, fleet, evaluations)


@dataclass
class _Gathered:
    """What one round brought in."""

    statistics: list[Statistic] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)


def _plain(fleet: Fleet, state: GlobalState) -> dict[str, Any]:
    """What a simulation needs to go on, for a checkpoint."""
    import torch  # here and not above: the demo has no checkpoint, and need not have torch

    rows = {kind: (found.classes.tolist(), torch.tensor(found.rows)) for kind, found in state.rows.items()}
    kept: dict[str, Any] = {"version": state.version, "round": state.round, "rows": rows}
    known = [(device.state(), fleet.optimizer(place)) for place, device in enumerate(fleet.devices)]
    weights, optimizers = ([_tensors(own) for own in each] for each in zip(*known, strict=True))
    return {"devices": weights, "optimizers": optimizers, "global": kept}


def _tensors(arrays: Weights) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(value) for name, value in arrays.items()}


def _arrays(tensors: Mapping[str, Any]) -> Weights:
    return {name: value.numpy() for name, value in tensors.items()}


def _resume(kept: dict[str, Any] | None, fleet: Fleet, run: bytes) -> GlobalState:
    """Put the devices where `_plain` found them; the global state then. Without anything kept, the first one."""
    if kept is None:
        return GlobalState(run, 0, 0)
    for place, known in enumerate(zip(kept["devices"], kept["optimizers"], strict=True)):
        fleet.resume(place, *map(_arrays, known))
    found = kept["global"]
    rows = {
        kind: ClassRows(np.array(numbers, np.uint16), values.numpy())
        for kind, (numbers, values) in found["rows"].items()
    }
    return GlobalState(run, found["version"], found["round"], rows)


def _replay(machine: Rounds, names: Sequence[str], rounds: int) -> None:
    """Open and close so many rounds in which everyone who was sampled has answered."""
    while rounds and (step := machine.advance(0.0)) is not None:
        if isinstance(step, Opened):
            for name in filter(machine.is_sampled, names):
                machine.contributed(name)
        rounds -= isinstance(step, Closed)


def _each(bundle: Bundle | Sequence[Bundle], shares: Sequence[LocalData]) -> Sequence[Bundle]:
    return [bundle] * len(shares) if isinstance(bundle, Bundle) else bundle


def _names(shares: Sequence[LocalData]) -> list[str]:
    return [f"device-{number}" for number in range(1, len(shares) + 1)]


def _with_samples(fleet: Fleet, shares: Sequence[LocalData]) -> list[int]:
    """The places of those that take part: a device without a sample to learn from has nothing to say."""
    m = fleet.bundle(0).manifest
    unlabelled = method(m.method).uses_unlabelled(m.hyper)
    found = [place for place, share in enumerate(shares) if len(share if unlabelled else share.labelled)]
    if not found:
        raise UsageError("shares", expected="a client with samples", got="none")
    return found


def _announce(bundle: Bundle, course: Course, step: Opened, state: GlobalState) -> Announcement:
    found = method(step.method)
    return Announcement(
        run=state.run,
        round=step.round,
        phase="open",
        method=step.method,
        bundle=bundle.sha256,
        fraction=course.fraction,
        seed=step.seed,
        global_version=state.version,
        encoding=course.sums_encoding if found.encoding == "f64" else course.encoding,
        min_samples=course.min_samples,
        extractor=bundle.extractor(found),
    )


def _turns(
    at: Settled,
    fleet: Fleet,
    task: Callable[[Fleet, Any, Turn], Back],
    common: Any,
    there: Sequence[int],
    on_device: OnDevice | None = None,
    number: int = 0,
) -> Iterator[Back]:
    """What comes of each device's turn, in their order; here, too, each then knows what it has come to know."""

    def on_done(done: int) -> None:
        if on_device is not None and done < len(there):
            on_device(number, there[done])

    turns = (fleet.turn(place) for place in there)
    for place, back in zip(there, in_order(at, task, common, turns, on_done), strict=True):
        fleet.put(place, back.memory)
        yield back


def _gather(
    at: Settled,
    fleet: Fleet,
    there: Sequence[int],
    announcement: Announcement,
    state: GlobalState,
    on_device: OnDevice | None,
) -> _Gathered:
    gathered, m, found = _Gathered(), fleet.bundle(0).manifest, method(announcement.method)
    width = found.row_width(found.settled_in(m.hyper), m.features)
    for back in _turns(at, fleet, run_round, (announcement, state), there, on_device, announcement.round):
        received = decode(back.payload)
        assert isinstance(received, Contribution)
        gathered.statistics.append(received.statistic(found.statistic, m.classes, width))
        gathered.losses += [back.loss] if back.loss is not None else []
        gathered.payload_bytes.append(len(back.payload))
    return gathered


def _close(step: Closed, gathered: _Gathered, state: GlobalState, rule: Rule, bundle: Bundle) -> GlobalState:
    found = method(step.method)
    hyper = found.settled_in(bundle.manifest.hyper)
    merged = found.merge(lambda: gathered.statistics, rule, hyper)
    return next_global(state, found, merged, round=step.round, hyper=hyper)


def _evaluate(at: Settled, fleet: Fleet, there: Sequence[int], state: GlobalState | None) -> list[Evaluation]:
    found = [back.evaluation for back in _turns(at, fleet, evaluate, state, there)]
    return [evaluation for evaluation in found if evaluation is not None]


def _record(step: Closed, gathered: _Gathered, evaluations: Sequence[Evaluation]) -> RoundRecord:
    own, everything = mean_accuracy(evaluations)
    return RoundRecord(
        round=step.round,
        method=step.method,
        participants=max(len(gathered.payload_bytes), len(gathered.losses)),
        loss=float(np.mean(gathered.losses)) if gathered.losses else None,
        uplink_bytes=float(np.mean(gathered.payload_bytes)) if gathered.payload_bytes else 0.0,
        own_classes=own,
        all_classes=everything,
        clients=each_accuracy(evaluations),
        per_class=class_accuracy(evaluations),
    )
