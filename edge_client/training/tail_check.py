"""Whether a trained tail is worth having: it is compared with the frozen network on photos that it never trained on.

The frozen network answers with the nearest of the device's own class means, which takes no training at all. The trained
network answers as the device would by itself. If it names fewer of the held-out photos right, the round is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofleet.contract.heads.answers import Answer
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.extractor import Extractor

__all__ = ["Check", "right"]


@dataclass(frozen=True)
class Check:
    """How many of the held-out photos are named right.

    Attributes:
        frozen: by the nearest own class mean of the frozen features.
        trained: by what was trained.
        photos: how many there are.
    """

    frozen: int
    trained: int
    photos: int

    @property
    def is_worse(self) -> bool:
        """Whether training has made the device worse."""
        return self.trained < self.frozen

    def in_words(self) -> str:
        """One line for a person, where it is worse."""
        return (
            f"trained {self.trained / self.photos:.1%} right on {self.photos:,} held-out photos, frozen "
            f"{self.frozen / self.photos:.1%}: weights as before the round"
        )

    def facts(self) -> dict[str, int | bool]:
        """The same by name, for the history."""
        return {
            "held_photos": self.photos,
            "frozen_right": self.frozen,
            "trained_right": self.trained,
            "left_out": self.is_worse,
        }


def right(extractor: Extractor, answer: Answer, held: LocalData) -> int:
    """How many of these photos are named right."""
    return sum(int((answer(features) == held.y[rows]).sum()) for rows, features in extractor.blocks(held.x))
