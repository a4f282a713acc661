"""Measure the suite's small graphs on this board and write its device file: `profile --calibrate`.

`edge_client` opens sessions as a device does, `hw_profiles` has the graphs and the fit. Neither torch nor the ONNX
package is needed.

1. Every graph is opened, run until it is warm, then timed some runs. Before each of them 8 MB of other numbers are
   changed for half of the graphs and 64 MB for the others, as a network's other layers do, in pages of the system's
   usual size; and one operator on one
   number is run, so that the way into the runtime is warm, as it is for a network that is run again and again. Whole
   networks and steps among the graphs are run again and again, as a device runs its own.
2. That is done in turns, some minutes apart: what disturbed one turn is unlikely to disturb the next. Of each turn the
   lower quartile stands for a graph, of the turns the least.
3. For one thread the time is that thread's processor time, in which other work on the machine hardly counts; for two it
   is the clock's, beside the processor time of both.
4. The costs are fitted, and graphs that were left out say how wrong they are.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.errors import ProtofleetError, UsageError
from protofleet.contract.files.json_output import write_text
from protofleet.edge_client.hardware.process_metrics import board_name
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.hw_profiles.calibration.fit import datasheet_costs
from protofleet.hw_profiles.calibration.fit_board import fit_board
from protofleet.hw_profiles.calibration.graph_bytes import SmallGraph
from protofleet.hw_profiles.calibration.suite import PARTS, Case, cases, suite_operators
from protofleet.hw_profiles.devices.calibrated import Calibration, calibration_text
from protofleet.hw_profiles.devices.host import cpu_name, cpu_temperature_c, detect_host, governor, throttling
from protofleet.hw_profiles.devices.load import BUSY, Watch

__all__ = ["Measured", "calibrate_board", "check_writable", "device_text", "measure_suite", "timed_run"]

_TURNS = 3
_BUDGET_S = 270.0
_GRAPH_S, _FEWEST, _MOST = 0.12, 3, 25
_COPY_BYTES = 64 << 20
# What stands in for numbers that this machine does not tell; all costs are fitted from there.
_STAND_IN = {"cpu.clock_ghz": 1.5, "cpu.fp32_macs_per_cycle": 4.0, "cpu.int8_macs_per_cycle": 8.0}


@dataclass(frozen=True)
class Measured:
    """Milliseconds of every graph, in the order of `cases`, by number of threads; and what was watched.

    Attributes:
        memory_gb_s: read and written by the fastest of some copies; from there the memory's costs are fitted.
    """

    ms: dict[int, list[float]]
    others: float | None
    throttled: bool | None
    seconds: float
    temperature_c: float | None
    memory_gb_s: float

    @property
    def under_load(self) -> bool:
        return self.others is not None and self.others > BUSY


def check_writable(path: Path) -> None:
    """That the file can be written, before minutes are spent on measuring.

    Raises:
        UsageError: it cannot.
    """
    try:
        existed = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"--calibrate {path}", expected="a file that can be written", got=error.strerror) from None


def calibrate_board(path: Path, *, threads: Sequence[int], progress: Callable[[str], None]) -> Calibration:
    """Measure, fit, and write the device file.

    Raises:
        UsageError: the file cannot be written.
    """
    measured = measure_suite(threads, progress)
    progress("fitting")
    text, calibration = device_text(path.stem, measured)
    write_text(path, text, option="--calibrate")
    return calibration


def measure_suite(threads: Sequence[int], progress: Callable[[str], None], turns: int = _TURNS) -> Measured:
    """Every graph of the suite, for each number of threads, in turns, until the time is up.

    The first graph of each kind comes first, then the second ones: so a board that is too slow for all of them has
    measured some of each kind when its time is up, of sizes as far apart as all.

    Raises:
        UsageError: in its time the board has not measured a graph of each kind.
    """
    watch, before, began = Watch(), throttling(), time.monotonic()
    filler = _plain_memory(max(case.between for case in cases()))
    found: dict[int, list[float]] = {count: [np.inf] * len(cases()) for count in threads}
    order = sorted(range(len(cases())), key=lambda index: cases()[index].index)
    for turn in range(turns):
        for place, count in enumerate(threads, 1):
            until = began + _BUDGET_S * (1.0 if turn else place / len(threads))
            progress(f"turn {turn + 1} of {turns}, {len(cases())} graphs, {count} thread{'s' * (count > 1)}")
            for index in order:
                if time.monotonic() > until:
                    break
                found[count][index] = min(found[count][index], _graph_ms(cases()[index], count, filler))
    for times in found.values():
        kinds = {(case.part, case.kind) for case in cases()}
        if missing := kinds - {(case.part, case.kind) for case, ms in zip(cases(), times, strict=True) if ms < np.inf}:
            expected = f"graphs of {len(kinds)} kinds measured in {_BUDGET_S:.0f} s"
            got = f"{len(kinds) - len(missing)} kinds"
            raise UsageError("--calibrate", expected=expected, got=got, hint="with nothing else running")
    load, after = watch.load(), throttling()
    seconds = time.monotonic() - began
    throttled = None if not after else after != before
    return Measured(found, load.others, throttled, seconds, cpu_temperature_c(), _copy_gb_s())


def device_text(name: str, measured: Measured) -> tuple[str, Calibration]:
    """The whole device file, and its section of measurements."""
    numbers = {key: (value, "stand-in, costs are fitted from there") for key, value in _STAND_IN.items()}
    numbers |= detect_host()
    numbers["cpu.memory_gb_s"] = (measured.memory_gb_s, "measured here: copying 64 MB")
    clock, macs, memory = (numbers[f"cpu.{key}"][0] for key in ("clock_ghz", "fp32_macs_per_cycle", "memory_gb_s"))
    calibration = Calibration(
        runtime=f"onnxruntime {ort.__version__}",
        board=board_name(),
        processor=cpu_name(),
        measured=datetime.now(UTC).date().isoformat(),
        governor=governor() or "unknown",
        under_load=measured.under_load,
        others=measured.others,
        throttled=measured.throttled,
        operators={part: tuple(sorted(suite_operators(part))) for part in PARTS},
        fits=fit_board(measured.ms, datasheet_costs(clock, macs, memory)),
    )
    lines = [f"name = {_quoted(name)}", f"title = {_quoted(calibration.board)}"]
    for section in ("cpu", "memory"):
        lines += ["", f"[{section}]"]
        lines += [
            f"{key.split('.')[1]} = {{ value = {value:.10g}, source = {_quoted(source)} }}"
            for key, (value, source) in numbers.items()
            if key.startswith(f"{section}.")
        ]
    return "\n".join(lines) + "\n\n" + calibration_text(calibration), calibration


def _plain_memory(size: int) -> NDArray[np.float32]:
    """Ones in pages of the system's usual size, as a runtime's memory has them.

    For an array of this size NumPy asks for pages of 2 MB. So few of them leave the processor's table of pages as it
    was, and a graph after such a filler found its numbers in memory, but where they lie at once.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    filler = np.frombuffer(memory, np.float32)
    filler[...] = 1.0
    return filler


