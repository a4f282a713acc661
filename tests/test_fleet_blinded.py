"""A blinded fleet of real processes over a real broker: devices, an aggregator, and a helper that is somebody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fleets import CLASSES, Fleet, run, share

from contract.bundle import read_bundle
from contract.signed import Signer
from contract.sphere import unit_rows
from contract.statistics import FeatureGram
from edge_client.compiled_graphs import CompiledGraphs

DEVICES = 3


def keys(folder: Path, devices: int = DEVICES) -> None:
    """A helper's key, a key of each device, and the helper's list of them."""
    assert run("helper", "--new-key", folder / "helper.key")[0] == 0
    lines = ["[devices]"]
    for index in range(devices):
        secret = bytes([index + 1]) * 32
        (folder / f"d{index}.key").write_bytes(secret)
        lines.append(f'd{index} = "{Signer(secret).public_key.hex()}"')
    (folder / "devices.toml").write_text("\n".join(lines))


def pooled(fleet: Fleet) -> FeatureGram:
    """FFC's sums over all devices' photos."""
    found = read_bundle(fleet.folder / "fleet.bundle")
    total = FeatureGram.zero(CLASSES, found.manifest.features)
    for index in range(DEVICES):
        x, y = share(index, range(CLASSES))
        features = CompiledGraphs(found, 1).shared_extractor().features(x[..., None] if x.ndim == 3 else x)
        total = total.merge(FeatureGram.of(unit_rows(features.astype(np.float64)), y, CLASSES))
    return total
