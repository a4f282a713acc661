"""Torch's compiler makes a cache directory among the temporary files as soon as it is loaded. This module removes it.

Optimizers, fake tensors and `torch.onnx.export` each load the compiler, `torch._dynamo`, though nothing is compiled.
Here it is loaded first, with a directory that is removed again. A program that compiles uses torch's usual directory.
The garbage collector waits meanwhile: a thousand modules are nothing but objects that stay.
"""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
from functools import cache

__all__ = ["load_dynamo"]

_NAME = "TORCHINDUCTOR_CACHE_DIR"


@cache
def load_dynamo() -> None:
    """Load torch's compiler, and leave nothing of it on the disk."""
    if _NAME in os.environ:  # the user's own place
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        with tempfile.TemporaryDirectory() as place:
            os.environ[_NAME] = place
            importlib.import_module("torch._dynamo")
            importlib.import_module("torch._inductor.compiler_bisector")
    finally:
        del os.environ[_NAME]
        if collects:
            gc.enable()
