"""Publishes answers on a topic of a broker, as the lines of JSON that `protofleet predict --json` writes."""

from __future__ import annotations

from typing import Any

from protofleet.contract.errors import LinkError
from protofleet.contract.files.json_output import json_line
from protofleet.edge_client.answers.answer_publisher import LinePublisher, Target
from protofleet.edge_client.answers.predictor import Answers
from protofleet.edge_client.data.decode import Broken

__all__ = ["SCHEMA", "Publisher", "facts"]

SCHEMA = "protofleet.predict/1"


class Publisher:
    """Publishes answers at QoS 1, each at least once. As a context manager it waits for them at the end of the block.

    Args:
        target: `mqtt://[user[:password]@]host[:port]/TOPIC`, or `mqtts://…`. Topics below `pf/` are refused,
            since they belong to the fleets.
        top: how many classes of each answer are published.
        most: how many answers may wait while the broker is away. Beyond that the oldest are dropped.
        ca, cert, key: PEM files for `mqtts://`.

    Raises:
        ProtofleetError: an invalid address or topic.
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
    ) -> None:
        if isinstance(target, str):
            target = Target.parse(target, ca_file=ca, cert_file=cert, key_file=key)
        self._top, self._lines = top, LinePublisher(target, most=most)

    def put(self, name: str, answer: Answers | Broken) -> None:
        """Queue the answer about one image for publishing; returns at once.

        Raises:
            ProtofleetError: the broker has refused us for good.
        """
        self._lines.put(json_line(facts(name, answer, self._top)).encode())

    def close(self, patience_s: float = 10.0) -> None:
        """Wait until the broker has all answers, at most `patience_s` seconds.

        Raises:
            ProtofleetError: the broker does not have all of them by then.
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
    """The content of one line: the best classes of an image, or why it cannot be read."""
    about: dict[str, Any] = {"schema": SCHEMA, "photo": name}
    if isinstance(answer, Broken):
        return about | {"error": answer.why}
    best: list[dict[str, Any]] = []
    for number in answer.order(0, top):
        probability = None if answer.probabilities is None else float(answer.probabilities[0, number])
        score = float(answer.scores[0, number])
        best.append({"label": answer.names[number], "score": score, "probability": probability})
    return (
        about
        | {
            "label": None if answer.unknown[0] else answer.labels[0],
            "unknown": bool(answer.unknown[0]),
            "probability": best[0]["probability"] if best else None,
            "novelty": float(answer.novelty[0]),
            "global_version": answer.version,
            "top": best,
        }
        | ({} if answer.sets is None else {"set": answer.set_of(0)})
    )
