"""A fleet in one process: the device's core and the aggregator's core, joined by function calls instead of MQTT.

Every round runs as in the field:

1. The aggregator's state machine opens it. Each device decides by itself whether it is sampled.
2. A sampled device trains and summarises (`protofleet.edge_client.device.device.Device`). Its contribution is encoded
   to the wire's bytes, which are counted, and decoded again. So rounding to f32 or f16 is simulated, too.
3. The rule merges the contributions (`protofleet.contract.sums.merge_rules`). They become the next global state
   (`protofleet.aggregator.merging.next_global`).
4. Every device is tested on the test images.

`local_only` is the baseline: the same devices, seeds and number of epochs, without a global state.

Two things differ from a deployed fleet:

- Time. Devices take turns, or run in several processes (`workers.py`). This does not change what they send.
- On request torch computes the training steps instead of the bundles' graphs (`torch_trainer.py`). This differs by
  rounding.

With a checkpoint (`lab/engine/checkpoint.py`) an interrupted run continues after the last round that was kept. The past
rounds are opened and closed again without training, which brings the state machine to its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.rounds.round_machine import Closed, Opened, Policy, Rounds, plan
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import method
from protofleet.contract.sums.merge_rules import Rule
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, Encoding
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.evaluation import Evaluation
from protofleet.edge_client.training.trainer import Weights
from protofleet.lab.engine.checkpoint import Checkpoint, after_round, past_rounds
from protofleet.lab.engine.device_accuracy import class_accuracy, each_accuracy, mean_accuracy
from protofleet.lab.engine.device_turns import Back, Fleet, TorchSteps, Turn, evaluate, run_round
from protofleet.lab.workers.workers import OneProcess, SiteWorkers, Workers, in_order

__all__ = ["Course", "RoundRecord", "Simulation", "local_only", "run_id", "simulate"]

SCHEMA = "protofleet.lab/1"


@dataclass(frozen=True)
class Course:
    """The course of a federation.

    Attributes:
        rounds: rounds of the bundle's own method.
        calibrate: whether one FFC round follows.
        fraction, seed: of the stateless sampling (`protofleet.contract.wire.sampling`). The seed also fixes the run id.
        min_samples: classes with fewer local examples are withheld.
        rule: how class means merge, as `aggregate --rule`. Other sums always add up.
        encoding: encoding of class rows on the wire.
        sums_encoding: encoding of FFC's sums; f64 as the aggregator announces by default.
        evaluate_every: rounds between two evaluations. The last round is always evaluated.
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
    """The report of one round: a line of JSON.

    Attributes:
        participants: number of devices that contributed, or trained alone.
        loss: mean over the devices that trained; None where the method trains nothing.
        uplink_bytes: encoded bytes, mean over participants.
        own_classes, all_classes: accuracy by way of answering, as a fraction, mean over devices. Empty if the round was
            not evaluated.
        clients: each device's accuracy, by `part/way`.
        per_class: the share of right answers for each class's test images, over all devices, by `part/way`; None for a
            class without test images.
        calibration: expected calibration error of heads, mean over devices, by `part/way`. Only for averaged weights,
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
        """The record as plain values."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of a simulated run: its records, the last global state, the devices, and their last evaluation."""

    records: list[RoundRecord]
    state: GlobalState
    fleet: Fleet
    evaluations: list[Evaluation]

    @property
    def devices(self) -> list[Device]:
        """Every device, in its state after the run."""
        return self.fleet.devices


OnRound = Callable[[RoundRecord], None]
OnDevice = Callable[[int, int], None]


