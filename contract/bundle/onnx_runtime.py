"""The only place that loads ONNX Runtime: `from protofleet.contract.bundle.onnx_runtime import ort`.

- The telemetry of ONNX Runtime is off before it is loaded (`contract/console/telemetry.py`).
- TF32 is off in NVIDIA's libraries, because features are float32 wherever they are computed: otherwise they could not
  be summed. TensorRT has no other switch for it than the environment variable.
- A program that imported onnxruntime before Protofleet has already started the telemetry. Protofleet cannot stop it
  any more, and warns.

A test finds any other file that imports onnxruntime.
"""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from protofleet.contract.console.telemetry import loaded_before

__all__ = ["ORT_ERRORS", "ort", "ort_part"]

ORT_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoModel,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,  # what binding an input or output raises
    ValueError,  # the graph has an input that it is not given
)


def ort_part(name: str) -> ModuleType:
    """A part of the package that is not loaded with it, e.g. `ort_part("quantization")`."""
    return importlib.import_module(f"onnxruntime.{name}")


def _warn_if_late() -> None:
    if not loaded_before("onnxruntime"):
        return
    ort.disable_telemetry_events()  # what it still can do: fewer events
    warnings.warn(
        "onnxruntime was imported before protofleet, so its telemetry has started and may send; "
        "import protofleet's modules first, or set ORT_DISABLE_TELEMETRY=1 before Python starts",
        RuntimeWarning,
        stacklevel=2,
    )


os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # read when a provider's libraries are loaded, with a session
_warn_if_late()
