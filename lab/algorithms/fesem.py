"""FeSEM (Xie et al., 2021): several models, and every client belongs to the one that is nearest to its own weights.

The first round's weights are divided by k-means. Later each participant joins the centre nearest to its new weights,
in squared distance (the E step), and each centre becomes its members' average (M).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofleet.contract.errors import MethodError
from protofleet.contract.methods import Hyper, Value
from protofleet.lab.algorithms.base import CrossEntropy, Outcome, State, average

__all__ = ["FeSEM"]


class FeSEM(CrossEntropy):
    """Several models with a centre each.

    Raises:
        MethodError: with the base scaffold, whose control variates belong to one model.
    """

    name = "fesem"
    summary = "several models, each client in the nearest one's cluster"
    source = "Xie et al., 2021"
    centres = "clusters"
    hyper: ClassVar = {"clusters": Hyper(3, "the paper tries 2 to 6", low=1, high=1000)}

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value], clients: int) -> None:
        if hyper["base"] == "scaffold":
            raise MethodError("base", expected="one without a client state of its own", got="scaffold with clusters")
        self._divided = int(hyper["clusters"]) == 1

    def assign(self, outcomes: Sequence[Outcome], models: list[State], member: NDArray[np.int64], seed: int) -> None:
        weights = np.stack([_flat(outcome.state) for outcome in outcomes])  # (participants, weights)
        clients = [outcome.client for outcome in outcomes]
        if not self._divided and len(outcomes) >= len(models):
            member[clients] = _kmeans(weights, len(models), seed)
            for number in range(len(models)):
                mine = [outcome for outcome in outcomes if member[outcome.client] == number]
                models[number] = average([outcome.state for outcome in mine], [outcome.samples for outcome in mine])
            # Clients that were not there begin in the fullest cluster.
            away = np.setdiff1d(np.arange(len(member)), clients)
            member[away] = int(np.bincount(member[clients]).argmax())
            self._divided = True
        elif self._divided:
            centres = np.stack([_flat(model) for model in models])
            member[clients] = ((weights[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)

    def state(self) -> dict[str, Any]:
        return {"divided": self._divided}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._divided = state["divided"]


def _flat(state: Mapping[str, Tensor]) -> NDArray[np.float32]:
    return torch.cat([state[name].reshape(-1) for name in sorted(state)]).numpy()


def _kmeans(rows: NDArray[np.float32], number: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans

    return np.asarray(KMeans(number, n_init=5, random_state=seed).fit(rows).labels_, dtype=np.int64)
