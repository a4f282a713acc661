"""Files that let anyone check our cycles with SCALE-Sim 3.0.0: its topology of matrix products, and its configuration.

The topology is a CSV of `Layer, M, N, K,` (SCALE-Sim's `-i gemm` form; what follows the last comma is dropped). A layer
of several products is written as that many rows, so that a depthwise layer, which SCALE-Sim runs channel by channel, is
there with all its channels.
"""

from __future__ import annotations

from collections.abc import Iterable

from hw_profiles.accelerator.simulate import LayerCost

__all__ = ["config_text", "topology_rows", "topology_text"]

_CONFIG = """[general]
run_name = protofleet

[architecture_presets]
ArrayHeight = {rows}
ArrayWidth = {cols}
IfmapSramSzkB = {sram_kb}
FilterSramSzkB = {sram_kb}
OfmapSramSzkB = {sram_kb}
IfmapOffset = 0
FilterOffset = 10000000
OfmapOffset = 20000000
Dataflow = {dataflow}
Bandwidth = 10
ReadRequestBuffer = 64
WriteRequestBuffer = 64

[layout]
IfmapCustomLayout = False
IfmapSRAMBankBandwidth = 10
IfmapSRAMBankNum = 10
IfmapSRAMBankPort = 2
FilterCustomLayout = False
FilterSRAMBankBandwidth = 10
FilterSRAMBankNum = 10
FilterSRAMBankPort = 2

[sparsity]
SparsitySupport = false
SparseRep = ellpack_block
OptimizedMapping = false
BlockSize = 8
RandomNumberGeneratorSeed = 40

[run_presets]
InterfaceBandwidth = CALC
UseRamulatorTrace = False
"""


def config_text(rows: int, cols: int, dataflow: str, *, sram_kb: int = 1_545) -> str:
    """A SCALE-Sim configuration whose memory never stalls the array; a third of 37,080 Kb for each operand."""
    return _CONFIG.format(rows=rows, cols=cols, dataflow=dataflow, sram_kb=sram_kb)


def topology_rows(layers: Iterable[LayerCost]) -> list[tuple[str, int, int, int]]:
    """Every product that the array runs, in order: (name, M, N, K)."""
    rows = []
    for cost in layers:
        for number, placed in enumerate(cost.placed):
            for copy in range(placed.count):
                suffix = f"_{number}" * (len(cost.placed) > 1) + f"_ch{copy}" * (placed.count > 1)
                name = cost.layer.name.replace(",", "_").replace(" ", "_")
                rows.append((name + suffix, placed.m, placed.n, placed.k))
    return rows


def topology_text(rows: Iterable[tuple[str, int, int, int]]) -> str:
    """SCALE-Sim's topology file for these products."""
    return "Layer, M, N, K,\n" + "".join(f"{name}, {m}, {n}, {k},\n" for name, m, n, k in rows)
