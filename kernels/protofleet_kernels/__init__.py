"""Operators of ONNX Runtime for a training step, as one library: where it lies, what it is, and what it takes here.

ONNX Runtime loads it (`SessionOptions.register_custom_ops_library`); nothing of it is Python. The library chooses its
loops by what the processor can do: `baseline`, `avx2` or `avx512` on x86-64, `neon` on aarch64.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

__all__ = ["__version__", "library", "loops", "sha256"]

__version__ = "0.1.0"


def library() -> Path:
    """Where the library lies."""
    return Path(__file__).with_name("libprotofleet_kernels.so")


def loops() -> str:
    """The set of loops that it takes on this processor."""
    function = ctypes.CDLL(str(library())).protofleet_kernels_loops
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


def sha256() -> str:
    """Of the library's bytes, in hex."""
    return hashlib.sha256(library().read_bytes()).hexdigest()
