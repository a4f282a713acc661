"""A client's side of a federation that averages weights: what is done with its samples, wherever that is computed.

A `Bench` is the site (`lab/engine/workers.py`): one network and all clients' samples. `Start` is what all clients of a
round have in common, `Turn` what is one client's own, and the functions below are the tasks: to train, and to answer.
They leave nothing behind that a later one could see: each puts into the network all that it needs. What comes and goes
are tensors and arrays of the processor, wherever the network lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from contract.answers import Answer
from contract.methods import Value
from contract.statistics import FeatureGram
from edge_client.data import LocalData
from edge_client.device import round_seed
from export.weights import put_tensors
from lab.algorithms import RULES
from lab.algorithms.base import Algorithm, State
from lab.algorithms.head_calibration import client_gram, head_by_ffc, head_by_sgd
from lab.engine.local_training import EagerModel, Fitted, train_eager
from lab.engine.tally import Tally

__all__ = ["Bench", "Left", "Start", "Turn", "ask", "ask_held", "gram_of", "moved", "personalise", "summarise", "train"]

Answers = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Start:
    """What a round's clients have in common.

    Attributes:
        number: of the round.
        lr: of the clients.
        centres: each model's shared weights.
        fixed: what else the network holds: a head that the server moves, counts of batches.
        algorithm: the state of the algorithm.
        heads: further ways of answering.
        asked: whether a model that was just trained is asked about its client's held-back samples.
        fresh: whether it is also asked about the test images of its client's own classes.
        personal: of `lab.engine.evaluation.PERSONAL`.
    """

    number: int
    lr: float
    centres: list[State]
    fixed: State
    algorithm: dict[str, Any]
    heads: Sequence[tuple[str, Answer]] = ()
    asked: bool = False
    fresh: bool = False
    personal: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Turn:
    """What is one client's own.

    Attributes:
        centre: whose weights it starts from.
        kept: tensors that stay with it.
        told: what its rule tells it.
        others: of clients that have the same model, itself among them.
    """

    client: int
    centre: int
    kept: State
    told: Any = None
    others: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Left:
    """What a client's training leaves: its weights, those it keeps, its statistic, and how it answered just then."""

    state: State
    kept: State
    fitted: Fitted
    statistic: Any
    tally: Tally


class Bench:
    """A network, and every client's samples.

    Args:
        shares, held: what each client trains on, and keeps for its own test.
        test: images that every model is asked about.
        hyper: settled.
        batch: B.
        run: 4 bytes; with a client's name and the round, the seed of what is random.

    Attributes:
        shared: names of the tensors that are averaged; of the others some are kept by each client.
    """

    def __init__(
        self,
        algorithm: type[Algorithm],
        model: EagerModel,
        shares: Sequence[LocalData],
        hyper: Mapping[str, Value],
        *,
        batch: int,
        run: bytes,
        held: Sequence[LocalData] | None = None,
        test: LocalData | None = None,
    ) -> None:
        self.model, self.shares, self.hyper, self.batch, self.run = model, shares, hyper, batch, run
        self.held = held if held is not None else [LocalData(share.x[:0], share.y[:0]) for share in shares]
        self.test = test
        self.algorithm = algorithm(*model.head_weight.shape, hyper, len(shares))
        floats = model.floats()
        self.shared = [name for name in floats if algorithm.kept is None or not name.startswith(algorithm.kept)]
        trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in set(self.shared))
        self._rule = RULES[str(hyper["base"])](hyper, trained, len(shares))
        self._start: Start | None = None

    def load(self, start: Start, turn: Turn) -> None:
        """Put the client's present weights into the network: its centre's, those it keeps, and what is fixed."""
        if start is not self._start:
            self.algorithm.restore(start.algorithm)
            self._start = start
        put_tensors(self.model, {**start.fixed, **start.centres[turn.centre], **turn.kept})

    def fit(self, start: Start, turn: Turn) -> Fitted:
        """Train the client's present model on its samples, in the network in place."""
        self.load(start, turn)
        return train_eager(
            self.model,
            self.shares[turn.client],
            self.algorithm.loss(),
            self.hyper,
            epochs=int(self.hyper["epochs"]),
            batch=self.batch,
            lr=start.lr,
            seed=round_seed(client_name(turn.client), self.run, start.number),
            guide=self.algorithm.guide(),
            correct=self._rule.correction(*moved((turn.told, start.centres[turn.centre]), self.model.device)),
        )

    def answers(
        self, x: NDArray[np.uint8], heads: Sequence[tuple[str, Answer]]
    ) -> tuple[Answers, NDArray[np.floating]]:
        """Answers (N,) to images by the network as it stands, by way of answering, and the head's logits (N, C)."""
        features = self.model.features(x)
        logits = self.model.logits(features)
        head = np.asarray(logits.argmax(axis=1), dtype=np.int64)
        found = {"head": head, **self.algorithm.answers(features), **{way: answer(features) for way, answer in heads}}
        scale = self.model.head_scale
        return found, logits if scale is None else logits * float(scale.detach())

    def ask_held(self, client: int, part: str, tally: Tally, heads: Sequence[tuple[str, Answer]] = ()) -> None:
        """Ask the network as it stands about the client's held-back samples."""
        self._ask(self.held[client], part, tally, heads)

    def ask_own(self, client: int, part: str, tally: Tally) -> None:
        """Ask the network as it stands about the test images of the client's own classes."""
        if self.test is not None:
            own = np.isin(self.test.y, np.unique(self.shares[client].labelled.y))
            self._ask(LocalData(self.test.x[own], self.test.y[own]), part, tally, ())

    def _ask(self, data: LocalData, part: str, tally: Tally, heads: Sequence[tuple[str, Answer]]) -> None:
        if not len(data):
            return
        answers, logits = self.answers(data.x, heads)
        tally.add_error(part, "head", logits, data.y)
        for way, found in answers.items():
            tally.add(part, way, found, data.y)


