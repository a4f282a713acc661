"""Divides a data set over clients: one index array for each client.

The general schemes are those of `flwr-datasets`: `iid`, `dirichlet` (each class is spread over the clients by a draw
from Dir(α)), `pathological` (each client holds a fixed number of classes). A client needs `min_classes` classes to
train a classifier, and `min_client_samples` samples. A draw that leaves a client with fewer is repeated with the next
seed.

    shots       FedProto's n-way k-shot: each client draws a number of classes within `ways` ± `ways_spread`, then the
                classes, then `shots` samples of each that no other client has
    quantity    skew of the sizes alone, as in Li et al., ICDE 2022
    source      shift of the features: the clients are assigned to the data sets of `--data A+B` in turn, and each
                holds an even part of its set
    uneven      a Dirichlet draw; each client drops classes with fewer than `min_samples` examples, and its rarest class
                if it still holds all, so that no client has all classes; dropped samples are unused

`only` thins out the whole set first, for example to FedPR's 2,000 samples. `hold_back` sets a part of each client's
samples aside as its own test. `unlabel` hides most of its labels, `mislabelled` makes a liar's of them.

A further scheme is a function that draws it, and its line in `PARTITIONS`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.names import known
from protofleet.edge_client.data import UNLABELLED

__all__ = ["PARTITIONS", "Partition", "Scheme", "hold_back", "liars_of", "mislabelled", "partition", "unlabel"]

_DRAWS = 200
Indices = NDArray[np.int64]
Sources = NDArray[np.int64] | None


@dataclass(frozen=True)
class Partition:
    """How data is divided: the scheme, and the numbers it takes.

    Attributes:
        alpha: Dirichlet concentration; smaller is more uneven. For `dirichlet`, `quantity` and `uneven`.
        classes_per_client: for `pathological`.
        min_samples: a client drops classes with fewer examples. For `uneven`.
        ways, ways_spread, shots: for `shots`.
        only: how many samples are divided in all, drawn without replacement; 0 for every one.
        min_classes, min_client_samples: what every client has at least.
    """

    scheme: str = "dirichlet"
    clients: int = 5
    alpha: float = 0.5
    classes_per_client: int = 3
    min_samples: int = 10
    ways: int = 3
    ways_spread: int = 2
    shots: int = 100
    only: int = 0
    min_classes: int = 2
    min_client_samples: int = 2

    def __post_init__(self) -> None:
        known(PARTITIONS, self.scheme, "partition")
        if self.clients < 1:
            raise UsageError("clients", expected="1 or more", got=self.clients)
        if not 0 < self.alpha < 1e6:
            raise UsageError("alpha", expected="above 0", got=self.alpha)
        one = ("classes_per_client", "ways", "shots", "min_classes", "min_client_samples")
        least = dict.fromkeys(one, 1) | dict.fromkeys(("ways_spread", "only"), 0)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(name, expected=f"{low} or more", got=getattr(self, name))


def partition(
    labels: NDArray[np.int64], spec: Partition, *, seed: int = 0, sources: NDArray[np.int64] | None = None
) -> list[Indices]:
    """Indices into `labels` (N,) for each client, shuffled; every client holds at least `min_classes` classes.

    Args:
        sources: (N,) which data set each sample is of, from 0; for `source`.

    Raises:
        UsageError: `source` of a single one, or of more than there are clients; more classes for each than there are.
        DataError: when no draw gives every client its least, or there are too few samples.
    """
    if spec.only > len(labels):
        raise DataError("only", expected=f"up to {len(labels)}, the training samples", got=spec.only)
    chosen = np.arange(len(labels))
    if spec.only:
        chosen = np.sort(np.random.default_rng(seed).choice(len(labels), spec.only, replace=False))
    taken = None if sources is None else sources[chosen]
    return [chosen[part] for part in _divide(labels[chosen], taken, spec, seed)]


def hold_back(part: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """A client's indices, shuffled and cut: what it trains on, and the `share` that is its own test.

    At least one sample trains; a client with a single sample has no test of its own.
    """
    if not share:
        return part, part[:0]
    shuffled = np.random.default_rng(seed).permutation(part)
    count = min(round(share * len(part)), len(part) - 1)
    return shuffled[count:], shuffled[:count]


def liars_of(clients: int, count: int, seed: int) -> list[int]:
    """The numbers of the clients that lie, `count` of them, drawn by the seed; in order."""
    return sorted(np.random.default_rng([seed, clients]).permutation(clients)[:count].tolist())


def mislabelled(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """A liar's labels (N,): each the next class, and after the last the first. What has no label stays without."""
    return np.where(labels == UNLABELLED, labels, (labels + 1) % classes)


