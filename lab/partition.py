"""Who holds what: one data set → index arrays, one for each client.

The general schemes are those of `flwr-datasets`: `iid`, `dirichlet` (each class is spread over the clients by a draw
from Dir(α)), `pathological` (each client holds a fixed number of classes). A draw that leaves a client with fewer than
two classes cannot train a classifier there, and is drawn again with the next seed.

The demo's split is `uneven`: a Dirichlet draw, from which each client drops the classes it has fewer than `min_samples`
examples of, and, should it still hold every class, its rarest one: so no device has all classes. What is dropped is
left unused.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import DataError, UsageError, near_names

__all__ = ["PARTITIONS", "Partition", "partition"]

PARTITIONS = {
    "iid": "the same mix of classes for every client",
    "dirichlet": "each class spread over the clients by Dir(alpha)",
    "pathological": "a fixed number of classes for each client",
    "uneven": "dirichlet without rare classes, and no client has all classes: the demo's",
}
_MIN_CLASSES = 2
_DRAWS = 200

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """How data is divided: the scheme, and the numbers it takes.

    Attributes:
        alpha: Dirichlet concentration; smaller is more uneven. For `dirichlet` and `uneven`.
        classes_per_client: for `pathological`.
        min_samples: a client drops classes with fewer examples. For `uneven`.
    """

    scheme: str = "dirichlet"
    clients: int = 5
    alpha: float = 0.5
    classes_per_client: int = 3
    min_samples: int = 10

    def __post_init__(self) -> None:
        if self.scheme not in PARTITIONS:
            raise UsageError(
                "partition", expected="a known scheme", got=self.scheme, hint=near_names(self.scheme, PARTITIONS)
            )
        if self.clients < 1:
            raise UsageError("clients", expected="1 or more", got=self.clients)
        if not 0 < self.alpha < 1e6:
            raise UsageError("alpha", expected="above 0", got=self.alpha)


def partition(labels: NDArray[np.int64], spec: Partition, *, seed: int = 0) -> list[Indices]:
    """Indices into `labels` (N,) for each client, shuffled; every client holds at least two classes.

    Raises:
        DataError: when no draw gives every client two classes.
    """
    problem = ""
    for draw in range(_DRAWS):
        try:
            parts = _draw(labels, spec, seed + draw * 1_000_003)
        except ValueError as error:  # flwr-datasets' word for a draw it could not make
            problem = str(error)
            continue
        if spec.scheme == "uneven":
            parts = [_drop_rare(part, labels, spec.min_samples) for part in parts]
        if all(len(np.unique(labels[part])) >= _MIN_CLASSES for part in parts):
            return parts
        problem = "a client with fewer than two classes"
    raise DataError(
        f"cannot divide {len(labels)} images over {spec.clients} clients ({spec.scheme})",
        expected="at least two classes for every client",
        got=problem,
        hint="fewer clients, or a larger alpha",
    )


def _draw(labels: NDArray[np.int64], spec: Partition, seed: int) -> list[Indices]:
    import datasets
    from flwr_datasets import partitioner as flwr

    table = datasets.Dataset.from_dict({"index": np.arange(len(labels)), "label": labels})
    if spec.scheme == "iid":
        chosen: flwr.Partitioner = flwr.IidPartitioner(spec.clients)
        table = table.shuffle(seed=seed)
    elif spec.scheme == "pathological":
        chosen = flwr.PathologicalPartitioner(spec.clients, "label", spec.classes_per_client, seed=seed)
    else:
        chosen = flwr.DirichletPartitioner(
            spec.clients, "label", spec.alpha, min_partition_size=_MIN_CLASSES, seed=seed
        )
    chosen.dataset = table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns at each draw it makes again; an impossible one is an error below
        return [np.asarray(chosen.load_partition(client)["index"], dtype=np.int64) for client in range(spec.clients)]


def _drop_rare(part: Indices, labels: NDArray[np.int64], min_samples: int) -> Indices:
    classes = int(labels.max()) + 1
    counts = np.bincount(labels[part], minlength=classes)
    kept = counts >= min_samples
    if kept.all():
        kept[int(np.argmin(counts))] = False
    return part[kept[labels[part]]]
