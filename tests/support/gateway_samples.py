"""A site and the aggregator above it in this process: with sums that stand, or with rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import CLASSES, WIDTH, bundle_file, gram
from aggregator_samples import means as local_means

from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.methods import method as method_of
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution, Status
from protofleet.gateway.rounds_site import RoundsSite
from protofleet.gateway.standing_site import StandingSite
from tests.aggregator.merging.test_exact_sums import means

__all__ = [
    "DEVICES",
    "above_of",
    "born",
    "contribution",
    "drawn",
    "gathered",
    "goes_up",
    "opened",
    "sends",
    "site_of",
    "standing_above",
    "standing_site",
    "steps",
    "whole",
    "whole_of",
]

DEVICES = ("a", "b", "c", "d", "e")
Core = RoundCoordinator | StandingCoordinator


def whole_of(folder: Path, name: str = "fedproto") -> Bundle:
    """A bundle of a method."""
    bundle_file(folder / f"{name}.bundle", name=name)
    return read_bundle(folder / f"{name}.bundle")


@pytest.fixture
def whole(tmp_path: Path) -> Bundle:
    return whole_of(tmp_path)


def drawn(name: str, seed: int) -> Statistic:
    """What a device sends for a method."""
    if name == "fedhkd":
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, CLASSES, 20)
        return HyperKnowledge.of(rng.normal(size=(20, WIDTH)), rng.dirichlet(np.ones(CLASSES), 20), labels, CLASSES)
    return gram(seed) if name == "ffc" else means(seed) if name == "ncm" else local_means(seed)


# ── who is there ────────────────────────────────────────────────────────────────────────────────────────────────────


def standing_above(folder: Path, whole: Bundle, name: str, **options: object) -> StandingCoordinator:
    folder.mkdir(exist_ok=True)
    settings = Settings(method=name, standing=True, every=60.0, **{"gateway": ("site",), **options})  # type: ignore[arg-type]
    store = DurableStore(folder / "above.sqlite", whole.sha256, "fleet")
    return standing_sums(store, whole.manifest, whole.sha256, settings, now=0.0)


def standing_site(folder: Path, whole: Bundle, name: str, **options: object) -> StandingSite:
    settings = Settings(method=name, standing=True, every=60.0, **options)  # type: ignore[arg-type]
    store = DurableStore(folder / "site.sqlite", whole.sha256, "fleet")
    return StandingSite(store, whole, settings, now=0.0)


def above_of(
    folder: Path, whole: Bundle, name: str, least: int = 1, max_samples: int = 1_000_000, **options: object
) -> RoundCoordinator:
    folder.mkdir(exist_ok=True)
    chosen = {"min_clients": least, "max_samples": max_samples, "deadline": 100.0, **options}
    settings = Settings(method=name, rounds=3, calibrate=False, gateway=("site",), **chosen)  # type: ignore[arg-type]
    store = DurableStore(folder / "above.sqlite", whole.sha256, "fleet")
    return rounds_of(store, whole.manifest, whole.sha256, settings, now=0.0)


def site_of(folder: Path, whole: Bundle, **options: object) -> RoundsSite:
    """As `protofleet gateway` makes it: no share of a site's samples is too large."""
    folder.mkdir(exist_ok=True)
    store = DurableStore(folder / "site.sqlite", whole.sha256, "fleet")
    return RoundsSite(store, whole, Settings(**{"max_share": 1.0, **options}), now=0.0)  # type: ignore[arg-type]


def opened(
    folder: Path, whole: Bundle, name: str, here: tuple[str, ...] = (), beside: tuple[str, ...] = (), **options: object
) -> tuple[RoundCoordinator, RoundsSite]:
    """Above a round is open, and on the site, too, with some devices there and some beside the gateway."""
    above, site = above_of(folder, whole, name, **options), site_of(folder, whole)  # type: ignore[arg-type]
    born(above, "site", *beside)
    born(site.core, *here)
    steps(above)
    site.follow(above.announcement(), None, 0.0)
    steps(site.core)
    return above, site


# ── what happens ────────────────────────────────────────────────────────────────────────────────────────────────────


def born(core: RoundCoordinator, *devices: str, now: float = 0.0) -> None:
    for device in devices:
        core.status(device, encode(Status(True, device.encode().ljust(8), 1)), now)


def steps(core: Core, now: float = 0.0) -> list[object]:
    found = []
    while (step := core.advance(now, 1000.0 + now)) is not None:
        found.append(step)
    return found


def contribution(core: Core, whole: Bundle, statistic: Statistic, generation: int = 0) -> bytes:
    """To what is asked for now."""
    a = core.announcement()
    made = Contribution.of(
        statistic,
        run=core.parts.run,
        round=generation or a.round,
        method=a.method,
        bundle=whole.sha256,
        extractor=whole.extractor(method_of(a.method)),
        standing="present" if a.phase == "standing" else None,
    )
    return encode(made, "f32")


def sends(
    core: Core, whole: Bundle, device: str, statistic: Statistic | None = None, generation: int = 0
) -> list[Decision]:
    """What a device is told; its statistic is one of `DEVICES` where none is given."""
    made = drawn(core.method.name, DEVICES.index(device)) if statistic is None else statistic
    return core.take([(device, contribution(core, whole, made, generation))], 0.0)


def gathered(site: RoundsSite, whole: Bundle, *devices: str) -> list[object]:
    """These answer the open round; what is due then."""
    for device in devices:
        sends(site.core, whole, device)
    return steps(site.core)


def goes_up(site: RoundsSite, a: Announcement) -> bytes:
    record = site.closed
    assert record is not None
    return encode(site.contribution(a, record))
