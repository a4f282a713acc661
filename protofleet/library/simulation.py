"""A federation in one call, as `protofleet lab run` runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protofleet.contract.methods import DEFAULT
from protofleet.lab.data.partition import Partition
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.method_names import usual_rounds
from protofleet.lab.workers.engines import open_workers

__all__ = ["simulate"]


# arguments: a program's `lab run`: by name, with the defaults of the command
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
    """Simulate a federation; returns one record for each round. Accuracies are fractions, by way of answering.

    Args:
        method: one of `protofleet lab list`.
        data: a shipped data set, images as `protofleet client --data` takes them, or a name of the Hub.
        clients: how many devices the data is divided among.
        rounds: rounds of the method. Default: 5, or 1 where the method trains nothing.
        backbone: as `protofleet export` takes it. Several are assigned to the devices in turn.
        partition, alpha: which device holds which samples; see `protofleet lab run --help`.
        samples: number of training samples in all, drawn at random. 0 for all.
        fraction: share of the devices that is sampled in each round.
        calibrate: end with an FFC round. Default: yes where there is one backbone.
        hyper: hyper-parameters that differ from the method's defaults.
        jobs: how many clients run at a time, each in a process. The records do not depend on it. With more than 1, your
            script needs `if __name__ == "__main__":` around its code.
        engine, address: `ray`, and HOST:PORT of a cluster, to compute there; see `protofleet lab run --help`.
        on_round: receives each round's record when the round ends.
        options: further fields of `protofleet.lab.engine.experiment.Experiment`.

    Raises:
        ProtofleetError: one line says what was expected, what was given, and what to do.
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
