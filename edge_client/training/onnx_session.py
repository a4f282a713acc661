"""ONNX Runtime sessions for a small board: the one place that sets their options.

Every session of the device is made here, so that threads, memory and errors are decided once:

- One thread unless told otherwise, and no spinning, because a waiting board must not burn its battery. With several
  threads, idle ones look for work for 20 µs before they sleep, while a run goes on: some nodes of a step end before a
  sleeping thread is awake (docs/decisions/213).
- No memory pattern: the pattern reserves every intermediate of a training step at once, the arena alone reuses them
  (docs/decisions/020: the pattern costs 24 MB of peak on the default network and gains no time).
- No blocked layouts for training: they pay where weights can be packed beforehand, and cost memory where they change.
- Weights are given as external initializers when the session is made. So the graph file holds none, and ONNX Runtime
  still folds, fuses and prepacks them (docs/bundle.md).
- A session reads no file. `read_bundle` has refused every graph that would. As a second protection the session gets a
  folder that cannot exist. (Without it, a model loaded from bytes may read below the working directory.)

A session is on the CPU unless another provider is asked for. Another provider computes in float32 (no TF32, no half
precision). If it fails, when it is opened or later, the CPU takes over and a line says so. ONNX Runtime's own silent
fall-back is switched off.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.native_kernels import register_kernels
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import BundleError
from protofleet.contract.names import named
from protofleet.edge_client.hardware.providers import PROVIDERS, Choice

__all__ = [
    "CPU",
    "SPIN_US",
    "Provider",
    "Providers",
    "Running",
    "give_back",
    "open_session",
    "providers_built_in",
]

logger = logging.getLogger(__name__)

SPIN_US = 20  # in which a thread looks for work before it sleeps; 0: none
_SMALLEST = (  # y = |x|, (1,) each: ModelProto of IR 10 and opset 20
    b"\x08\x0a\x3a\x32\x0a\x0b\x0a\x01x\x12\x01y\x22\x03Abs\x12\x01gZ\x0f\x0a\x01x\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01"
    b"b\x0f\x0a\x01y\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01B\x02\x10\x14"
)
_FATAL_ONLY = 4
_NO_FOLDER = "/dev/null/no-folder"


class Running(Protocol):
    """What can be run: a session of ONNX Runtime, or one that falls back."""

    def run(self, outputs: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[Any]:
        """The named outputs for these inputs."""
        ...


@dataclass(frozen=True)
class Provider:
    """An execution provider to open a session on.

    Attributes:
        name: of `protofleet.edge_client.hardware.providers.PROVIDERS`.
        engines: where TensorRT keeps what it has compiled; nowhere when None.
        falls_back: whether the CPU takes over when the provider fails.
    """

    name: str = "cpu"
    engines: Path | None = None
    falls_back: bool = False

    def settings(self, threads: int) -> list[tuple[str, dict[str, str]]]:
        """What ONNX Runtime is asked for, in order of preference.

        Raises:
            UsageError: there is no provider of that name.
        """
        asked = [PROVIDERS[name] for name in (self.name, *named(PROVIDERS, self.name, "provider").below)]
        return [(provider.runtime_name, provider.options(threads, self.engines)) for provider in asked]


CPU = Provider()


def providers_built_in() -> tuple[str, ...]:
    """The providers, by our names, that this ONNX Runtime was built with; whether they work is another question."""
    built_in = ort.get_available_providers()
    return tuple(name for name, provider in PROVIDERS.items() if provider.runtime_name in built_in)


def open_session(
    graph: bytes,
    name: str,
    *,
    threads: int = 1,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    training: bool = False,
    provider: Provider = CPU,
    trace: str = "",
) -> tuple[Running, list[ort.OrtValue]]:
    """A session of `graph`, and the weight values that must live as long as it does.

    Args:
        graph: an ONNX model.
        name: what an error calls it, e.g. `features.onnx`.
        threads: within an operator.
        weights: initializers that the graph names but does not hold.
        training: the weights are inputs that change at every run.
        provider: where it runs.
        trace: the beginning of a file's path, to which ONNX Runtime writes what each operator took.

    Raises:
        BundleError: when ONNX Runtime cannot load the graph or a weight does not fit it; or, where there is no
            fall-back, when the provider fails.
    """
    _make_shared_parts()
    values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)) for value in (weights or {}).values()]

    def opened(chosen: Provider) -> ort.InferenceSession:
        options = _options(threads, training)
        if trace:
            options.enable_profiling, options.profile_file_prefix = True, trace
        try:
            register_kernels(options, graph)
            if values:
                options.add_external_initializers(list(weights or {}), values)
            return _session(graph, options, chosen.settings(threads))
        except ORT_ERRORS as error:
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot load {name}",
                expected=f"a graph and weights that fit each other{'' if chosen.name == 'cpu' else f', {chosen.name}'}",
                got=error,
                hint="exporting the bundle anew, or a newer onnxruntime",
            ) from None

    if provider.name == "cpu" or not provider.falls_back:
        return opened(provider), values
    return _FallingBack(lambda on: opened(on), provider, name), values


def give_back(session: Running, outputs: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> bool:
    """Give back the memory that earlier runs of a session needed, and that none of now does.

    ONNX Runtime's arena grows to the largest run and keeps that. It gives it back at the end of a run, when asked. So
    this runs once more; the smallest input costs the least.

    Args:
        outputs, feed: of that run.

    Returns:
        False where nothing is kept, or can be given back: other providers, and processors of 32 bits.
    """
    if not isinstance(session, ort.InferenceSession):
        return False
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    try:
        session.run(outputs, feed, options)
    except ORT_ERRORS:
        return False
    return True


@functools.cache
def _make_shared_parts() -> None:
    """Make what ONNX Runtime makes once for all sessions, by opening the smallest one.

    It is 1 MB in thousands of pieces, side by side. Made with a large session, it lies between that session's pieces,
    and the pages around it cannot be given back (docs/decisions/169).
    """
    _session(_SMALLEST, _options(1, training=False), CPU.settings(1))


def _options(threads: int, training: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    if training:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = _FATAL_ONLY  # what fails is raised; its copy on standard error helps nobody
    spins = threads > 1 and SPIN_US > 0 and _knows_a_limit()
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")  # once no run is going on
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NO_FOLDER)
    return options


def _knows_a_limit() -> bool:
    """Whether this ONNX Runtime can be told for how long to spin; an older one would for a millisecond and more."""
    return tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 26)


def _session(
    graph: bytes, options: ort.SessionOptions, settings: list[tuple[str, dict[str, str]]]
) -> ort.InferenceSession:
    """A session on the first of these providers, or an error: ONNX Runtime would go on without it, and print."""
    wanted = settings[0][0]
    if wanted not in ort.get_available_providers():
        raise RuntimeError(f"this build has no {wanted}")
    session = ort.InferenceSession(graph, options, providers=settings, enable_fallback=0)
    if session.get_providers()[0] != wanted:
        raise RuntimeError(f"{wanted} could not be loaded: its libraries are missing, or of another version")
    return session


class _FallingBack:
    """A session on another provider than the CPU, until that fails; from then on on the CPU."""

    def __init__(self, opened: Callable[[Provider], Running], provider: Provider, name: str) -> None:
        self._opened, self._provider, self._name = opened, provider, name
        try:
            self._session = opened(provider)
        except BundleError as error:
            self._fall_back(error.got or error)

    def run(self, outputs: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[Any]:
        """As `ort.InferenceSession.run`."""
        try:
            return self._session.run(outputs, feed)
        except ORT_ERRORS as error:
            if self._provider.name == "cpu":
                raise
            self._fall_back(error)
            return self._session.run(outputs, feed)

    def _fall_back(self, error: object) -> None:
        logger.warning(f"{self._name}: {self._provider.name} failed, cpu takes over ({error})")
        self._provider = CPU
        self._session = self._opened(CPU)


@dataclass(frozen=True)
class Providers:
    """The choice as sessions are opened with it: see `Choice` for the uses."""

    choice: Choice = field(default_factory=Choice)
    engines: Path | None = None

    def of(self, name: str) -> Provider:
        """A provider by name, which falls back to the CPU."""
        return CPU if name == "cpu" else Provider(name, self.engines, falls_back=True)
