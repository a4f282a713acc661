"""The extractor for colour photos that the package `protofleet-photos` ships: where it is.

It is a bundle of a method that trains nothing, with two placeholders as classes. A fleet's own bundle is made of it by
`protofleet export --backbone photos`, without torch. The package is a folder of this repository (`photos/`), a wheel of
its own, and the extra `photos`. In a checkout the folder itself is taken.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command

__all__ = ["PHOTOS", "has_photos", "photos_bundle"]

PHOTOS = "photos"  # what `--backbone` calls it
_PACKAGE, _FILE = "protofleet_photos", "photos.bundle"
_CHECKOUT = Path(__file__).resolve().parents[2] / "photos" / _PACKAGE


def photos_bundle() -> Path:
    """The bundle of the shipped extractor.

    Raises:
        UsageError: the package is not installed.
    """
    found = _installed() or _CHECKOUT / _FILE
    if not found.is_file():
        raise UsageError(
            "the extractor for photos",
            expected="the package protofleet-photos",
            got="none installed",
            hint=f"{install_command('photos')}, or --backbone FILE.bundle",
        )
    return found


def has_photos() -> bool:
    """Whether the shipped extractor is here."""
    return (_installed() or _CHECKOUT / _FILE).is_file()


def _installed() -> Path | None:
    """The installed package's file. The package itself is not run."""
    spec = importlib.util.find_spec(_PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name(_FILE)
