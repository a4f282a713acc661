"""How a method's run is read: which way of answering its accuracy means, and what a person calls it.

The demo, its summary, table and report know no method by name; they ask the methods table (`contract/methods.py`), and
here its answers become the ways that `edge_client/evaluate.py` measures, and words.
"""

from __future__ import annotations

from contract.bundle import Manifest
from contract.methods import Method

__all__ = ["SENT", "alone_way", "answers_by", "federated_way", "shares_rounds"]

_INFERENCE = {"nearest-prototype": "prototype", "linear": "linear", "head": "head"}
SENT = {
    "class-means": "class prototypes",
    "learned-prototypes": "the prototypes it had learned",
    "hyper-knowledge": "class means of its features and soft predictions",
    "participation": "only that it had taken part",
    "feature-gram": "FFC sums",
}


def federated_way(row: Method) -> str:
    """The way of answering that is the method's own inference."""
    return _INFERENCE[row.inference]


def alone_way(row: Method, manifest: Manifest) -> str:
    """How a device that hears from nobody answers: by its head, or where there is none, by its own prototypes; for a
    method that trains nothing, by its own ridge head."""
    if not row.trains:
        return federated_way(row)
    return "own_prototype" if manifest.head == "none" else "head"


def answers_by(row: Method) -> str:
    """The method's inference in words."""
    if row.inference == "nearest-prototype":
        return "nearest prototype"
    return "linear head" if row.inference == "linear" else f"{row.heads[0]} head"


def shares_rounds(row: Method) -> bool:
    """Whether something of the others comes back in a round of it: not where it trains nothing, or sends nothing."""
    return row.trains and row.rule is not None
