"""Writes SCALE-Sim 3.0.0's topology of matrix products, so that anyone can check our cycles with it.

The topology is a CSV of `Layer, M, N, K,` (SCALE-Sim's `-i gemm` form; text after the last comma is dropped). A layer
of several products becomes that many rows. So a depthwise layer, which SCALE-Sim runs channel by channel, has all its
channels.
"""

from __future__ import annotations

from collections.abc import Iterable

from protofleet.hw_profiles.accelerator.simulate import LayerCost

__all__ = ["topology_rows", "topology_text"]


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