def run_id(seed: int) -> bytes:
    """The 4 bytes that identify a run, derived from the seed."""
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
    local_tests: Sequence[LocalData] | None = None,
    workers: Workers | None = None,
    torch: TorchSteps | None = None,
) -> Simulation:
    """Run a federation with one device for each of `shares`. A device without samples takes no part.

    Args:
        bundle: the bundle of every device, or one for each device. These must be able to form one fleet
            (`protofleet.contract.bundle.fleet_compatibility`).
        test: images of all classes that every device is tested on.
        on_round: called with each round's record, also with those before an interruption.
        on_device: called before each device's turn with the round and the number of turns done.
        local_tests: each device's own test samples, for `protofleet.lab.engine.personal_evaluation`.
        workers: where devices train and answer; None for this process.
        torch: how torch trains the devices; None for their bundles' graphs.

    Raises:
        MethodError: training diverges.
        UsageError: the course has no round, or the checkpoint is of another run.
    """
    run = run_id(course.seed)
    names = _names(shares)
    fleet = Fleet(_each(bundle, shares), names, shares, test, run, local_tests, torch)
    places = _with_samples(fleet, shares)
    bundle = fleet.bundle(0)
    policy = Policy(min_clients=1, fraction=course.fraction, seed=course.seed)
    machine = Rounds(plan(bundle.manifest.method, course.rounds, course.calibrate), policy)
    for place in places:
        machine.birth(names[place], names[place].encode(), 0.0)
    records, kept = past_rounds(checkpoint, RoundRecord, on_round)
    state, gathered = _resume(kept, fleet, run), _Gathered()
    _replay(machine, [names[place] for place in places], len(records))
    evaluations: list[Evaluation] = []
    with (workers or OneProcess()).at_site(fleet) as site:
        while (step := machine.advance(0.0)) is not None:
            if isinstance(step, Opened):
                announcement = _announce(bundle, course, step, state)
                sampled = [place for place in places if machine.is_sampled(names[place])]
                gathered = _gather(site, fleet, sampled, announcement, state, on_device)
                for place in sampled:
                    machine.contributed(names[place])
            elif isinstance(step, Closed):
                state = _close(step, gathered, state, course.rule, bundle)
                due = step.round == len(machine.plan) or step.round % course.evaluate_every == 0
                evaluations = _evaluate(site, fleet, places, state) if due else evaluations
                records.append(_record(step, gathered, evaluations if due else []))
                after_round(records, checkpoint, partial(_plain, fleet, state), on_round)
    return Simulation(records, state, fleet, evaluations)


# arguments: the terms of one simulation, by name
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
    local_tests: Sequence[LocalData] | None = None,
    workers: Workers | None = None,
    torch: TorchSteps | None = None,
) -> Simulation:
    """The baseline: each device trains as in `rounds` rounds of the bundle's method, without the other devices.

    Args:
        bundle: the bundle of every device, or one for each device.
        run: fixes the order of the samples, with a device's name and the round. With the id of a federated run both
            see the same batches.
        names: the devices' ids; `device-1` and so on when None.
        local_tests, workers, torch: as for `simulate`.

    Raises:
        UsageError: the bundle does not train, or the checkpoint is of another run.
    """
    fleet = Fleet(_each(bundle, shares), names or _names(shares), shares, test, run, local_tests, torch)
    places, first = _with_samples(fleet, shares), fleet.bundle(0)
    if not method(first.manifest.method).trains:
        raise UsageError("local training", expected="a method that trains", got=first.manifest.method)
    records, kept = past_rounds(checkpoint, RoundRecord, on_round)
    state = _resume(kept, fleet, run)
    evaluations: list[Evaluation] = []
    with (workers or OneProcess()).at_site(fleet) as site:
        for number in range(len(records) + 1, rounds + 1):
            announcement = Announcement(run, number, "open", first.manifest.method, first.sha256)
            backs = _turns(site, fleet, run_round, (announcement, None), places, on_device, number)
            losses = [back.loss for back in backs if back.loss is not None]
            due = number == rounds or number % evaluate_every == 0
            evaluations = _evaluate(site, fleet, places, None) if due else evaluations
            records.append(_record(Closed(number, "local"), _Gathered([], losses, []), evaluations if due else []))
            after_round(records, checkpoint, partial(_plain, fleet, state), on_round)
    return Simulation(records, state, fleet, evaluations)


@dataclass
class _Gathered:
    """What the devices sent in one round."""

    statistics: list[Statistic] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)


def _plain(fleet: Fleet, state: GlobalState) -> dict[str, Any]:
    """The state that a simulation continues from, for a checkpoint."""
    import torch  # here and not above: the demo has no checkpoint, and need not have torch

    rows = {kind: (table.classes.tolist(), torch.tensor(table.rows)) for kind, table in state.rows.items()}
    kept: dict[str, Any] = {"version": state.version, "round": state.round, "rows": rows}
    known = [(device.state(), fleet.optimizer(place)) for place, device in enumerate(fleet.devices)]
    weights, optimizers = ([_tensors(own) for own in group] for group in zip(*known, strict=True))
    return {"devices": weights, "optimizers": optimizers, "global": kept}


