"""A client's camera, the photos that it keeps, their page and Home Assistant, put together.

Imported only where there is a camera.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.console.sizes import read_size
from protofleet.contract.page.page_address import read_page
from protofleet.edge_client.answers.camera_answers import CameraAnswers, OwnAnswers
from protofleet.edge_client.cameras.camera import read_crop
from protofleet.edge_client.cameras.sources import camera_of
from protofleet.edge_client.data.learned import Learned, LearnedFile
from protofleet.edge_client.hardware.profile_record import measured_metrics
from protofleet.edge_client.photos.naming import name_proposed
from protofleet.edge_client.photos.photo_ring import PhotoRing, basis_of
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.run.photo_work import PhotoWork
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

if TYPE_CHECKING:
    from protofleet.edge_client.page.device_page import DevicePage, Owned

__all__ = ["start_camera"]


# arguments: what a camera's work is made of, by name
def start_camera(
    settings: ClientSettings,
    policy: Policy,
    bundle: Bundle,
    graphs: CompiledGraphs,
    *,
    directory: Path,
    learned: Learned,
    ledger: tuple[Ledger, Path],
    look: Callable[[], None],
    tells_proposed: bool,
    tells_unknown: bool,
    parts: contextlib.ExitStack,
) -> PhotoWork:
    """Begin to take pictures, and to show them where that is asked for; `parts` ends both.

    Args:
        directory: of the journal.
        ledger: open, and where it lies.
        look: has the client look at its photos.
        tells_proposed, tells_unknown: whether proposed classes, and the share of unknown photos, may be told.

    Raises:
        UsageError: the page's port is taken, or its certificate is none.
        StoreError: the disk refuses.
    """
    manifest = bundle.manifest
    limit_bytes, for_s = read_size(settings.keep_photos, "--keep-photos"), policy.keeps_photos_for_s
    ring = PhotoRing(Path(settings.state), basis_of(manifest), limit_bytes=limit_bytes, for_s=for_s)
    parts.callback(ring.close)
    name_proposed(ring, LearnedFile(Path(settings.state), manifest.labels), manifest)
    work = PhotoWork(ring, learned, manifest.labels, tells_proposed=tells_proposed, tells_unknown=tells_unknown)
    answers = OwnAnswers(directory, bundle, graphs)
    crop = None if settings.crop is None else read_crop(settings.crop)
    source = camera_of(settings.camera or "")
    every_s, on_motion = float(settings.every), settings.on_motion
    camera = CameraAnswers(source, answers, ring, every_s=every_s, crop=crop, on_motion=on_motion)
    parts.callback(camera.stop)
    if settings.page is not None or settings.home_assistant is not None:
        from protofleet.edge_client.page.device_page import DevicePage, Owned

        owned = Owned(
            name=settings.id,
            fleet=settings.fleet,
            directory=Path(settings.state),
            manifest=manifest,
            ring=ring,
            camera=camera,
            ledger=ledger[0],
            ledger_path=ledger[1],
            cost=lambda: work.cost,
            basis=lambda: answers.basis,
            on_change=look,
            tells_proposed=tells_proposed,
            profiled=measured_metrics(Path(settings.state), bundle.sha256, *manifest.extended),
        )
        page = DevicePage(owned)
        listeners = [page.came]
        if settings.page is not None:
            _serve(settings, page, parts)
        if settings.home_assistant is not None:
            listeners.append(_show_at_home(settings, bundle, page, owned, parts))
        camera.on_photo = lambda: _call(listeners)
    camera.start()
    return work


def _call(listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()


def _serve(settings: ClientSettings, page: DevicePage, parts: contextlib.ExitStack) -> None:
    from protofleet.contract.page.page_server import PageServer

    server = PageServer(read_page(settings.page or ""), page, certificate=(settings.page_cert, settings.page_key))
    server.start()
    parts.callback(server.stop)


def _show_at_home(
    settings: ClientSettings, bundle: Bundle, page: DevicePage, owned: Owned, parts: contextlib.ExitStack
) -> Callable[[], None]:
    """Be in Home Assistant; gives what is to be called after each photo."""
    from protofleet.edge_client.home_assistant.discovery import Topics
    from protofleet.edge_client.home_assistant.house import House, Shown
    from protofleet.edge_client.home_assistant.removal import address_of

    shown = Shown(
        topics=Topics(settings.fleet, settings.id),
        classes=bundle.manifest.labels,
        bundle=bundle.sha256.hex()[:12],
        left_bytes=page.left_bytes,
        equal=settings.equal_answers,
        photo=settings.home_assistant_photo,
    )
    house = House(address_of(settings), shown, owned.camera, page, owned.ring, owned.ledger)
    house.start()
    parts.callback(house.stop)
    return house.came