def _graph_ms(case: Case, threads: int, filler: NDArray[np.float32]) -> float:
    graph = case.graph()
    run = prepared(graph, f"{case.part} {case.kind} {case.index}", training=case.part == "training", threads=threads)
    return timed_run(run, threads, filler[: case.between // 4], seconds=_GRAPH_S, way_in=_way_in())


@functools.cache
def _way_in() -> Callable[[], object]:
    """One operator on one number."""
    graph = SmallGraph()
    graph.output(graph.add("Abs", graph.input((1,))), (1,))
    return prepared(graph, "one number", training=False, threads=1)


def prepared(graph: SmallGraph, name: str, *, training: bool, threads: int) -> Callable[[], object]:
    """A run of a graph on made-up numbers, its inputs and outputs where they stay, as a trainer's are."""
    session, _ = open_session(graph.to_bytes(), name, threads=threads, training=training)
    if not isinstance(session, ort.InferenceSession):
        raise ProtofleetError(name, expected="a session on the CPU", got=type(session).__name__)
    rng = np.random.default_rng(0)
    feed: dict[str, NDArray[Any]] = {}
    for key, (shape, is_bytes) in graph.shapes.items():
        numbers = rng.integers(0, 256, shape) if is_bytes else rng.uniform(0.1, 1.0, shape)
        feed[key] = np.asarray(numbers, np.uint8 if is_bytes else np.float32)
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, feed)
    binding = session.io_binding()
    for key, value in feed.items():
        binding.bind_cpu_input(key, value)
    for key, value in zip(names, outputs, strict=True):
        binding.bind_output(key, "cpu", 0, np.float32, value.shape, value.ctypes.data)
    kept = (feed, outputs)  # the binding knows where they lie, and does not hold them

    def run() -> object:
        session.run_with_iobinding(binding)
        return kept

    return run


def timed_run(
    run: Callable[[], object], threads: int, filler: NDArray[np.float32], *, seconds: float,
    way_in: Callable[[], object] = lambda: None,
) -> float:  # fmt: skip
    """Milliseconds of one run where caches hold `filler`, or its own numbers: the lower quartile of some runs."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    for _ in range(2):
        run()
    times: list[float] = []
    until = time.monotonic() + seconds
    while len(times) < _FEWEST or (len(times) < _MOST and time.monotonic() < until):
        if filler.size:
            np.add(filler, 1.0, out=filler)  # numbers that are only read, some caches do not keep
            way_in()
        before = clock()
        run()
        times.append(clock() - before)
    return float(np.quantile(times, 0.25)) * 1e3


def _copy_gb_s() -> float:
    """Bytes read and written of the fastest of some copies."""
    one = np.ones(_COPY_BYTES // 4, np.float32)
    other = np.empty_like(one)
    times = []
    for _ in range(5):
        before = time.perf_counter()
        np.copyto(other, one)
        times.append(time.perf_counter() - before)
    return float(f"{2 * _COPY_BYTES / min(times) / 1e9:.3g}")


def _quoted(text: str) -> str:
    kept = "".join(c for c in text if c.isprintable())
    return '"' + kept.replace("\\", "\\\\").replace('"', '\\"') + '"'
