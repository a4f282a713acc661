"""ONNX Runtime sessions for a small board: the one place that sets their options.

Every session of the device is made here, so that threads, memory and errors are decided once:

- one thread unless told otherwise, and no spinning: a board that waits must not burn its battery;
- no memory pattern: the pattern reserves every intermediate of a training step at once, the arena alone reuses them
  (docs/decisions/020: the pattern costs 24 MB of peak on the default network and gains no time);
- no blocked layouts for training: they pay where weights can be packed beforehand, and cost memory where they change;
- weights are handed over as external initializers when the session is made, so that the graph file holds none and
  ONNX Runtime still folds, fuses and prepacks them (docs/bundle.md);
- a session reads no file: `read_bundle` has refused every graph that would, and should one come another way, it is
  given a folder that cannot exist. (Without it, a model loaded from bytes may read below the working directory.)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from contract.errors import BundleError
from contract.runtime import ort, ort_errors

__all__ = ["ORT_ERRORS", "open_session"]

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
)
_FATAL_ONLY = 4
_NO_FOLDER = "/dev/null/no-folder"


def open_session(
    graph: bytes,
    name: str,
    *,
    threads: int = 1,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    training: bool = False,
) -> tuple[ort.InferenceSession, list[ort.OrtValue]]:
    """A session of `graph` on the CPU, and the weight values that must live as long as it does.

    Args:
        graph: an ONNX model.
        name: what an error calls it, e.g. `features.onnx`.
        threads: within an operator.
        weights: initializers that the graph names but does not hold.
        training: the weights are inputs that change at every run.

    Raises:
        BundleError: when ONNX Runtime cannot load the graph or a weight does not fit it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    if training:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = _FATAL_ONLY  # what fails is raised; its copy on standard error helps nobody
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NO_FOLDER)
    values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)) for value in (weights or {}).values()]
    try:
        if values:
            options.add_external_initializers(list(weights or {}), values)
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"]), values
    except ORT_ERRORS as error:
        raise BundleError(
            f"ONNX Runtime {ort.__version__} cannot load {name}",
            expected="a graph and weights that fit each other",
            got=error,
            hint="exporting the bundle anew, or a newer onnxruntime",
        ) from None