def _tensors(arrays: Weights) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(value) for name, value in arrays.items()}


def _arrays(tensors: Mapping[str, Any]) -> Weights:
    return {name: value.numpy() for name, value in tensors.items()}


def _resume(kept: dict[str, Any] | None, fleet: Fleet, run: bytes) -> GlobalState:
    """Restore the devices from `_plain`, and return the global state; without a checkpoint the first one."""
    if kept is None:
        return GlobalState(run, 0, 0)
    for place, known in enumerate(zip(kept["devices"], kept["optimizers"], strict=True)):
        fleet.resume(place, *map(_arrays, known))
    global_state = kept["global"]
    rows = {
        kind: ClassRows(np.array(numbers, np.uint16), values.numpy())
        for kind, (numbers, values) in global_state["rows"].items()
    }
    return GlobalState(run, global_state["version"], global_state["round"], rows)


def _replay(machine: Rounds, names: Sequence[str], rounds: int) -> None:
    """Open and close `rounds` rounds in which every sampled device has answered."""
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
    """The places of the devices that take part, which are those with samples to learn from."""
    m = fleet.bundle(0).manifest
    unlabelled = method(m.method).uses_unlabelled(m.hyper)
    places = [place for place, share in enumerate(shares) if len(share if unlabelled else share.labelled)]
    if not places:
        raise UsageError("shares", expected="a client with samples", got="none")
    return places


def _announce(bundle: Bundle, course: Course, step: Opened, state: GlobalState) -> Announcement:
    announced = method(step.method)
    return Announcement(
        run=state.run,
        round=step.round,
        phase="open",
        method=step.method,
        bundle=bundle.sha256,
        fraction=course.fraction,
        seed=step.seed,
        global_version=state.version,
        encoding=course.sums_encoding if announced.encoding == "f64" else course.encoding,
        min_samples=course.min_samples,
        extractor=bundle.extractor(announced),
    )


def _turns(
    site: SiteWorkers,
    fleet: Fleet,
    task: Callable[[Fleet, Any, Turn], Back],
    common: Any,
    places: Sequence[int],
    on_device: OnDevice | None = None,
    number: int = 0,
) -> Iterator[Back]:
    """The result of each device's turn, in their order. The device's new memory is put into the fleet here, too."""

    def on_done(done: int) -> None:
        if on_device is not None and done < len(places):
            on_device(number, places[done])

    turns = (fleet.turn(place) for place in places)
    for place, back in zip(places, in_order(site, task, common, turns, on_done), strict=True):
        fleet.put(place, back.memory)
        yield back


def _gather(
    site: SiteWorkers,
    fleet: Fleet,
    places: Sequence[int],
    announcement: Announcement,
    state: GlobalState,
    on_device: OnDevice | None,
) -> _Gathered:
    gathered, m, announced = _Gathered(), fleet.bundle(0).manifest, method(announcement.method)
    width = announced.row_width(announced.resolved_in(m.hyper), m.features)
    for back in _turns(site, fleet, run_round, (announcement, state), places, on_device, announcement.round):
        received = decode(back.payload)
        assert isinstance(received, Contribution)
        gathered.statistics.append(received.statistic(announced.statistic, m.classes, width))
        gathered.losses += [back.loss] if back.loss is not None else []
        gathered.payload_bytes.append(len(back.payload))
    return gathered


def _close(step: Closed, gathered: _Gathered, state: GlobalState, rule: Rule, bundle: Bundle) -> GlobalState:
    announced = method(step.method)
    hyper = announced.resolved_in(bundle.manifest.hyper)
    merged = announced.merge(lambda: gathered.statistics, rule, hyper)
    return next_global(state, announced, merged, round=step.round, hyper=hyper)


def _evaluate(site: SiteWorkers, fleet: Fleet, places: Sequence[int], state: GlobalState | None) -> list[Evaluation]:
    evaluations = [back.evaluation for back in _turns(site, fleet, evaluate, state, places)]
    return [evaluation for evaluation in evaluations if evaluation is not None]


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
