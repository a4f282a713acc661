"""The systolic closed form against the figures of docs/hardware.md and against an array simulated cycle by cycle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.accelerator import simulate as simulation
from protofleet.hw_profiles.accelerator import systolic
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.simulate import Array, simulate
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles, map_gemm, sram_traffic
from protofleet.hw_profiles.workload.model import Gemm, Layer, Tensor, Workload

PRINTED = [  # (M, N, K) and SCALE-Sim 3.0.0's cycles on the 32x64 array: docs/hardware.md, `The array's cycles`
    ((64, 100, 1280), {"os": 5495, "ws": 15199, "is": 9039}),
    ((196, 576, 96), {"os": 11969, "ws": 8693, "is": 8423}),
]


@pytest.mark.parametrize(("shape", "cycles"), PRINTED)
@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_agrees_with_the_simulator_figures_that_the_documentation_prints(shape, cycles, dataflow):
    assert gemm_cycles(*shape, rows=32, cols=64, dataflow=dataflow) == cycles[dataflow]


def _naive_os(a: np.ndarray, b: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, int]:
    """An output-stationary array stepped clock by clock: operands enter skewed from the left and from the top and
    move one cell a cycle; each cell multiplies what passes through it and keeps the sum. Returns product and cycles."""
    (m, k), n = a.shape, b.shape[1]
    out, clock = np.zeros((m, n)), 0
    for top in range(0, m, rows):
        for left in range(0, n, cols):
            tile_a = np.zeros((rows, k))
            tile_a[: min(rows, m - top)] = a[top : top + rows]
            tile_b = np.zeros((k, cols))
            tile_b[:, : min(cols, n - left)] = b[:, left : left + cols]
            right, down, total = (np.zeros((rows, cols)) for _ in range(3))
            last = k - 1 + rows - 1 + cols - 1  # when the last pair meets in the far corner
            for t in range(last + 1):
                right[:, 1:], down[1:] = right[:, :-1].copy(), down[:-1].copy()
                right[:, 0] = [tile_a[i, t - i] if 0 <= t - i < k else 0.0 for i in range(rows)]
                down[0] = [tile_b[t - j, j] if 0 <= t - j < k else 0.0 for j in range(cols)]
                total += right * down
                clock += 1
            out[top : top + rows, left : left + cols] = total[: min(rows, m - top), : min(cols, n - left)]
    return out, clock


def _naive_stationary(kept: np.ndarray, moving: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, int]:
    """A (K, X) operand held in the cells, (S, K) streamed past it: loads row by row, then partial sums fall down the
    columns. Returns (S, X) = moving @ kept and the cycles."""
    (k, x), stream = kept.shape, moving.shape[0]
    out, clock = np.zeros((stream, x)), 0
    for top in range(0, k, rows):
        for left in range(0, x, cols):
            held = np.zeros((rows, cols))
            part = kept[top : top + rows, left : left + cols]
            held[: part.shape[0], : part.shape[1]] = part
            feed = np.zeros((stream, rows))
            feed[:, : part.shape[0]] = moving[:, top : top + rows]
            clock += rows  # the held operand is shifted in, one row a cycle
            right, falling = np.zeros((rows, cols)), np.zeros((rows, cols))
            for t in range(stream + rows + cols - 2):
                right[:, 1:] = right[:, :-1].copy()
                right[:, 0] = [feed[t - i, i] if 0 <= t - i < stream else 0.0 for i in range(rows)]
                above = np.vstack([np.zeros((1, cols)), falling[:-1]])
                falling = above + right * held
                clock += 1
                for j in range(part.shape[1]):
                    s = t - (rows - 1) - j
                    if 0 <= s < stream:
                        out[s, left + j] += falling[rows - 1, j]
    return out, clock


def _simulate(a: np.ndarray, b: np.ndarray, rows: int, cols: int, dataflow: str) -> tuple[np.ndarray, int]:
    if dataflow == "os":
        return _naive_os(a, b, rows, cols)
    if dataflow == "ws":
        return _naive_stationary(b, a, rows, cols)
    product, clock = _naive_stationary(a.T, b.T, rows, cols)  # (K, M) held, (N, K) streamed
    return product.T, clock


_small = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(
    m=_small,
    n=_small,
    k=_small,
    rows=st.integers(1, 4),
    cols=st.integers(1, 4),
    dataflow=st.sampled_from(["os", "ws", "is"]),
)
def test_equals_an_array_stepped_clock_by_clock_that_computes_the_product(m, n, k, rows, cols, dataflow):
    rng = np.random.default_rng(m * 1000 + n * 100 + k)
    a, b = rng.integers(-5, 6, (m, k)).astype(float), rng.integers(-5, 6, (k, n)).astype(float)
    product, clock = _simulate(a, b, rows, cols, dataflow)
    np.testing.assert_array_equal(product, a @ b)
    assert gemm_cycles(m, n, k, rows=rows, cols=cols, dataflow=dataflow) == clock - 1


@pytest.mark.parametrize("wrong", [{"m": 0}, {"n": -3}, {"k": 1.5}, {"rows": True}, {"cols": "64"}, {"m": None}])
def test_a_size_that_is_not_a_positive_integer_is_refused_by_name(wrong):
    sizes = {"m": 4, "n": 4, "k": 4, "rows": 2, "cols": 2} | wrong
    with pytest.raises(UsageError, match=rf"{next(iter(wrong))}, expected a positive integer"):
        gemm_cycles(sizes.pop("m"), sizes.pop("n"), sizes.pop("k"), **sizes)


def test_an_unknown_dataflow_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="expected os, ws or is, got rs"):
        gemm_cycles(1, 1, 1, dataflow="rs")


@pytest.mark.parametrize("name", DATAFLOWS)
def test_every_dataflow_has_figures_that_are_checked_above(name):
    assert all(name in cycles for _, cycles in PRINTED)


def test_a_dataflow_is_one_class_and_its_line_in_the_table(monkeypatch):
    """Cycles, traffic on the chip, and the errors follow; behind a DMA it has to say in which order its folds come."""

    class RowStationary:
        def folds(self, m, n, k, rows, cols):
            return 3, 5

        def sram_traffic(self, m, n, k, rows, cols):
            return 7, 11, 13

    tensors = {name: Tensor(name, (4, 4), "input" if name == "a" else "activation") for name in "aby"}
    product = Layer("p", "MatMul", "linear", "forward", ("a", "b"), ("y",), (Gemm(4, 4, 4),))
    work = Workload("w", 1, (product,), tensors, ("y",))
    with pytest.raises(UsageError, match="expected os, ws or is, got rs"):
        Array(dataflow="rs")
    for module in (simulation, systolic):
        monkeypatch.setattr(module, "DATAFLOWS", {**DATAFLOWS, "rs": RowStationary()})
    assert gemm_cycles(4, 4, 4, dataflow="rs") == 14
    assert sram_traffic(4, 4, 4, dataflow="rs") == (7, 11, 13)
    with pytest.raises(UsageError, match="dataflow behind a DMA, expected os, ws or is, got rs"):
        simulate(work, Array(dataflow="rs"))
    with pytest.raises(UsageError, match="expected os, ws, is or rs, got qs"):
        gemm_cycles(4, 4, 4, dataflow="qs")


# ---- what the array reads, and depthwise mappings ----


@settings(max_examples=60, deadline=None)
@given(m=_small, n=_small, k=_small, rows=st.integers(1, 4), cols=st.integers(1, 4))
def test_on_chip_reads_equal_those_of_folds_counted_one_by_one(m, n, k, rows, cols):
    size = {"rows": rows, "cols": cols}
    first = second = 0
    for top in range(0, m, rows):
        for left in range(0, n, cols):
            first += min(rows, m - top) * k
            second += min(cols, n - left) * k
    assert sram_traffic(m, n, k, **size, dataflow="os") == (first, second, m * n)
    for dataflow, streams, stays in (("ws", m, n), ("is", n, m)):
        streamed = held = partial = 0
        for top in range(0, k, rows):
            for left in range(0, stays, cols):
                held += min(rows, k - top) * min(cols, stays - left)
                streamed += streams * min(rows, k - top)
                partial += streams * min(cols, stays - left)
        operands = (streamed, held) if dataflow == "ws" else (held, streamed)
        assert sram_traffic(m, n, k, **size, dataflow=dataflow) == (*operands, partial)


def test_on_chip_reads_are_those_that_the_simulator_reports():
    """SCALE-Sim 3.0.0, DETAILED_ACCESS_REPORT.csv of two products on 32x64, output stationary."""
    assert sram_traffic(64, 100, 1280)[:2] == (163_840, 256_000)
    assert sram_traffic(196, 576, 96)[:2] == (169_344, 387_072)


def test_per_channel_is_one_product_after_the_other_as_the_simulator_runs_them():
    placed = map_gemm(Gemm(196, 1, 9, 96, "k"))
    assert placed.cycles == 96 * gemm_cycles(196, 1, 9)
    assert (placed.count, placed.channels) == (96, 1)


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(1, 300),
    k=st.sampled_from([1, 9, 25]),
    channels=st.integers(1, 100),
    diagonal=st.sampled_from(["k", "mn"]),
    dataflow=st.sampled_from(["os", "ws", "is"]),
)
def test_packed_holds_every_channel_and_is_never_slower(m, k, channels, diagonal, dataflow):
    gemm = Gemm(m, 1, k, channels, diagonal) if diagonal == "k" else Gemm(k, 1, m, channels, diagonal)
    packed = map_gemm(gemm, dataflow=dataflow, depthwise="packed")
    assert packed.cycles <= map_gemm(gemm, dataflow=dataflow).cycles
    assert packed.count * packed.channels >= channels
    assert packed.n == packed.channels * gemm.n
    assert packed.m * packed.k == packed.channels * gemm.m * gemm.k
    assert packed.cycles == packed.count * gemm_cycles(packed.m, packed.n, packed.k, dataflow=dataflow)


def test_a_block_diagonal_product_gives_every_channels_own_result():
    """What `packed` claims, in numbers: the zeros off the diagonal keep the channels apart."""
    rng = np.random.default_rng(0)
    patches, filters = rng.normal(size=(3, 7, 4)), rng.normal(size=(3, 4, 1))  # (channels, m, k), (channels, k, n)
    side_by_side = np.concatenate(list(patches), axis=1)  # (m, channels * k)
    block = np.zeros((12, 3))
    for channel in range(3):
        block[4 * channel : 4 * channel + 4, channel : channel + 1] = filters[channel]
    np.testing.assert_allclose(side_by_side @ block, np.concatenate(list(patches @ filters), axis=1))


def test_an_unknown_depthwise_mapping_is_refused():
    with pytest.raises(UsageError, match="expected per-channel or packed"):
        map_gemm(Gemm(1, 1, 1), depthwise="loose")


@pytest.mark.parametrize("gemm", [Gemm(196, 1, 9, 96, "k"), Gemm(9, 1, 196, 96, "mn"), Gemm(5, 2, 3, 7, "k")])
@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_packed_takes_the_fewest_cycles_of_all_ways_to_pack(gemm, dataflow):
    ways = []
    for side_by_side in range(1, gemm.count + 1):
        m, k = (gemm.m, gemm.k * side_by_side) if gemm.diagonal == "k" else (gemm.m * side_by_side, gemm.k)
        each = gemm_cycles(m, gemm.n * side_by_side, k, dataflow=dataflow)
        ways.append(-(-gemm.count // side_by_side) * each)
    assert map_gemm(gemm, dataflow=dataflow, depthwise="packed").cycles == min(ways) < ways[0]
