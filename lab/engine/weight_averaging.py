"""The engine of the federations that average weights: a round is sample → train → merge, for every row of `BASELINES`.

1. `sampled` (contract/sampling.py) says which clients take part, as on devices.
2. Each starts from its centre's weights, with whatever tensors it keeps, trains (`lab/engine/local_training.py`), and
   leaves its weights and the statistic that travels beside them (`lab/algorithms/shared_knowledge.py`).
3. The server merges both (`lab/algorithms/server_rules.py`). With clusters (FeSEM, Xie et al., 2021), the first round's
   weights are divided by k-means; later each participant joins the centre nearest to its new weights (E), and each
   centre becomes its members' average (M).

A federation holds one network; `load` puts a client's present weights into it. `lab/engine/evaluation.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import UsageError
from contract.methods import Value
from contract.sampling import sampled
from edge_client.data import LocalData
from edge_client.device import round_seed
from export.weights import put_tensors
from lab.algorithms.registry import Baseline
from lab.algorithms.server_rules import Outcome, Server, average
from lab.algorithms.shared_knowledge import SIDES, Side
from lab.engine.deployed import Course, OnDevice, run_id
from lab.engine.local_training import EagerModel, Fitted, train_eager

__all__ = ["Federation", "Gathered"]

State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a round brought in.

    Attributes:
        uplink_bytes: by participant, tensors as float32.
    """

    outcomes: list[Outcome]
    uplink_bytes: list[int]

    @property
    def loss(self) -> float | None:
        """Mean over participants, weighted by samples; None where nobody took part."""
        if not self.outcomes:
            return None
        return float(np.average([o.loss for o in self.outcomes], weights=[o.samples for o in self.outcomes]))


