"""Run one federation that averages weights: rounds, when to measure, and what to do after the last.

`Measures` says what is measured beside training. `run_algorithm` returns one `AveragingRecord` for each round. The last
record has the closings (`lab/algorithms/head_calibration.py`) and the personalised accuracies
(`lab/engine/evaluation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Value
from protofleet.contract.names import known
from protofleet.edge_client.data import LocalData
from protofleet.lab.algorithms.base import Algorithm
from protofleet.lab.engine.checkpoint import Checkpoint, after_round, past_rounds
from protofleet.lab.engine.deployed import Course, OnDevice, RoundRecord
from protofleet.lab.engine.evaluation import PERSONAL, AveragingRecord, assess, close, personal_tests
from protofleet.lab.engine.tally import Tally
from protofleet.lab.engine.weight_averaging import Federation, Gathered
from protofleet.lab.training.local_training import EagerModel
from protofleet.lab.workers.workers import OneProcess, Workers

__all__ = ["CLOSINGS", "Measures", "run_algorithm"]

CLOSINGS = ("ffc", "ccvr")


@dataclass(frozen=True)
class Measures:
    """What to measure, and what to do after the last round.

    Attributes:
        closings: names from `CLOSINGS`.
        personal: names from `protofleet.lab.engine.evaluation.PERSONAL`. They need local tests.
        evaluate_last: number of last rounds that are always measured, whatever `evaluate_every` is.
        fresh: whether models are also tested right after training, on the test images of their client's own classes.
    """

    closings: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    evaluate_last: int = 1
    fresh: bool = False

    def __post_init__(self) -> None:
        for option, given, table in (("closings", self.closings, CLOSINGS), ("personal", self.personal, PERSONAL)):
            for name in given:
                known(table, name, option)


# arguments: the terms of one federation, by name
def run_algorithm(
    algorithm: type[Algorithm],
    model: EagerModel,
    shares: Sequence[LocalData],
    test: LocalData,
    course: Course,
    hyper: Mapping[str, Value],
    *,
    batch: int,
    local_tests: Sequence[LocalData] | None = None,
    measures: Measures | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_device: OnDevice | None = None,
    checkpoint: Checkpoint | None = None,
    workers: Workers | None = None,
) -> list[RoundRecord]:
    """Train `model` in place by rounds of local training and merging.

    Args:
        shares: each client's samples. A client without samples takes no part.
        test: images that every client's model is tested on.
        course: rounds, sampling and seed; `calibrate` adds FFC to the closings.
        hyper: resolved hyper-parameters of `algorithm`.
        batch: B.
        local_tests: each client's own test samples; None for none.
        on_round: called with each round's record, also with those before an interruption.
        workers: where clients train and answer; None for this process.

    Raises:
        MethodError: training diverges.
        UsageError: personal measures without local tests, or a checkpoint of another run.
    """
    measures = measures or Measures()
    local_tests = local_tests if local_tests is not None else [LocalData(test.x[:0], test.y[:0]) for _ in shares]
    if measures.personal and not any(len(local_test) for local_test in local_tests):
        raise UsageError("personal", expected="samples held back for a local test", got="none", hint="--local-test 0.2")
    wanted = tuple(dict.fromkeys([*measures.closings, *(["ffc"] if course.calibrate else [])]))
    # Gram sums and class Gaussians only add up over one extractor.
    wanted = wanted if algorithm.centres is None else ()
    federation = Federation(algorithm, model, shares, course, hyper, batch=batch, local_tests=local_tests, test=test)
    records, kept = past_rounds(checkpoint, AveragingRecord, on_round)
    if kept is not None:
        federation.restore(kept)
    with federation.at(workers or OneProcess()):
        for record in _rounds(federation, len(records) + 1, measures, wanted, on_device):
            records.append(record)
            after_round(records, checkpoint, federation.state, on_round)
    return records


def _rounds(
    federation: Federation, first: int, measures: Measures, closings: Sequence[str], on_device: OnDevice | None
) -> Iterator[AveragingRecord]:
    """Run the rounds from `first` on, and measure those that are due."""
    course = federation.course
    for number in range(first, course.rounds + 1):
        last, sent = number == course.rounds, {}
        due = number % course.evaluate_every == 0 or number > course.rounds - max(measures.evaluate_last, 1)
        gathered = federation.run_round(number, on_device=on_device, ask=due, fresh=due and measures.fresh)
        tally = gathered.trained
        if due:
            heads, sent = close(federation, closings) if last and closings else ([], {})
            assess(federation, number, tally, heads)
        if last and measures.personal:
            personal_tests(federation, measures.personal, number + 1, tally)
        federation.load(0)
        yield _record(number, gathered, tally, sent)


def _record(number: int, gathered: Gathered, tally: Tally, closing_bytes: dict[str, int]) -> AveragingRecord:
    return AveragingRecord(
        round=number,
        method="average",
        participants=len(gathered.outcomes),
        loss=gathered.loss,
        uplink_bytes=float(np.mean(gathered.uplink_bytes)) if gathered.uplink_bytes else 0.0,
        own_classes=tally.means("own_classes"),
        all_classes=tally.means("all_classes"),
        local_test=tally.means("local_test"),
        trained=tally.means("trained"),
        fresh=tally.means("fresh"),
        personal=tally.means("personal"),
        spread=tally.spread(),
        clients=tally.clients(),
        per_class=tally.per_class(),
        calibration=tally.calibration(),
        closing_bytes=closing_bytes,
    )