def client_name(client: int) -> str:
    """As devices are called."""
    return f"device-{client + 1}"


def moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on that device, which dictionaries, lists and tuples may hold."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, device) for each in value)
    return value


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(bench: Bench, start: Start, turn: Turn) -> Left:
    """A client's turn in a round."""
    fitted, tally = bench.fit(start, turn), Tally()
    if start.asked:
        bench.ask_held(turn.client, "trained", tally)
    if start.fresh:
        bench.ask_own(turn.client, "fresh", tally)
    floats = bench.model.floats()
    state = {name: floats[name].clone() for name in bench.shared}
    kept = {name: floats[name].clone() for name in turn.kept}
    rng = np.random.default_rng(round_seed(f"{client_name(turn.client)}-side", bench.run, start.number))
    own = bench.shares[turn.client].labelled
    statistic = None if bench.algorithm.afterwards else bench.algorithm.summarise(bench.model, own, rng)
    return Left(state, kept, fitted, statistic, tally)


def summarise(bench: Bench, start: Start, turn: Turn) -> Any:
    """A client's statistic by the weights that it has just received."""
    bench.load(start, turn)
    rng = np.random.default_rng(round_seed(f"{client_name(turn.client)}-side", bench.run, start.number))
    return bench.algorithm.summarise(bench.model, bench.shares[turn.client].labelled, rng)


def ask(bench: Bench, start: Start, turn: Turn) -> Tally:
    """A model's answers to the test images, for each of the clients that have it."""
    bench.load(start, turn)
    tally, test = Tally(), bench.test
    if test is None or not len(test):
        return tally
    answers, logits = bench.answers(test.x, start.heads)
    for client in turn.others:
        own = np.isin(test.y, np.unique(bench.shares[client].labelled.y))
        tally.add_error("all_classes", "head", logits, test.y)
        tally.add_error("own_classes", "head", logits[own], test.y[own])
        for way, found in answers.items():
            tally.add("all_classes", way, found, test.y)
            tally.add("own_classes", way, found[own], test.y[own])
    return tally


def ask_held(bench: Bench, start: Start, turn: Turn) -> Tally:
    """A client's present model, asked about what the client has held back."""
    bench.load(start, turn)
    tally = Tally()
    bench.ask_held(turn.client, "local_test", tally, start.heads)
    return tally


def gram_of(bench: Bench, start: Start, turn: Turn) -> FeatureGram:
    """FFC's sums of a client's samples."""
    bench.load(start, turn)
    share = bench.shares[turn.client].labelled
    return client_gram(bench.model.features(share.x), share.y, len(bench.model.head_weight))


def personalise(bench: Bench, start: Start, turn: Turn) -> Tally:
    """Fit a client's model, or only its head, to its own samples once more, and ask about its held-back ones."""
    hyper, classes, tally = bench.hyper, len(bench.model.head_weight), Tally()
    share, held = bench.shares[turn.client].labelled, bench.held[turn.client]
    bench.load(start, turn)
    seen, asked = bench.model.features(share.x), bench.model.features(held.x)
    heads: dict[str, Answer] = {}
    if "head-sgd" in start.personal:
        lr, momentum, epochs = float(hyper["lr"]), float(hyper["momentum"]), int(hyper["epochs"])
        fitted = head_by_sgd(
            bench.model, seen, share.y, lr=lr, momentum=momentum, epochs=epochs, seed=start.number + turn.client
        )
        heads["head-sgd/head"] = fitted
    if "head-ffc" in start.personal:
        heads["head-ffc/linear"] = head_by_ffc(seen, share.y, classes, hyper)
    for way, head in heads.items():
        tally.add("personal", way, head(asked), held.y)
    if "fit" in start.personal:
        bench.fit(start, turn)
        answers, logits = bench.answers(held.x, ())
        tally.add_error("personal", "fit/head", logits, held.y)
        for way, found in answers.items():
            tally.add("personal", f"fit/{way}", found, held.y)
    return tally