def unlabel(labels: NDArray[np.int64], rate: float, seed: int) -> NDArray[np.int64]:
    """A client's labels, of which only the share `rate` is kept, class by class, and at least one of each; the others
    become `UNLABELLED`."""
    rng, known = np.random.default_rng(seed), np.full_like(labels, UNLABELLED)
    for j in np.unique(labels):
        where = rng.permutation(np.flatnonzero(labels == j))
        known[where[: max(round(rate * len(where)), 1)]] = j
    return known


def _divide(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
    problem, scheme = "", PARTITIONS[spec.scheme]
    for draw in range(_DRAWS):
        try:
            parts = scheme.draw(labels, sources, spec, seed + draw * 1_000_003)
        except ValueError as error:  # flwr-datasets' word for a draw it could not make
            problem = str(error)
            continue
        if any(len(part) < spec.min_client_samples for part in parts):
            problem = f"a client with fewer than {spec.min_client_samples} samples"
        elif any(len(np.unique(labels[part])) < spec.min_classes for part in parts):
            problem = f"a client with fewer than {_count(spec.min_classes)} classes"
        else:
            return parts
    raise DataError(
        f"cannot divide {len(labels)} images over {spec.clients} clients ({spec.scheme})",
        expected=f"at least {_count(spec.min_classes)} classes for every client, and {spec.min_client_samples} samples",
        got=problem,
        hint=scheme.hint,
    )


def _count(number: int) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(number, str(number))


Draw = Callable[[NDArray[np.int64], Sources, Partition, int], list[Indices]]


def _by_flower(make: Callable[[ModuleType, Partition, int], Any], *, shuffled: bool = False) -> Draw:
    """A draw by one of `flwr-datasets`' partitioners."""

    def draw(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
        import datasets

        chosen = make(_flower(), spec, seed)
        table = datasets.Dataset.from_dict({"index": np.arange(len(labels)), "label": labels})
        chosen.dataset = table.shuffle(seed=seed) if shuffled else table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns at each draw it makes again; an impossible one is an error
            return [np.asarray(chosen.load_partition(n)["index"], dtype=np.int64) for n in range(spec.clients)]

    return draw


def _flower() -> ModuleType:
    """Flower's partitioners, without the charts that the package loads beside them: those bring matplotlib, which
    takes seconds and writes a list of fonts into the user's home."""
    charts = "flwr_datasets.visualization"
    if "flwr_datasets" in sys.modules:
        return importlib.import_module("flwr_datasets.partitioner")
    sys.modules[charts] = ModuleType(charts)
    try:
        return importlib.import_module("flwr_datasets.partitioner")
    finally:
        del sys.modules[charts]
        vars(sys.modules["flwr_datasets"]).pop("visualization", None)  # whoever wants the charts can still have them


def _draw_quantity(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
    """A shuffled whole, cut at a Dirichlet draw's proportions."""
    samples, rng = len(labels), np.random.default_rng(seed)
    cuts = np.cumsum(rng.dirichlet([spec.alpha] * spec.clients))[:-1] * samples
    return np.split(rng.permutation(samples), np.rint(cuts).astype(np.int64))


def _draw_sources(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
    """Client n has an even part of the source n, counted round and round."""
    many, rng = 1 if sources is None else int(sources.max()) + 1, np.random.default_rng(seed)
    if sources is None or many < 2:
        raise UsageError("partition source", expected="several data sets", got="one", hint="--data A+B")
    if many > spec.clients:
        raise UsageError("partition source", expected=f"a client for each of {many} data sets", got=spec.clients)
    parts: list[Indices] = [np.zeros(0, np.int64)] * spec.clients
    for source in range(many):
        theirs = range(source, spec.clients, many)
        shuffled = rng.permutation(np.flatnonzero(sources == source))
        for client, part in zip(theirs, np.array_split(shuffled, len(theirs)), strict=True):
            parts[client] = part
    return parts


def _draw_shots(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
    """Each client's classes and samples; a class that runs out is a ValueError."""
    rng = np.random.default_rng(seed)
    left = {int(j): rng.permutation(np.flatnonzero(labels == j)) for j in np.unique(labels)}
    low, high = max(spec.ways - spec.ways_spread, min(2, len(left))), min(spec.ways + spec.ways_spread, len(left))
    if low > high:
        raise ValueError(f"{spec.ways} ways of {len(left)} classes")
    parts = []
    for _ in range(spec.clients):
        drawn = rng.choice(list(left), int(rng.integers(low, high + 1)), replace=False)
        taken = []
        for j in drawn:
            if len(left[j]) < spec.shots:
                raise ValueError(f"fewer than {spec.shots} samples left of class {j}")
            taken.append(left[j][: spec.shots])
            left[j] = left[j][spec.shots :]
        parts.append(rng.permutation(np.concatenate(taken)))
    return parts


def _drop_rare(part: Indices, labels: NDArray[np.int64], min_samples: int) -> Indices:
    classes = int(labels.max()) + 1
    counts = np.bincount(labels[part], minlength=classes)
    kept = counts >= min_samples
    if kept.all():
        kept[int(np.argmin(counts))] = False
    return part[kept[labels[part]]]


# ── the schemes ─────────────────────────────────────────────────────────────────────────────────────────────────────


_draw_iid = _by_flower(lambda flwr, spec, seed: flwr.IidPartitioner(spec.clients), shuffled=True)
_draw_dirichlet = _by_flower(
    lambda flwr, spec, seed: flwr.DirichletPartitioner(
        spec.clients, "label", spec.alpha, min_partition_size=spec.min_client_samples, seed=seed
    )
)
_draw_by_classes = _by_flower(
    lambda flwr, spec, seed: flwr.PathologicalPartitioner(spec.clients, "label", spec.classes_per_client, seed=seed)
)


def _draw_pathological(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
    classes = len(np.unique(labels))
    if spec.classes_per_client > classes:
        raise UsageError(
            "classes_per_client", expected=f"up to {classes}, the data's classes", got=spec.classes_per_client
        )
    return _draw_by_classes(labels, sources, spec, seed)


def _draw_uneven(labels: NDArray[np.int64], sources: Sources, spec: Partition, seed: int) -> list[Indices]:
    drawn = _draw_dirichlet(labels, sources, spec, seed)
    return [_drop_rare(part, labels, spec.min_samples) for part in drawn]


@dataclass(frozen=True)
class Scheme:
    """One way to divide.

    Attributes:
        summary: for `lab list`.
        draw: indices for each client, of labels, sources, a `Partition` and a seed; a ValueError where this seed gives
            none.
        hint: what to try where no seed does.
    """

    summary: str
    draw: Draw
    hint: str = "fewer clients"


_ALPHA = "fewer clients, or a larger alpha"
_CLASSES, _SHOTS = "fewer clients, or fewer classes_per_client", "fewer clients, ways or shots"
PARTITIONS: Mapping[str, Scheme] = MappingProxyType(
    {
        "iid": Scheme("the same mix of classes for every client", _draw_iid),
        "dirichlet": Scheme("each class spread over the clients by Dir(alpha)", _draw_dirichlet, _ALPHA),
        "pathological": Scheme(
            "a fixed number of classes for each client",
            _draw_pathological,
            "fewer clients, or fewer classes_per_client",
        ),
        "shots": Scheme(
            "ways ± ways_spread classes for each client, shots samples of each",
            _draw_shots,
            "fewer clients, ways or shots",
        ),
        "quantity": Scheme("the same mix of classes, sizes by Dir(alpha)", _draw_quantity, _ALPHA),
        "source": Scheme("each client's images from one of several data sets, A+B", _draw_sources),
        "uneven": Scheme("dirichlet without rare classes, and no client has all classes", _draw_uneven, _ALPHA),
    }
)
