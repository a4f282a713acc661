"""The optional wheel protofleet-kernels: whether it is here, and sessions of graphs that use its operators.

A bundle may hold its training step in a form with operators of the domain `protofleet.kernels`. They come from a wheel
that the device's owner has installed, never from a bundle or a broker. Without the wheel the form is passed over
(docs/decisions/245).
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from protofleet.contract.bundle.onnx_runtime import ort

__all__ = ["DOMAIN", "FORM", "Kernels", "installed_kernels", "register_kernels", "runnable_forms", "uses_kernels"]

logger = logging.getLogger(__name__)

DOMAIN = "protofleet.kernels"
FORM = "kernels"  # of the training step: train_step.kernels.onnx


@dataclass(frozen=True)
class Kernels:
    """The wheel as it is installed.

    Attributes:
        library: what ONNX Runtime loads.
        loops: the set of loops that it takes on this processor.
        sha256: of the library, in hex.
    """

    version: str
    library: Path
    loops: str
    sha256: str

    def __str__(self) -> str:
        return f"protofleet-kernels {self.version}, {self.loops}, sha256 {self.sha256}"


@cache
def installed_kernels() -> Kernels | None:
    """The wheel, where it is installed and its library can be loaded.

    A library that is not the file that was installed is not loaded: a part of one ends the process.
    """
    try:
        wheel = importlib.import_module("protofleet_kernels")
        library, sha256 = wheel.library(), wheel.sha256()
        if not _is_as_installed(Path(library).name, sha256):
            logger.warning("protofleet-kernels is not used: %s is not the file that was installed; reinstall", library)
            return None
        return Kernels(wheel.__version__, library, wheel.loops(), sha256)
    except (ImportError, OSError, AttributeError):
        return None


def _is_as_installed(name: str, sha256: str) -> bool:
    """Whether a file of the wheel has the bytes that the installer wrote down; True where it wrote nothing down."""
    try:
        files = importlib.metadata.files("protofleet-kernels") or []
    except importlib.metadata.PackageNotFoundError:
        return True
    written = [file.hash.value for file in files if file.name == name and file.hash is not None]
    return not written or base64.urlsafe_b64encode(bytes.fromhex(sha256)).decode().rstrip("=") in written


def uses_kernels(graph: bytes) -> bool:
    """Whether a graph has operators of the wheel."""
    return DOMAIN.encode() in graph


def register_kernels(options: Any, graph: bytes) -> None:
    """Give a session's options the wheel's operators, if the graph has some and the wheel is here.

    Such a graph runs in the order in which it was written: a weight's gradient right after the gradient that it is made
    of. By itself ONNX Runtime has all of them wait until the end, and keeps what they need (docs/decisions/298).

    Raises:
        RuntimeError: ONNX Runtime cannot load the library.
    """
    kernels = installed_kernels() if uses_kernels(graph) else None
    if kernels is not None:
        options.register_custom_ops_library(str(kernels.library))
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED


def runnable_forms(forms: Mapping[str, bytes]) -> dict[str, bytes]:
    """The further forms of a training step, without that of the wheel where it is not installed."""
    here = installed_kernels() is not None if FORM in forms else True
    return {name: graph for name, graph in forms.items() if here or name != FORM}
