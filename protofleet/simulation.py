"""A federation in one call: what `protofleet lab run` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contract.methods import DEFAULT
from lab.data.partition import Partition
from lab.engine.deployed import Course, RoundRecord
from lab.engine.experiment import Experiment, run_experiment
from lab.engine.workers import open_workers
from lab.method_names import usual_rounds

__all__ = ["simulate"]


def simulate(
    method: str = DEFAULT,
    data: str = "fashion_mnist_subset",
    *,
    clients: int = 5,
    rounds: int | None = None,
    backbone: str | Sequence[str] = "small_cnn",
    partition: str = "dirichlet",
    alpha: float = 0.5,
    samples: int = 0,
    fraction: float = 1.0,
    batch: int = 32,
    seed: int = 0,
    calibrate: bool | None = None,
    hyper: Mapping[str, object] | None = None,
    jobs: int = 1,
    engine: str = "processes",
    address: str | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    **options: Any,
) -> list[RoundRecord]:
    """One record for each round; accuracies as fractions, by way of answering.

    Args:
        method: one of `protofleet lab list`.
        data: a shipped data set, images as `protofleet client --data` takes them, or a name of the Hub.
        clients: how many devices the data is divided among.
        rounds: of the method; 5 unless said otherwise, 1 where it trains nothing.
        backbone: as `protofleet export` takes it; several are dealt to the devices in turn.
        partition, alpha: who holds what, see `protofleet lab run --help`.
        samples: training samples in all, drawn at random; 0 for every one.
        fraction: of the devices, sampled in each round.
        calibrate: end with FFC; with one backbone, unless said otherwise.
        hyper: hyper-parameters that differ from the method's defaults.
        jobs: clients at a time, each in a process; more than 1 gives the same records. A script of your own then needs
            `if __name__ == "__main__":` around what it does.
        engine, address: `ray`, and HOST:PORT of a cluster, to compute there; see `protofleet lab run --help`.
        on_round: takes each round's record as it comes.
        options: further fields of `lab.engine.experiment.Experiment`.

    Raises:
        ProtofleetError: one line says what was expected, what came, and what to do.
    """
    names = (backbone,) if isinstance(backbone, str) else tuple(backbone)
    several = len(names) > 1
    rounds = usual_rounds(method) if rounds is None else rounds
    experiment = Experiment(
        method=method,
        data=data,
        partition=Partition(partition, clients, alpha, only=samples),
        course=Course(
            usual_rounds(method) if rounds is None else rounds,
            not several if calibrate is None else calibrate,
            fraction,
            seed,
        ),
        backbone=names[0],
        backbones=names if several else (),
        batch=batch,
        hyper=dict(hyper or {}),
        **options,
    )
    with open_workers(engine, jobs, address=address) as workers:
        return run_experiment(
            experiment,
            on_round=on_round,
            on_device=lambda number, turn: None,
            on_text=lambda text: None,
            workers=workers,
        )
