"""How well the models of a federation answer: on whose images, and by whose model.

    all_classes   the whole test set, by each client's present model: one number where all share one
    own_classes   the test images of each client's own classes
    local_test    each client's own held-back samples, by its present model
    trained       the same samples, by the model the client had just trained, before anything was merged
    personal      the same samples after the last round: `fit/…`, trained once more; `head-sgd/…` and `head-ffc/…`, only
                  the head fitted, to the client's own samples

Each is a mean over clients of each client's accuracy, by way of answering: `head`, `prototype`, and, at the end, the
closings `linear` (FFC) and `ccvr`. Clients without such samples are left out of that mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contract.answers import Answer
from edge_client.data import LocalData
from lab.algorithms.head_calibration import (
    calibrated_head,
    ccvr_bytes,
    ccvr_head,
    ffc_bytes,
    head_by_ffc,
    head_by_sgd,
)
from lab.engine.deployed import RoundRecord
from lab.engine.weight_averaging import Federation

__all__ = ["PERSONAL", "AveragingRecord", "Tally", "ask_trained", "assess", "close", "personalise", "ways"]

PERSONAL = ("fit", "head-sgd", "head-ffc")
Answers = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class AveragingRecord(RoundRecord):
    """A round of a federation that averages weights; see the module for what is measured.

    Attributes:
        spread: standard deviation over clients, by `part/way`.
        closing_bytes: what one client sends once for each closing.
    """

    local_test: dict[str, float] = field(default_factory=dict)
    trained: dict[str, float] = field(default_factory=dict)
    personal: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    closing_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Tally:
    """Accuracies gathered client by client."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, part: str, way: str, right: NDArray[np.bool_]) -> None:
        """One client's answers, right or wrong; none are no accuracy."""
        if len(right):
            self.values.setdefault(part, {}).setdefault(way, []).append(float(right.mean()))

    def means(self, part: str) -> dict[str, float]:
        """By way of answering."""
        return {way: float(np.mean(found)) for way, found in self.values.get(part, {}).items()}

    def spread(self) -> dict[str, float]:
        """By part and way, over clients."""
        return {
            f"{part}/{way}": float(np.std(found))
            for part, table in self.values.items()
            for way, found in table.items()
            if len(found) > 1
        }


def ways(federation: Federation, features: NDArray[np.float32]) -> Answers:
    """Answers (N,) to features of the model as it stands."""
    head = np.asarray(federation.model.logits(features).argmax(axis=1), dtype=np.int64)
    return {"head": head} | federation.algorithm.answers(features)


def assess(
    federation: Federation,
    test: LocalData,
    held: Sequence[LocalData],
    tally: Tally,
    closings: Sequence[tuple[str, Answer]] = (),
) -> None:
    """Ask every client's present model about the test images, its own classes among them, and its held-back ones."""
    for group in federation.groups():
        federation.load(group[0])
        features = federation.model.features(test.x)
        answers = ways(federation, features) | {way: head(features) for way, head in closings}
        for client in filter(federation.takes_part, group):
            own = np.isin(test.y, np.unique(federation.shares[client].labelled.y))
            for way, found in answers.items():
                right = found == test.y
                tally.add("all_classes", way, right)
                tally.add("own_classes", way, right[own])
            _ask_held(federation, held[client], "local_test", tally, closings)


def close(federation: Federation, names: Sequence[str], seed: int) -> tuple[list[tuple[str, Answer]], dict[str, int]]:
    """The closings' heads over the common backbone, by way of answering, and what each costs one client in bytes."""
    federation.load(0)
    classes, width = federation.model.head_weight.shape
    shares = [share for share in federation.shares if len(share.labelled)]
    heads, sent = [], {}
    if "ffc" in names:
        heads.append(("linear", calibrated_head(federation.model, shares, federation.hyper)))
        sent["linear"] = ffc_bytes(classes, width)
    if "ccvr" in names:
        heads.append(("ccvr", ccvr_head(federation.model, shares, federation.hyper, seed)))
        sent["ccvr"] = ccvr_bytes(classes, width)
    return heads, sent


def personalise(
    federation: Federation, held: Sequence[LocalData], names: Sequence[str], number: int, tally: Tally
) -> None:
    """Fit each client's model, or only its head, to its own samples once more, and ask about its held-back ones."""
    hyper, classes = federation.hyper, len(federation.model.head_weight)
    for client, share in enumerate(each.labelled for each in federation.shares):
        if not len(held[client]) or not len(share):
            continue
        federation.load(client)
        seen, asked = federation.model.features(share.x), federation.model.features(held[client].x)
        heads = {}
        if "head-sgd" in names:
            lr, momentum, epochs = float(hyper["lr"]), float(hyper["momentum"]), int(hyper["epochs"])
            fitted = head_by_sgd(
                federation.model, seen, share.y, lr=lr, momentum=momentum, epochs=epochs, seed=number + client
            )
            heads["head-sgd/head"] = fitted
        if "head-ffc" in names:
            heads["head-ffc/linear"] = head_by_ffc(seen, share.y, classes, hyper)
        for way, head in heads.items():
            tally.add("personal", way, head(asked) == held[client].y)
        if "fit" in names:
            federation.fit(client, number)
            asked = federation.model.features(held[client].x)
            for way, found in ways(federation, asked).items():
                tally.add("personal", f"fit/{way}", found == held[client].y)


def _ask_held(
    federation: Federation, held: LocalData, part: str, tally: Tally, closings: Sequence[tuple[str, Answer]] = ()
) -> None:
    if not len(held):
        return
    features = federation.model.features(held.x)
    answers = ways(federation, features) | {way: head(features) for way, head in closings}
    for way, found in answers.items():
        tally.add(part, way, found == held.y)


def ask_trained(federation: Federation, held: LocalData, tally: Tally) -> None:
    """Ask the model that a client has just trained about the client's held-back samples."""
    _ask_held(federation, held, "trained", tally)
