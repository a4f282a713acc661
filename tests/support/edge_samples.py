"""What the device's tests share: the shipped images, a small slice of them for one device, and announcements."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.methods import method
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal, _rounds_done
from protofleet.edge_client.privacy.elapsed_time import Moment, moment
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.standing.standing_sums import StandingSums
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

FASHION = Path(__file__).parents[2] / "lab" / "data" / "fashion_mnist"
FASHION_LABELS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
RUN = bytes.fromhex("0badcafe")
_GRAPHS: dict[bytes, CompiledGraphs] = {}
_READ: dict[tuple[object, ...], LocalData] = {}  # decoding all of them takes half a second


def fashion(
    bundle: Bundle, count: int, classes: tuple[int, ...], *, purpose: str = "train", seed: int = 0
) -> LocalData:
    """`count` of the shipped images, drawn from some classes."""
    m = bundle.manifest
    key = purpose, m.labels, m.input_shape
    if key not in _READ:
        _READ[key] = load_data(FASHION / f"{purpose}.parquet", m, purpose="test")
    whole = _READ[key]
    rows = np.flatnonzero(np.isin(whole.y, classes))
    chosen = np.random.default_rng(seed).choice(rows, count, replace=False)
    return LocalData(whole.x[chosen], whole.y[chosen])


def announcement(bundle: Bundle, number: int = 1, method: str | None = None, **fields: object) -> Announcement:
    """An open round of this bundle."""
    named = {"run": RUN, "round": number, "phase": "open", "method": method or bundle.manifest.method}
    return Announcement(**{**named, "bundle": bundle.sha256, **fields})  # type: ignore[arg-type]


def graphs_of(bundle: Bundle) -> CompiledGraphs:
    """Graphs of a bundle that devices of this process share: sessions of its own cost each a tenth of a second."""
    return _GRAPHS.setdefault(bundle.sha256, CompiledGraphs(bundle, keep=True))


def releases(
    folder: Path, bundle: Bundle, policy: Policy | None = None, *, now: Callable[[], Moment] = moment
) -> Releases:
    """What a device's releases pass, with a new ledger in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    ledger, m = Ledger(folder / f"ledger-{os.urandom(4).hex()}.sqlite"), bundle.manifest
    return Releases(policy or Policy(), ledger, fleet="fleet", own=method(m.method), hyper=m.hyper, now=now)


def sums_of(device: Device, journal: Journal) -> StandingSums:
    """The standing sums of a device, as a process that has just started has them."""
    return StandingSums(device, journal, "pi-1", releases(journal.directory, device._bundle))


def rounds_done(journal: Journal, method: str | None = None) -> int:
    """How many rounds of a method, or of all, were committed, of whatever run."""
    with journal._guard():
        return _rounds_done(journal._db, method)
