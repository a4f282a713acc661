"""The engine of the federations that average weights: a round is sample → train → merge, whatever the algorithm.

1. `sampled` (contract/sampling.py) says which clients take part, as on devices.
2. Each starts from its model's weights, with whatever tensors it keeps, trains (`lab/engine/local_training.py`), and
   leaves its weights and what travels beside them.
3. The server merges both.

What differs from one algorithm to the next are the hooks of `lab/algorithms/base.py`. A federation holds one network;
`load` puts a client's present weights into it. `lab/engine/evaluation.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.errors import UsageError
from contract.methods import Value
from contract.sampling import sampled
from edge_client.data import LocalData
from edge_client.device import round_seed
from export.weights import put_tensors
from lab.algorithms import RULES
from lab.algorithms.base import Algorithm, Outcome, State
from lab.engine.deployed import Course, OnDevice, run_id
from lab.engine.local_training import EagerModel, Fitted, train_eager

__all__ = ["Federation", "Gathered"]


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
        algorithm: type[Algorithm],
        model: EagerModel,
        shares: Sequence[LocalData],
        course: Course,
        hyper: Mapping[str, Value],
        *,
        batch: int,
    ) -> None:
        self.model, self.shares = model, shares
        self.course, self.hyper, self.batch = course, hyper, batch
        self.algorithm = algorithm(*model.head_weight.shape, hyper, len(shares))
        floats = model.floats()
        self.shared = [name for name in floats if algorithm.kept is None or not name.startswith(algorithm.kept)]
        self._first = {name: tensor.clone() for name, tensor in floats.items() if name not in self.shared}
        self._kept: dict[int, State] = {}
        number = int(hyper[algorithm.centres]) if algorithm.centres else 1
        if number > len(shares):
            raise UsageError(str(algorithm.centres), expected=f"up to {len(shares)}, the number of clients", got=number)
        self.centres: list[State] = [{name: floats[name].clone() for name in self.shared} for _ in range(number)]
        trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in set(self.shared))
        rule = RULES[str(hyper["base"])]
        self._rules = [rule(hyper, trained, len(shares)) for _ in range(number)]
        self.member = np.zeros(len(shares), dtype=np.int64)

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
        centre = self.member[client]
        return train_eager(
            self.model,
            self.shares[client],
            self.algorithm.loss(),
            self.hyper,
            epochs=int(self.hyper["epochs"]),
            batch=self.batch,
            lr=self._lr(number),
            seed=round_seed(_name(client), run_id(self.course.seed), number),
            guide=self.algorithm.guide(),
            correct=self._rules[centre].correction(client, self.centres[centre]),
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
            "rules": [rule.state() for rule in self._rules],
            "member": self.member.tolist(),
            "algorithm": self.algorithm.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        put_tensors(self.model, state["model"])
        self.centres, self._kept = state["centres"], state["kept"]
        for rule, kept in zip(self._rules, state["rules"], strict=True):
            rule.restore(kept)
        self.member = np.array(state["member"], np.int64)
        self.algorithm.restore(state["algorithm"])

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
        centre = self.member[client]
        sent += self._rules[centre].trained(client, self.centres[centre], state, fitted)
        rng = np.random.default_rng(round_seed(f"{_name(client)}-side", run_id(self.course.seed), number))
        sent += self.algorithm.gather(client, self.model, self.shares[client].labelled, rng)
        gathered.outcomes.append(Outcome(client, state, len(self.shares[client]), fitted.pull, fitted.loss))
        gathered.uplink_bytes.append(sent)

    def _merge(self, outcomes: list[Outcome]) -> None:
        if len(self.centres) > 1 and outcomes:
            self.algorithm.assign(outcomes, self.centres, self.member, self.course.seed)
        for number, rule in enumerate(self._rules):
            mine = [each for each in outcomes if self.member[each.client] == number]
            self.centres[number] = rule.merge(self.centres[number], mine)
        put_tensors(self.model, self.centres[0])
        if outcomes:
            self.algorithm.merge()
            self.algorithm.install(self.model)


def _name(client: int) -> str:
    return f"device-{client + 1}"
