"""A layer on the array behind its DMA: what is moved and when it ends, beside a walk through every transfer."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofleet.hw_profiles.accelerator.layer_traffic import Stream, stream_cycles
from protofleet.hw_profiles.accelerator.simulate import Array, simulate
from protofleet.hw_profiles.workload.model import Gemm, Layer, Tensor, Workload
from tests.hw_profiles.accelerator.memory_walk import walked, walked_stream


def product(m, n, k, count=1, *, bias=0, ops=0):
    """One layer: `count` products of (m, k) by (k, n), and a bias beside them."""
    tensors = {
        "a": Tensor("a", (count, m, k), "input"),
        "b": Tensor("b", (count, k, n), "parameter"),
        "bias": Tensor("bias", (bias,), "parameter"),
        "y": Tensor("y", (count, m, n), "activation"),
    }
    reads = ("a", "b", "bias") if bias else ("a", "b")
    layer = Layer("p", "MatMul", "linear", "forward", reads, ("y",), (Gemm(m, n, k, count),), ops)
    return Workload("w", 1, (layer,), tensors, ("y",))


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 60), n=st.integers(1, 60), k=st.integers(1, 60), rows=st.integers(1, 8), cols=st.integers(1, 8),
    dataflow=st.sampled_from(["os", "ws", "is"]), sram=st.sampled_from([2_000, 6_000, 60_000]),
    gb_s=st.sampled_from([0.05, 0.4, 1.6]), precision=st.sampled_from(["fp32", "bf16", "int8"]),
    count=st.integers(1, 3), ops=st.sampled_from([0, 100, 100_000]),
)  # fmt: skip
def test_a_layers_products_take_what_each_takes_behind_the_dma(
    m, n, k, rows, cols, dataflow, sram, gb_s, precision, count, ops
):
    array = Array(
        rows=rows, cols=cols, dataflow=dataflow, sram_bytes=sram, dram_bytes_per_s=gb_s * 1e9, precision=precision
    )
    (layer,) = simulate(product(m, n, k, count, ops=ops), array).layers
    each = walked(m, n, k, array.behind)
    assert layer.cycles == max(count * each.cycles, ceil(ops / array.lanes))
    assert layer.traffic.read == count * (each.first_bytes + each.second_bytes)
    assert (layer.traffic.written, layer.traffic.spilled) == (count * each.written_bytes, count * each.spilled_bytes)
    assert layer.traffic.total == count * each.dram_bytes
    assert layer.array_cycles == count * (each.compute_cycles - 1)
    assert layer.stall_cycles == layer.cycles - max(layer.array_cycles, layer.vector_cycles)
    busy = {"array": layer.array_cycles, "special unit": layer.vector_cycles, "dram": layer.dram_cycles}
    assert layer.cycles == 0 or busy[layer.bound] == max(busy.values())
    assert layer.dram_cycles == ceil(layer.traffic.total / array.rate)


def test_a_bias_comes_before_its_product():
    plain, biased = (simulate(product(5, 6, 7, bias=bias), Array()).layers[0] for bias in (0, 6))
    assert biased.traffic.read == plain.traffic.read + 24
    assert biased.cycles == plain.cycles + 1  # 24 bytes at 128 a cycle


@settings(max_examples=200, deadline=None)
@given(
    read=st.integers(0, 3_000), written=st.integers(0, 3_000), cycles=st.integers(0, 500),
    half=st.sampled_from([16, 100, 1_000]), rate=st.sampled_from([Fraction(1, 3), Fraction(2), Fraction(500)]),
)  # fmt: skip
@example(read=1, written=0, cycles=0, half=16, rate=Fraction(2))
def test_other_layers_pass_by_in_parts_of_half_a_buffer(read, written, cycles, half, rate):
    (said,) = stream_cycles([Stream(read, written, cycles, half, rate)]).tolist()
    if read or written or cycles:
        assert said == walked_stream(read, written, cycles, half, rate)
        assert said >= max(cycles, (read + written) / rate)
    else:
        assert said == 0


def test_nothing_stays_on_the_chip_for_the_next_layer_and_a_view_is_free():
    tensors = {n: Tensor(n, (100,), "input" if n == "x" else "activation") for n in "xabc"}
    steps = [("x", "a", "elementwise"), ("a", "b", "view"), ("b", "c", "elementwise")]
    layers = tuple(
        Layer(w, "Relu", kind, "forward", (r,), (w,), vector_ops=0 if kind == "view" else 100) for r, w, kind in steps
    )
    cost = simulate(Workload("w", 1, layers, tensors, ("c",)), Array(lanes=10, dram_bytes_per_s=0.4e9))
    assert [layer.traffic.total for layer in cost.layers] == [800, 0, 800]
    assert [(layer.cycles > 0, layer.bound) for layer in cost.layers[::2]] == [(True, "dram")] * 2
    assert cost.layers[1].bound == "free"
    once = walked_stream(400, 400, 10, Array().buffer_bytes, Fraction(4))
    assert cost.cycles == 2 * once == 2 * (1 + 100 + 1 + 10 + 1 + 100)


def test_one_operands_share_is_a_third_of_the_memory_halved_to_double_buffer():
    """The share decides what stays: with room for 40 numbers of K a bank, one operand's tiles are kept, with 39 not."""
    assert Array(sram_bytes=6_000).buffer_bytes == 1_000
    assert Array().buffer_bytes == 37_080 * 1024 // 8 // 2 // 3
    small = {"rows": 4, "cols": 4, "precision": "int8"}
    at_edge, below = (
        simulate(product(16, 16, 40), Array(sram_bytes=6 * size, **small)).dram_bytes for size in (160, 159)
    )
    assert at_edge == 16 * 40 + 4 * 16 * 40 + 16 * 16
    assert below == 2 * 4 * 16 * 40 + 16 * 16


@pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_precision_is_bytes_of_operands_and_results(precision, each):
    moved = simulate(product(50, 60, 70), Array(precision=precision)).layers[0].traffic
    assert (moved.read, moved.written) == (each * (50 * 70 + 70 * 60), each * 50 * 60)


def test_sums_over_layers_are_those_of_the_workload():
    work = product(9, 7, 5)
    busy = Layer("v", "Relu", "elementwise", "forward", ("y",), ("y",), vector_ops=500)
    work = Workload("w", 1, (*work.layers, busy), work.tensors, ("y",))
    array = Array(rows=4, cols=3, lanes=7, mhz=50.0)
    cost = simulate(work, array)
    assert cost.layers[1].vector_cycles == ceil(500 / 7)
    assert cost.cycles == sum(layer.cycles for layer in cost.layers) == sum(cost.phase_cycles().values())
    assert cost.latency_ms == pytest.approx(cost.cycles / 50e6 * 1e3)
    assert cost.utilisation * cost.array_cycles * 12 == pytest.approx(9 * 7 * 5)
    assert array.peak_gflops == pytest.approx(2 * 12 * 50e6 / 1e9)
    assert cost.layers[0].placed[0].sram_writes == 9 * 7
