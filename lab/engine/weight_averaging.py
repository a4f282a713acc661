"""The engine of the federations that average weights: a round is sample → train → merge, whatever the algorithm.

1. `sampled` (contract/wire/sampling.py) decides which clients take part, as on devices.
2. Each client starts from its model's weights and the tensors that it keeps. It trains
   (`lab/engine/client_training.py`), in this process or in another (`workers.py`). It returns its weights and the
   statistic beside them.
3. The server takes them in the clients' order, and merges both.

Algorithms differ only in the hooks of `lab/algorithms/base.py`. A federation is the server's side. It holds one
network, and `load` puts a client's present weights into it. `lab/engine/evaluation.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Value
from protofleet.contract.wire.sampling import sampled
from protofleet.edge_client.data import LocalData
from protofleet.export.backbones.weights import put_tensors
from protofleet.lab.algorithms import RULES
from protofleet.lab.algorithms.base import Algorithm, Outcome, State
from protofleet.lab.engine.client_training import Bench, Left, Start, Turn, client_name, summarise, train
from protofleet.lab.engine.deployed import Course, OnDevice, run_id
from protofleet.lab.engine.tally import Tally
from protofleet.lab.training.local_training import EagerModel
from protofleet.lab.workers.workers import OneProcess, SiteWorkers, Workers, in_order

__all__ = ["Federation", "Gathered"]


@dataclass(frozen=True, eq=False)
class Gathered:
    """The results of a round's clients.

    Attributes:
        uplink_bytes: bytes of each participant, tensors as float32.
        trained: test results of the models right after training, if requested.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    uplink_bytes: list[int] = field(default_factory=list)
    trained: Tally = field(default_factory=Tally)

    @property
    def loss(self) -> float | None:
        """Mean loss over participants, weighted by samples; None without participants."""
        if not self.outcomes:
            return None
        return float(np.average([o.loss for o in self.outcomes], weights=[o.samples for o in self.outcomes]))


class Federation:
    """A federation of clients and a server.

    Args:
        model: its weights are the first global weights. It is trained in place.
        shares: each client's training samples.
        hyper: resolved hyper-parameters.
        batch: B.
        local_tests: each client's own test samples; None for none.
        test: images that models are tested on.

    Raises:
        UsageError: there are more clusters than clients.
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
        local_tests: Sequence[LocalData] | None = None,
        test: LocalData | None = None,
    ) -> None:
        run = run_id(course.seed)
        self.bench = Bench(algorithm, model, shares, hyper, batch=batch, run=run, local_tests=local_tests, test=test)
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
        self._at: SiteWorkers | None = None

    @contextmanager
    def at(self, workers: Workers) -> Iterator[None]:
        """Within the block clients train and answer on these workers; otherwise in this process."""
        with workers.at_site(self.bench) as self._at:
            try:
                yield
            finally:
                self._at = None

    @property
    def workers(self) -> SiteWorkers:
        """The workers that compute the clients' tasks."""
        if self._at is None:
            with OneProcess().at_site(self.bench) as site:
                return site
        return self._at

    def run_round(
        self, number: int, *, on_device: OnDevice | None = None, ask: bool = False, fresh: bool = False
    ) -> Gathered:
        """Run one round.

        Args:
            number: number of the round, from 1.
            on_device: called before the first client's turn and after each, with the round and the number of turns
                done.
            ask: whether each model is tested on its client's held-back samples right after training.
            fresh: whether it is then also tested on the test images of its client's own classes.
        """
        course, gathered = self.course, Gathered()
        clients = [
            client
            for client in range(len(self.shares))
            if self.takes_part(client) and sampled(client_name(client), number, course.seed, course.fraction)
        ]
        start = replace(self.start(number), asked=ask, fresh=fresh)

        def on_done(done: int) -> None:  # those that are not sampled have had theirs
            if on_device is not None and done < len(clients):
                on_device(number, clients[done])

        turns = [replace(self.turn(client), told=self.told(client)) for client in clients]
        for client, left in zip(clients, in_order(self.workers, train, start, turns, on_done), strict=True):
            self._take(client, left, gathered)
        self._merge(gathered.outcomes)
        if self.algorithm.afterwards:
            statistics = in_order(self.workers, summarise, self.start(number), map(self.turn, clients))
            for place, statistic in enumerate(statistics):
                gathered.uplink_bytes[place] += self.algorithm.gather(statistic)
        if gathered.outcomes:
            self._merge_statistics()
        return gathered

    def takes_part(self, client: int) -> bool:
        """Whether the client has samples to train on."""
        share = self.shares[client]
        return bool(len(share if self.hyper.get("pu_weight") else share.labelled))

    def start(self, number: int) -> Start:
        """The common values of the clients of a round."""
        return Start(number, self._lr(number), list(self.centres), dict(self.fixed), self.algorithm.state())

    def turn(self, client: int) -> Turn:
        """The values of one client."""
        return Turn(client, int(self.member[client]), self._kept.get(client, self._first))

    def load(self, client: int) -> None:
        """Load the client's present weights into the model: its centre's, and those that it keeps."""
        put_tensors(self.model, {**self.fixed, **self.centres[self.member[client]], **self.turn(client).kept})

    def state(self) -> dict[str, Any]:
        """All values that later rounds depend on, as plain values and tensors."""
        return {
            "model": self.model.tensors(),
            "centres": self.centres,
            "kept": self._kept,
            "rules": [rule.state() for rule in self._rules],
            "member": self.member.tolist(),
            "algorithm": self.algorithm.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        put_tensors(self.model, state["model"])
        self.fixed = {name: t.clone() for name, t in self.model.tensors().items() if name in self.fixed}
        self.centres, self._kept = state["centres"], state["kept"]
        for rule, kept in zip(self._rules, state["rules"], strict=True):
            rule.restore(kept)
        self.member = np.array(state["member"], np.int64)
        self.algorithm.restore(state["algorithm"])

    def groups(self) -> list[list[int]]:
        """Groups of clients with the same present model."""
        if self._first:
            return [[client] for client in range(len(self.shares))]
        return [[int(c) for c in np.flatnonzero(self.member == k)] for k in np.unique(self.member)]

    def _lr(self, number: int) -> float:
        """The learning rate of a round. A fit after the last round starts the schedule again."""
        lr, rounds = float(self.hyper["lr"]), self.course.rounds
        if self.hyper["schedule"] == "cosine" and number <= rounds:
            lr *= 0.5 * (1.0 + math.cos(math.pi * (number - 1) / rounds))
        return lr

    def told(self, client: int) -> Any:
        """What the client's rule sends to it."""
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
            mine = [outcome for outcome in outcomes if self.member[outcome.client] == number]
            self.centres[number] = rule.merge(self.centres[number], mine)
        put_tensors(self.model, {**self.fixed, **self.centres[0]})

    def _merge_statistics(self) -> None:
        self.algorithm.merge()
        self.algorithm.install(self.model)
        self.fixed |= {name: t.clone() for name, t in self.model.tensors().items() if name in self.fixed}
