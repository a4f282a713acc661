"""Bytes that a layer moves to and from DDR when the on-chip memory is finite.

- Each operand has one buffer. A product whose operands A and B both exceed their buffers is blocked. Either A is kept
  block by block and B is read again for each block, or the other way round, whichever moves less.
- Stationary dataflows (ws, is) spill partial sums when one column block of them does not fit.
- A tensor that one layer writes and the next reads stays on the chip if it fits its buffer. It is written out only if a
  later layer needs it.

See docs/hardware.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofleet.contract.names import named
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.workload.model import Layer, Workload

__all__ = ["Traffic", "layer_traffic"]

_PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes between DDR and the chip for one layer; `spilled` are partial sums, out and back."""

    read: int = 0
    written: int = 0
    spilled: int = 0

    @property
    def total(self) -> int:
        """All bytes that cross the pins."""
        return self.read + self.written + self.spilled


def layer_traffic(
    workload: Workload, float_bytes: int, buffer_bytes: int, dataflow: str, rows: int, cols: int
) -> list[Traffic]:
    """DDR bytes of each layer, in order."""
    root = _roots(workload)
    last_read = _last_reads(workload, root)
    kept: set[str] = set()
    traffic = []
    for index, layer in enumerate(workload.layers):
        if layer.kind == "view":
            traffic.append(Traffic())
            continue
        sizes = {n: workload.tensors[n].nbytes(float_bytes) for n in (*layer.reads, *layer.writes)}
        fetched = [0 if root[n] in kept else sizes[n] for n in layer.reads]
        count = min((gemm.count for gemm in layer.gemms), default=1)  # independent products are blocked one by one
        reread = (
            _blocked(fetched, [sizes[n] // count for n in layer.reads], buffer_bytes) if layer.gemms else sum(fetched)
        )
        fits = {root[n] for n in layer.writes if sizes[n] <= buffer_bytes and workload.tensors[n].role == "activation"}
        unwritten = {r for r in fits if last_read.get(r, -1) <= _next_working(workload, index)}
        written = sum(sizes[n] for n in layer.writes if root[n] not in unwritten)
        traffic.append(Traffic(reread, written, _spill(layer, dataflow, rows, cols, buffer_bytes)))
        kept = fits
    return traffic


def _roots(workload: Workload) -> dict[str, str]:
    """For each tensor its own name, or the name of the tensor that it is a view of."""
    root = {name: name for name in workload.tensors}
    for layer in workload.layers:
        if layer.kind == "view" and layer.reads:
            for name in layer.writes:
                root[name] = root[layer.reads[0]]
    return root


def _last_reads(workload: Workload, root: dict[str, str]) -> dict[str, int]:
    last = {root[n]: i for i, layer in enumerate(workload.layers) if layer.kind != "view" for n in layer.reads}
    return last | {root[n]: len(workload.layers) for n in workload.outputs if n in root}


def _next_working(workload: Workload, index: int) -> int:
    for later in range(index + 1, len(workload.layers)):
        if workload.layers[later].kind != "view":
            return later
    return index


def _blocked(fetched: list[int], sizes: list[int], buffer_bytes: int) -> int:
    """Bytes read when the two largest operands of a product do not both have to fit."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    if len(order) < 2:
        return sum(fetched)
    a, b = order[:2]
    rest = sum(fetched[i] for i in order[2:])
    keep_a = fetched[a] + fetched[b] * -(-sizes[a] // buffer_bytes)
    keep_b = fetched[b] + fetched[a] * -(-sizes[b] // buffer_bytes)
    return rest + min(keep_a, keep_b)


def _spill(layer: Layer, dataflow: str, rows: int, cols: int, buffer_bytes: int) -> int:
    kept, total = named(DATAFLOWS, dataflow, "dataflow"), 0
    for gemm in layer.gemms:
        open_sums, put_aside = kept.partial_sums(gemm.m, gemm.n, gemm.k, rows, cols)
        if open_sums * _PARTIAL_BYTES > buffer_bytes:
            total += 2 * put_aside * gemm.m * gemm.n * gemm.count * _PARTIAL_BYTES
    return total
