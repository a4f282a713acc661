"""The engine of the federations that average weights: a round is sample → train → merge, whatever the algorithm.

1. `sampled` (contract/sampling.py) says which clients take part, as on devices.
2. Each starts from its model's weights, with whatever tensors it keeps, trains (`lab/engine/client_training.py`, in
   this process or in another, `workers.py`), and leaves its weights and what travels beside them.
3. The server takes these in the clients' order, and merges both.

What differs from one algorithm to the next are the hooks of `lab/algorithms/base.py`. A federation is the server's
side; it holds one network, and `load` puts a client's present weights into it. `lab/engine/evaluation.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from contract.errors import UsageError
from contract.methods import Value
from contract.sampling import sampled
from edge_client.data import LocalData
from export.weights import put_tensors
from lab.algorithms import RULES
from lab.algorithms.base import Algorithm, Outcome, State
from lab.engine.client_training import Bench, Left, Start, Turn, client_name, summarise, train
from lab.engine.deployed import Course, OnDevice, run_id
from lab.engine.local_training import EagerModel
from lab.engine.tally import Tally
from lab.engine.workers import OneProcess, Settled, Workers, in_order

__all__ = ["Federation", "Gathered"]


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a round brought in.

    Attributes:
        uplink_bytes: by participant, tensors as float32.
        trained: how models that had just been trained answered, where that was asked.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    uplink_bytes: list[int] = field(default_factory=list)
    trained: Tally = field(default_factory=Tally)

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
        held: each client's own test samples; none when left out.
        test: images that models are asked about.

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
        held: Sequence[LocalData] | None = None,
        test: LocalData | None = None,
    ) -> None:
        run = run_id(course.seed)
        self.bench = Bench(algorithm, model, shares, hyper, batch=batch, run=run, held=held, test=test)
        self.model, self.shares, self.course, self.hyper = model, shares, course, hyper
        self.algorithm = algorithm(*model.head_weight.shape, hyper, len(shares))
        floats = model.floats()
        self._first = {name: tensor.clone() for name, tensor in floats.items() if name not in self.bench.shared}
        self._kept: dict[int, State] = {}
        number = int(hyper[algorithm.centres]) if algorithm.centres else 1
        if number > len(shares):
            raise UsageError(str(algorithm.centres), expected=f"up to {len(shares)}, the number of clients", got=number)
        self.centres: list[State] = [{name: floats[name].clone() for name in self.bench.shared} for _ in range(number)]
        trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in set(self.bench.shared))
        rule = RULES[str(hyper["base"])]
        self._rules = [rule(hyper, trained, len(shares)) for _ in range(number)]
        self.member = np.zeros(len(shares), dtype=np.int64)
        self.fixed = {name: tensor.clone() for name, tensor in model.tensors().items() if name not in floats}
        self._at: Settled | None = None

    @contextmanager
    def at(self, workers: Workers) -> Iterator[None]:
        """Within, clients train and answer there; else in this process."""
        with workers.settle(self.bench) as self._at:
            try:
                yield
            finally:
                self._at = None

    @property
    def workers(self) -> Settled:
        """Whoever computes what clients do."""
        if self._at is None:
            with OneProcess().settle(self.bench) as here:
                return here
        return self._at

    def run_round(
        self, number: int, *, on_device: OnDevice | None = None, ask: bool = False, fresh: bool = False
    ) -> Gathered:
        """One round.

        Args:
            number: from 1.
            on_device: called before the first client's turn and after each, with the round and how many have had
                theirs.
            ask: whether each model is asked about its client's held-back samples when it has just been trained.
            fresh: and about the test images of its client's own classes.
        """
        course, gathered = self.course, Gathered()
        there = [
            client
            for client in range(len(self.shares))
            if self.takes_part(client) and sampled(client_name(client), number, course.seed, course.fraction)
        ]
        start = replace(self.start(number), asked=ask, fresh=fresh)

        def on_done(done: int) -> None:  # those that are not sampled have had theirs
            if on_device is not None and done < len(there):
                on_device(number, there[done])

        turns = [replace(self.turn(client), told=self.told(client)) for client in there]
        for client, left in zip(there, in_order(self.workers, train, start, turns, on_done), strict=True):
            self._take(client, left, gathered)
        self._merge(gathered.outcomes)
        if self.algorithm.afterwards:
            found = in_order(self.workers, summarise, self.start(number), map(self.turn, there))
            for place, statistic in enumerate(found):
                gathered.uplink_bytes[place] += self.algorithm.gather(statistic)
        if gathered.outcomes:
            self._merge_statistics()
        return gathered

    def takes_part(self, client: int) -> bool:
        """Whether the client has anything to train on."""
        share = self.shares[client]
        return bool(len(share if self.hyper.get("pu_weight") else share.labelled))

    def start(self, number: int) -> Start:
        """What the clients of a round have in common."""
        return Start(number, self._lr(number), list(self.centres), dict(self.fixed), self.algorithm.state())

    def turn(self, client: int) -> Turn:
        """What is one client's own."""
        return Turn(client, int(self.member[client]), self._kept.get(client, self._first))

    def load(self, client: int) -> None:
        """Put the client's present weights into the model: its centre's and those it keeps."""
        put_tensors(self.model, {**self.fixed, **self.centres[self.member[client]], **self.turn(client).kept})

    def state(self) -> dict[str, Any]:
        """What later rounds depend on, as plain values and tensors."""
        return {
            "model": self.model.tensors(),
            "centres": self.centres,
            "kept": self._kept,
            "rules": [rule.state() for rule in self._rules],
            "member": self.member.tolist(),
            "algorithm": self.algorithm.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        put_tensors(self.model, state["model"])
        self.fixed = {name: t.clone() for name, t in self.model.tensors().items() if name in self.fixed}
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

    def told(self, client: int) -> Any:
        """What its rule tells a client."""
        return self._rules[self.member[client]].told(client)

    def _take(self, client: int, left: Left, gathered: Gathered) -> None:
        if self._first:
            self._kept[client] = left.kept
        centre, fitted = self.member[client], left.fitted
        sent = 4 * sum(tensor.numel() for tensor in left.state.values())
        sent += self._rules[centre].trained(client, self.centres[centre], left.state, fitted)
        sent += 0 if self.algorithm.afterwards else self.algorithm.gather(left.statistic)
        gathered.outcomes.append(Outcome(client, left.state, len(self.shares[client]), fitted.pull, fitted.loss))
        gathered.uplink_bytes.append(sent)
        gathered.trained.extend(left.tally)

    def _merge(self, outcomes: list[Outcome]) -> None:
        if len(self.centres) > 1 and outcomes:
            self.algorithm.assign(outcomes, self.centres, self.member, self.course.seed)
        for number, rule in enumerate(self._rules):
            mine = [each for each in outcomes if self.member[each.client] == number]
            self.centres[number] = rule.merge(self.centres[number], mine)
        put_tensors(self.model, {**self.fixed, **self.centres[0]})

    def _merge_statistics(self) -> None:
        self.algorithm.merge()
        self.algorithm.install(self.model)
        self.fixed |= {name: t.clone() for name, t in self.model.tensors().items() if name in self.fixed}
