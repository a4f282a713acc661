"""The clients' side of a federation that averages weights: the tasks on their samples, in any process.

- `Bench` is the site (`lab/workers/workers.py`): one network and all clients' samples.
- `Start` holds the common values of a round's clients. `Turn` holds the values of one client.
- The functions are the tasks: to train, and to answer.

A task leaves no state that a later task could see: each loads all that it needs into the network. Inputs and results
are tensors and arrays on the CPU, wherever the network lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofleet.contract.heads.answers import Answer
from protofleet.contract.methods import Value
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import round_seed
from protofleet.export.backbones.weights import put_tensors
from protofleet.lab.algorithms import RULES
from protofleet.lab.algorithms.base import Algorithm, State
from protofleet.lab.algorithms.head_calibration import client_gram, head_by_ffc, head_by_sgd
from protofleet.lab.engine.tally import Tally
from protofleet.lab.training.local_training import EagerModel, Fitted, train_eager

__all__ = [
    "Bench",
    "Left",
    "Start",
    "Turn",
    "ask",
    "ask_local_test",
    "gram_of",
    "moved",
    "personalise",
    "summarise",
    "train",
]

Answers = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Start:
    """The common values of a round's clients.

    Attributes:
        number: number of the round.
        lr: learning rate of the clients.
        centres: the shared weights of each model.
        fixed: all other tensors of the network: a head that the server moves, counts of batches.
        algorithm: the state of the algorithm.
        heads: further ways of answering.
        asked: whether a model is tested on its client's held-back samples right after training.
        fresh: whether it is then also tested on the test images of its client's own classes.
        personal: names from `protofleet.lab.engine.evaluation.PERSONAL`.
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
    """The values of one client.

    Attributes:
        centre: number of the model that it starts from.
        kept: tensors that stay with the client.
        told: what its rule sends to it.
        others: all clients with the same model, this one included.
    """

    client: int
    centre: int
    kept: State
    told: Any = None
    others: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Left:
    """The result of a client's training: weights to send, weights it keeps, statistic, and test results."""

    state: State
    kept: State
    fitted: Fitted
    statistic: Any
    tally: Tally


class Bench:
    """A network, and the samples of every client.

    Args:
        shares, local_tests: each client's training samples, and its own test samples.
        test: images that every model is tested on.
        hyper: resolved hyper-parameters.
        batch: B.
        run: 4 bytes. With a client's name and the round they seed all random numbers.

    Attributes:
        shared: names of the tensors that are averaged.
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
        local_tests: Sequence[LocalData] | None = None,
        test: LocalData | None = None,
    ) -> None:
        self.model, self.shares, self.hyper, self.batch, self.run = model, shares, hyper, batch, run
        self.local_tests = (
            local_tests if local_tests is not None else [LocalData(share.x[:0], share.y[:0]) for share in shares]
        )
        self.test = test
        self.algorithm = algorithm(*model.head_weight.shape, hyper, len(shares))
        floats = model.floats()
        self.shared = [name for name in floats if algorithm.kept is None or not name.startswith(algorithm.kept)]
        trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in set(self.shared))
        self._rule = RULES[str(hyper["base"])](hyper, trained, len(shares))
        self._start: Start | None = None

    def load(self, start: Start, turn: Turn) -> None:
        """Load the client's present weights into the network: its centre's, its own, and the fixed ones."""
        if start is not self._start:
            self.algorithm.restore(start.algorithm)
            self._start = start
        put_tensors(self.model, {**start.fixed, **start.centres[turn.centre], **turn.kept})

    def fit(self, start: Start, turn: Turn) -> Fitted:
        """Train the client's present model on its samples, in place."""
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
        """The loaded network's answers (N,) by way of answering, and the head's logits (N, C)."""
        features = self.model.features(x)
        logits = self.model.logits(features)
        head = np.asarray(logits.argmax(axis=1), dtype=np.int64)
        answers = {"head": head, **self.algorithm.answers(features), **{way: answer(features) for way, answer in heads}}
        scale = self.model.head_scale
        return answers, logits if scale is None else logits * float(scale.detach())

    def ask_local_test(self, client: int, part: str, tally: Tally, heads: Sequence[tuple[str, Answer]] = ()) -> None:
        """Test the loaded network on the client's held-back samples."""
        self._ask(self.local_tests[client], part, tally, heads)

    def ask_own(self, client: int, part: str, tally: Tally) -> None:
        """Test the loaded network on the test images of the client's own classes."""
        if self.test is not None:
            own = np.isin(self.test.y, np.unique(self.shares[client].labelled.y))
            self._ask(LocalData(self.test.x[own], self.test.y[own]), part, tally, ())

    def _ask(self, data: LocalData, part: str, tally: Tally, heads: Sequence[tuple[str, Answer]]) -> None:
        if not len(data):
            return
        answers, logits = self.answers(data.x, heads)
        tally.add_error(part, "head", logits, data.y)
        for way, predicted in answers.items():
            tally.add(part, way, predicted, data.y)


