"""Which Protofleet this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]


def _version() -> str:
    try:
        return version("protofleet")
    except PackageNotFoundError:
        return "(not installed)"


__version__ = _version()
