"""A refused connection is made again, whatever happens while it is made."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from brokers import free_port

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.link import Address, Failed, Link
from protofleet.edge_client.answers.camera_answers import CameraAnswers, OwnAnswers
from protofleet.edge_client.cameras.sources import camera_of
from protofleet.edge_client.home_assistant import house as rooms
from protofleet.edge_client.home_assistant.discovery import Topics
from protofleet.edge_client.home_assistant.house import House, Shown
from protofleet.edge_client.page.device_page import DevicePage, Owned
from protofleet.edge_client.photos.photo_ring import PhotoRing, basis_of
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

BUNDLE = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"


def test_a_connection_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, path = read_bundle(BUNDLE), tmp_path / "ledger.sqlite"
    ring = PhotoRing(tmp_path, basis_of(bundle.manifest))
    answers = OwnAnswers(tmp_path, bundle, CompiledGraphs(bundle))
    camera = CameraAnswers(camera_of(f"folder:{tmp_path}"), answers, ring, every_s=5.0)
    made: list[Link] = []

    def link(house: House, usual=House._made_link) -> Link:
        made.append(usual(house))
        if len(made) == 2:
            raise OSError("too many open files")
        return made[-1]

    monkeypatch.setattr(rooms, "_AGAIN_S", 0.05)
    monkeypatch.setattr(House, "_made_link", link)
    with Ledger(path) as ledger:
        page = DevicePage(
            Owned(
                name="porch",
                fleet="fleet",
                directory=tmp_path,
                manifest=bundle.manifest,
                ring=ring,
                camera=camera,
                ledger=ledger,
                ledger_path=path,
                cost=str,
                basis=str,
                on_change=lambda: None,
            )
        )
        shown = Shown(Topics("fleet", "porch"), bundle.manifest.labels, "0", lambda: 0, 1, photo=False)
        house = House(Address.parse(f"mqtt://127.0.0.1:{free_port()}"), shown, camera, page, ring, ledger)
        house.start()
        made[0]._events.put(Failed(LinkError("refused")))  # as a broker does that knows no such password
        until = time.monotonic() + 60
        while len(made) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(made) == 3
        assert house._thread.is_alive()
        house.stop()
    made[1].close(0.0)
    ring.close()
