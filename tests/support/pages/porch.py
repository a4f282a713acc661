"""A device's page in this process, without a client: photos are kept by hand."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.edge_client.answers.camera_answers import CameraAnswers, OwnAnswers
from protofleet.edge_client.cameras.sources import camera_of
from protofleet.edge_client.page.device_page import DevicePage, Owned
from protofleet.edge_client.photos.kept_photo import KeptPhoto, NewPhoto
from protofleet.edge_client.photos.photo_ring import PhotoRing, basis_of
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs


class Porch:
    """Ring, ledger and page of a device whose camera takes no pictures."""

    def __init__(self, state: Path, bundle: Bundle, ledger: Ledger) -> None:
        self.state, self.ledger, self._bundle = state, ledger, bundle
        self.ring = PhotoRing(state, basis_of(bundle.manifest))
        answers = OwnAnswers(state, bundle, CompiledGraphs(bundle))
        own = Owned(
            name="porch",
            fleet="fleet",
            directory=state,
            manifest=bundle.manifest,
            ring=self.ring,
            camera=CameraAnswers(camera_of(f"folder:{state}"), answers, self.ring, every_s=5.0),
            ledger=ledger,
            ledger_path=state / "ledger.sqlite",
            cost=str,
            basis=str,
            on_change=lambda: None,
        )
        self.page = DevicePage(own)

    def keep(self, *answers: str, is_unknown: bool = False) -> list[str]:
        """A photo for each answer; the ids, in this order."""
        for answer in answers:
            number = self.ring.count()
            rng = np.random.default_rng(number)
            x = rng.integers(0, 256, self._bundle.manifest.input_shape, np.uint8)
            features = np.eye(64, dtype=np.float32)[number]
            new = NewPhoto(x, np.repeat(x, 3, 2), "p", time.time(), features, answer, 0.75, 0.5, is_unknown, 0.5, 1)
            assert self.ring.keep(new)
        self.page.came()
        return [photo.id for photo in self.ring.photos(len(answers))][::-1]

    def photo(self, id: str) -> KeptPhoto:
        found = self.ring.find(id)
        assert found is not None
        return found