def client_name(client: int) -> str:
    """The client's name, as devices are named."""
    return f"device-{client + 1}"


def moved(value: Any, device: torch.device) -> Any:
    """The value with its tensors moved to the device. They may be in dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    return value


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(bench: Bench, start: Start, turn: Turn) -> Left:
    """Train one client in a round."""
    fitted, tally = bench.fit(start, turn), Tally()
    if start.asked:
        bench.ask_local_test(turn.client, "trained", tally)
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
    """A client's statistic, computed with the weights that it has just received."""
    bench.load(start, turn)
    rng = np.random.default_rng(round_seed(f"{client_name(turn.client)}-side", bench.run, start.number))
    return bench.algorithm.summarise(bench.model, bench.shares[turn.client].labelled, rng)


def ask(bench: Bench, start: Start, turn: Turn) -> Tally:
    """Test a model on the test images, once for each of the clients that have it."""
    bench.load(start, turn)
    tally, test = Tally(), bench.test
    if test is None or not len(test):
        return tally
    answers, logits = bench.answers(test.x, start.heads)
    for client in turn.others:
        own = np.isin(test.y, np.unique(bench.shares[client].labelled.y))
        tally.add_error("all_classes", "head", logits, test.y)
        tally.add_error("own_classes", "head", logits[own], test.y[own])
        for way, predicted in answers.items():
            tally.add("all_classes", way, predicted, test.y)
            tally.add("own_classes", way, predicted[own], test.y[own])
    return tally


def ask_local_test(bench: Bench, start: Start, turn: Turn) -> Tally:
    """Test a client's present model on the samples that the client has held back."""
    bench.load(start, turn)
    tally = Tally()
    bench.ask_local_test(turn.client, "local_test", tally, start.heads)
    return tally


def gram_of(bench: Bench, start: Start, turn: Turn) -> FeatureGram:
    """FFC's sums of a client's samples."""
    bench.load(start, turn)
    share = bench.shares[turn.client].labelled
    return client_gram(bench.model.features(share.x), share.y, len(bench.model.head_weight))


def personalise(bench: Bench, start: Start, turn: Turn) -> Tally:
    """Fit a client's model, or only its head, to its own samples once more, and test it on its held-back ones."""
    hyper, classes, tally = bench.hyper, len(bench.model.head_weight), Tally()
    share, local_test = bench.shares[turn.client].labelled, bench.local_tests[turn.client]
    bench.load(start, turn)
    features, asked = bench.model.features(share.x), bench.model.features(local_test.x)
    heads: dict[str, Answer] = {}
    if "head-sgd" in start.personal:
        lr, momentum, epochs = float(hyper["lr"]), float(hyper["momentum"]), int(hyper["epochs"])
        fitted = head_by_sgd(
            bench.model, features, share.y, lr=lr, momentum=momentum, epochs=epochs, seed=start.number + turn.client
        )
        heads["head-sgd/head"] = fitted
    if "head-ffc" in start.personal:
        heads["head-ffc/linear"] = head_by_ffc(features, share.y, classes, hyper)
    for way, head in heads.items():
        tally.add("personal", way, head(asked), local_test.y)
    if "fit" in start.personal:
        bench.fit(start, turn)
        answers, logits = bench.answers(local_test.x, ())
        tally.add_error("personal", "fit/head", logits, local_test.y)
        for way, predicted in answers.items():
            tally.add("personal", f"fit/{way}", predicted, local_test.y)
    return tally
