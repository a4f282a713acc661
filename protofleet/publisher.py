"""Answers to whoever listens: the lines of JSON that `protofleet predict --json` writes, on a topic of a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contract.errors import LinkError
from contract.json_output import json_line
from edge_client.data.decode import Broken
from edge_client.predictor import Answers
from edge_client.publisher import LinePublisher, Target

__all__ = ["SCHEMA", "Publisher", "facts"]

SCHEMA = "protofleet.predict/1"


class Publisher:
    """Publishes answers at QoS 1, each at least once; a context manager, which waits for them at its end.

    Args:
        target: `mqtt://[user[:password]@]host[:port]/TOPIC`, or `mqtts://…`; no topic below `pf/`, the fleets' place.
        top: how many classes are told of each answer.
        most: how many answers may wait while the broker is away; beyond, the oldest are dropped.
        ca, cert, key: PEM files for `mqtts://`.
        log: takes a line when the broker comes or goes, and when answers are dropped.

    Raises:
        ProtofleetError: no such address or topic.
    """

    def __init__(
        self,
        target: str | Target,
        *,
        top: int = 3,
        most: int = 1_000,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        if isinstance(target, str):
            target = Target.parse(target, ca_file=ca, cert_file=cert, key_file=key)
        self._top, self._lines = top, LinePublisher(target, most=most, log=log)

    def put(self, name: str, answer: Answers | Broken) -> None:
        """Have the answer about one image published; returns at once.

        Raises:
            ProtofleetError: the broker has refused us for good.
        """
        self._lines.put(json_line(facts(name, answer, self._top)).encode())

    def close(self, patience_s: float = 10.0) -> None:
        """Wait until the broker has all, at most so long.

        Raises:
            ProtofleetError: it has not.
        """
        left = self._lines.close(patience_s)
        if left:
            target = self._lines.target
            raise LinkError(f"{left:,} answers were not published on {target}", expected="a broker that takes them")

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._lines.close(1.0)


def facts(name: str, answer: Answers | Broken, top: int) -> dict[str, Any]:
    """What a line says of one image: its best classes, or why it cannot be read."""
    about: dict[str, Any] = {"schema": SCHEMA, "photo": name}
    if isinstance(answer, Broken):
        return about | {"error": answer.why}
    best = [{"label": label, "score": score} for label, score in answer.top(0, top)]
    return about | {
        "label": None if answer.unknown[0] else answer.labels[0],
        "unknown": bool(answer.unknown[0]),
        "novelty": float(answer.novelty[0]),
        "global_version": answer.version,
        "top": best,
    }
