"""What a Flower client gives a method: features and labels of its own samples, computed by its own model.

They are numpy or torch, on any device. None of them is sent. `statistic_of` gives them to the method as one of our
devices gives its samples (`edge_client/training/local_samples.py`). So both are summarised by the same code in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError
from protofleet.contract.sums.statistics import Statistic
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.extractor import GivenFeatures
from protofleet.edge_client.training.local_samples import LocalSamples, own_means
from protofleet.flower.records import Task

__all__ = ["Samples", "statistic_of"]

_GIVEN = {"head.weight": "head", "head.bias": "bias", "prototypes.learned": "prototypes"}


@dataclass(frozen=True, eq=False)
class Samples:
    """A client's labelled samples, as features of its model.

    Attributes:
        features: (N, D) floats, the input of the model's last layer. For NCM, FFC and FedCOF they are of the shared
            extractor. For FedProto, FedPR, FedHP and FedHKD they are of the client's own model, just trained.
        labels: (N,) class numbers, 0 to C − 1.
        head: (C, D) weights of the model's last layer; FedHKD needs them.
        bias: (C,) bias of that layer, if it has one.
        prototypes: (C, D) prototypes that the model has learned; FedHP needs them.

    Each is a numpy array, a torch tensor, or anything that numpy converts to an array.

    Raises:
        DataError: a wrong shape, numbers that are not finite, or labels that are no whole numbers. One line says which.
    """

    features: Any
    labels: Any
    head: Any = None
    bias: Any = None
    prototypes: Any = None

    def __post_init__(self) -> None:
        for name, ndim in (("features", 2), ("head", 2), ("bias", 1), ("prototypes", 2)):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _floats(given, name, ndim))
        object.__setattr__(self, "labels", _labels(self.labels))
        if len(self.labels) != len(self.features):
            raise DataError("labels", expected=f"{len(self.features)}, one for each feature", got=len(self.labels))

    def params(self) -> dict[str, NDArray[np.float32]]:
        """The model's weights that a method reads, under the names of a bundle."""
        given = {ours: getattr(self, name) for ours, name in _GIVEN.items()}
        return {ours: values for ours, values in given.items() if values is not None}


def statistic_of(samples: Samples, task: Task, secret: bytes) -> Statistic:
    """The method's statistic of these samples. Classes with fewer samples than the task's `min_samples` are withheld.

    Args:
        secret: seeds the random groups (FedCOF).

    Raises:
        DataError: the samples have another width or other classes, or lack something that the method needs.
    """
    method, a = task.method, task.announcement
    _check(samples, task)
    data, given = LocalData(samples.features, samples.labels), GivenFeatures(task.width)
    local = LocalSamples(
        data,
        classes=task.classes,
        width=task.width,
        hyper=task.hyper,
        params=samples.params(),
        extractor=lambda name: given,
        own_means=lambda: own_means(given, data, classes=task.classes),
        min_samples=a.min_samples if method.statistic.COUNTED else 1,
        withheld=a.withheld,
        secret=secret,
        what=a.run + a.round.to_bytes(8, "big") + a.bundle + method.name.encode(),
    )
    try:
        return method.summarise(local)
    except KeyError as error:
        name = _GIVEN.get(str(error.args[0]))
        if name is None:
            raise
        raise DataError(
            f"samples for {method.name}", expected=f"{name} of the model", got="none", hint=f"Samples(…, {name}=…)"
        ) from None


def _check(samples: Samples, task: Task) -> None:
    width, classes = task.width, task.classes
    if samples.features.shape[1] != width:
        raise DataError("features", expected=f"(N, {width}), as the server says", got=samples.features.shape)
    if len(samples.labels) and not 0 <= samples.labels.min() <= samples.labels.max() < classes:
        got = f"{samples.labels.min()} to {samples.labels.max()}"
        raise DataError("labels", expected=f"0 to {classes - 1}, as the server says", got=got)
    wanted = {"head": (classes, width), "bias": (classes,), "prototypes": (classes, width)}
    for name, shape in wanted.items():
        given = getattr(samples, name)
        if given is not None and given.shape != shape:
            raise DataError(name, expected=shape, got=given.shape)


def _plain(given: Any, name: str) -> NDArray[Any]:
    """As a numpy array. A tensor is detached and copied to the CPU, without importing torch."""
    for step in ("detach", "cpu", "numpy"):
        given = getattr(given, step)() if hasattr(given, step) else given
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise DataError(name, expected="an array", got=f"{type(given).__name__}: {error}") from None


def _floats(given: Any, name: str, ndim: int) -> NDArray[np.float32]:
    array = _plain(given, name)
    if array.ndim != ndim or array.dtype.kind not in "fiu":
        shape = "(N, D)" if name == "features" else {1: "(C,)", 2: "(C, D)"}[ndim]
        raise DataError(name, expected=f"floats {shape}", got=f"{array.dtype} {array.shape}")
    narrow = array.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise DataError(name, expected="finite numbers", got="others", hint="a smaller learning rate")
    return narrow


def _labels(given: Any) -> NDArray[np.int64]:
    array = _plain(given, "labels")
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise DataError("labels", expected="whole numbers (N,)", got=f"{array.dtype} {array.shape}")
    return array.astype(np.int64)