class Federation:
    """Clients and a server.

    Args:
        model: its weights are the first global ones; trained in place.
        shares: each client's training samples.
        hyper: settled.
        batch: B.

    Raises:
        UsageError: with more clusters than clients.
    """

    def __init__(
        self,
        baseline: Baseline,
        model: EagerModel,
        shares: Sequence[LocalData],
        course: Course,
        hyper: Mapping[str, Value],
        *,
        batch: int,
    ) -> None:
        self.baseline, self.model, self.shares = baseline, model, shares
        self.course, self.hyper, self.batch = course, hyper, batch
        classes, width = model.head_weight.shape
        self.side: Side | None = SIDES[baseline.side](classes, width, hyper) if baseline.side else None
        floats = model.floats()
        self.shared = [name for name in floats if baseline.kept is None or not name.startswith(baseline.kept)]
        self._first = {name: tensor.clone() for name, tensor in floats.items() if name not in self.shared}
        self._kept: dict[int, State] = {}
        number = int(hyper["clusters"]) if baseline.clusters else 1
        if number > len(shares):
            raise UsageError("clusters", expected=f"up to {len(shares)}, the number of clients", got=number)
        self.centres: list[State] = [{name: floats[name].clone() for name in self.shared} for _ in range(number)]
        trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        self._servers = [Server(hyper, trained) for _ in range(number)]
        self.member = np.zeros(len(shares), dtype=np.int64)
        self._divided = number == 1

    def run_round(
        self, number: int, *, on_device: OnDevice | None = None, on_trained: Callable[[int], None] | None = None
    ) -> Gathered:
        """One round.

        Args:
            number: from 1.
            on_device: called before each client's turn.
            on_trained: called with a participant's number while the model holds its own trained weights.
        """
        gathered = Gathered([], [])
        for client in range(len(self.shares)):
            if on_device is not None:
                on_device(number, client)
            if not self.takes_part(client) or not sampled(
                _name(client), number, self.course.seed, self.course.fraction
            ):
                continue
            fitted = self.fit(client, number)
            if on_trained is not None:
                on_trained(client)
            self._leave(client, number, fitted, gathered)
        self._merge(gathered.outcomes)
        return gathered

    def takes_part(self, client: int) -> bool:
        """Whether the client has anything to train on."""
        share = self.shares[client]
        return bool(len(share if self.hyper.get("pu_weight") else share.labelled))

    def fit(self, client: int, number: int) -> Fitted:
        """Train the client's present model on its samples, in the model in place, as in round `number`."""
        self.load(client)
        return train_eager(
            self.model,
            self.shares[client],
            self.baseline.objective,
            self.hyper,
            epochs=int(self.hyper["epochs"]),
            batch=self.batch,
            lr=self._lr(number),
            seed=round_seed(_name(client), run_id(self.course.seed), number),
            guide=self.side.guide() if self.side else None,
        )

    def load(self, client: int) -> None:
        """Put the client's present weights into the model: its centre's and those it keeps."""
        own = self._kept.get(client, self._first)
        put_tensors(self.model, {**self.centres[self.member[client]], **own})

    def state(self) -> dict[str, Any]:
        """What later rounds depend on, as plain values and tensors."""
        return {
            "model": self.model.state_dict(),
            "centres": self.centres,
            "kept": self._kept,
            "moments": [server.moments for server in self._servers],
            "member": self.member.tolist(),
            "divided": self._divided,
            "side": None if self.side is None else self.side.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        put_tensors(self.model, state["model"])
        self.centres, self._kept = state["centres"], state["kept"]
        for server, moments in zip(self._servers, state["moments"], strict=True):
            server.moments = moments
        self.member, self._divided = np.array(state["member"], np.int64), state["divided"]
        if self.side is not None:
            self.side.restore(state["side"])

    def groups(self) -> list[list[int]]:
        """Clients whose present models are the same one."""
        if self._first:
            return [[client] for client in range(len(self.shares))]
        return [[int(c) for c in np.flatnonzero(self.member == k)] for k in np.unique(self.member)]

    def _lr(self, number: int) -> float:
        """The rate of a round; a fit after the last one starts the schedule again."""
        lr, rounds = float(self.hyper["lr"]), self.course.rounds
        if self.hyper["schedule"] == "cosine" and number <= rounds:
            lr *= 0.5 * (1.0 + math.cos(math.pi * (number - 1) / rounds))
        return lr

    def _leave(self, client: int, number: int, fitted: Fitted, gathered: Gathered) -> None:
        floats = self.model.floats()
        state = {name: floats[name].clone() for name in self.shared}
        if self._first:
            self._kept[client] = {name: floats[name].clone() for name in self._first}
        sent = 4 * sum(tensor.numel() for tensor in state.values())
        if self.side is not None:
            rng = np.random.default_rng(round_seed(f"{_name(client)}-side", run_id(self.course.seed), number))
            sent += self.side.gather(self.model, self.shares[client].labelled, rng)
        gathered.outcomes.append(Outcome(client, state, len(self.shares[client]), fitted.pull, fitted.loss))
        gathered.uplink_bytes.append(sent)

    def _merge(self, outcomes: list[Outcome]) -> None:
        if len(self.centres) > 1:
            self._assign(outcomes)
        for number, server in enumerate(self._servers):
            mine = [each for each in outcomes if self.member[each.client] == number]
            self.centres[number] = server.step(self.centres[number], mine)
        put_tensors(self.model, self.centres[0])
        if self.side is not None and outcomes:
            self.side.merge()
            self.side.install(self.model)

    def _assign(self, outcomes: list[Outcome]) -> None:
        """FeSEM's E step: which centre is nearest in squared distance of weights."""
        weights = np.stack([_flat(each.state) for each in outcomes])  # (participants, weights)
        clients = [each.client for each in outcomes]
        if not self._divided and len(outcomes) >= len(self.centres):
            self.member[clients] = _kmeans(weights, len(self.centres), self.course.seed)
            for number in range(len(self.centres)):
                mine = [each for each in outcomes if self.member[each.client] == number]
                self.centres[number] = average([each.state for each in mine], [each.samples for each in mine])
            # Clients that were not there begin in the fullest cluster.
            away = np.setdiff1d(np.arange(len(self.shares)), clients)
            self.member[away] = int(np.bincount(self.member[clients]).argmax())
            self._divided = True
        elif self._divided:
            centres = np.stack([_flat(centre) for centre in self.centres])
            self.member[clients] = ((weights[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)


def _name(client: int) -> str:
    return f"device-{client + 1}"


def _flat(state: Mapping[str, Tensor]) -> NDArray[np.float32]:
    return torch.cat([state[name].reshape(-1) for name in sorted(state)]).numpy()


def _kmeans(rows: NDArray[np.float32], number: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans

    return np.asarray(KMeans(number, n_init=5, random_state=seed).fit(rows).labels_, dtype=np.int64)
