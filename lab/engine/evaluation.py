"""Measures how well the models of a federation answer, by part:

    all_classes   the whole test set, by each client's present model: one number where all share one
    own_classes   the test images of each client's own classes
    local_test    each client's own held-back samples, by its present model
    trained       the same samples, by the model the client had just trained, before anything was merged
    fresh         the test images of each client's own classes, by the model the client had just trained
    personal      the same samples after the last round: `fit/…`, trained once more; `head-sgd/…` and `head-ffc/…`, only
                  the head fitted, to the client's own samples

Each figure is a mean of the clients' accuracies, by way of answering: `head`, `prototype`, and, at the end, the
closings `linear` (FFC) and `ccvr`. Clients without such samples are left out of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protofleet.contract.heads.answers import Answer
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.lab.algorithms.head_calibration import calibrated_head, ccvr_bytes, ccvr_head, ffc_bytes
from protofleet.lab.engine.client_training import ask, ask_local_test, gram_of, personalise
from protofleet.lab.engine.deployed import RoundRecord
from protofleet.lab.engine.tally import Tally
from protofleet.lab.engine.weight_averaging import Federation
from protofleet.lab.workers.workers import in_order

__all__ = ["PERSONAL", "AveragingRecord", "assess", "close", "personal_tests"]

PERSONAL = ("fit", "head-sgd", "head-ffc")


@dataclass(frozen=True)
class AveragingRecord(RoundRecord):
    """A round of a federation that averages weights. The module explains the parts.

    Attributes:
        spread: standard deviation over clients, by `part/way`.
        closing_bytes: bytes that one client sends once for each closing.
    """

    local_test: dict[str, float] = field(default_factory=dict)
    trained: dict[str, float] = field(default_factory=dict)
    fresh: dict[str, float] = field(default_factory=dict)
    personal: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    closing_bytes: dict[str, int] = field(default_factory=dict)


def assess(federation: Federation, number: int, tally: Tally, heads: Sequence[tuple[str, Answer]] = ()) -> None:
    """Test every client's present model: on all test images, on those of its own classes, and on its local test."""
    start = replace(federation.start(number), heads=heads)
    groups = [list(filter(federation.takes_part, group)) for group in federation.groups()]
    models = [replace(federation.turn(group[0]), others=group) for group in groups if group]
    test = federation.bench.test
    for answered in in_order(federation.workers, ask, start, models if test is not None and len(test) else ()):
        tally.extend(answered)
    tested = [
        federation.turn(client) for group in groups for client in group if len(federation.bench.local_tests[client])
    ]
    for answered in in_order(federation.workers, ask_local_test, start, tested):
        tally.extend(answered)


def close(federation: Federation, names: Sequence[str]) -> tuple[list[tuple[str, Answer]], dict[str, int]]:
    """The closings' heads over the common backbone, and one client's bytes for each, by way of answering."""
    classes, width = federation.model.head_weight.shape
    shares = {client: share for client, share in enumerate(federation.shares) if len(share.labelled)}
    heads: list[tuple[str, Answer]] = []
    sent = {}
    if "ffc" in names:
        total, turns = FeatureGram.zero(classes, width), map(federation.turn, shares)
        for gram in in_order(federation.workers, gram_of, federation.start(federation.course.rounds), turns):
            total = total.merge(gram)
        heads.append(("linear", calibrated_head(total, federation.hyper)))
        sent["linear"] = ffc_bytes(classes, width)
    if "ccvr" in names:
        federation.load(0)
        heads.append(
            ("ccvr", ccvr_head(federation.model, list(shares.values()), federation.hyper, federation.course.seed))
        )
        sent["ccvr"] = ccvr_bytes(classes, width)
    return heads, sent


def personal_tests(federation: Federation, names: Sequence[str], number: int, tally: Tally) -> None:
    """Fit each client's model, or only its head, to its own samples once more, and test it on its held-back ones."""
    start = replace(federation.start(number), personal=names)
    clients = [
        n for n, share in enumerate(federation.shares) if len(federation.bench.local_tests[n]) and len(share.labelled)
    ]
    turns = [replace(federation.turn(client), told=federation.told(client)) for client in clients]
    for answered in in_order(federation.workers, personalise, start, turns):
        tally.extend(answered)
