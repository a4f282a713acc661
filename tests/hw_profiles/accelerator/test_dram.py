"""Traffic to DDR against a naive walk: what is on the chip is a set, what is read is counted block by block."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofleet.hw_profiles.accelerator.dram import Traffic, layer_traffic
from protofleet.hw_profiles.accelerator.simulate import Array, simulate
from protofleet.hw_profiles.workload.model import Gemm, Layer, Tensor, Workload


def product(m, n, k, count=1):
    """One layer: `count` products of (m, k) by (k, n), all operands in DDR."""
    tensors = {
        "a": Tensor("a", (count, m, k), "input"),
        "b": Tensor("b", (count, k, n), "parameter"),
        "y": Tensor("y", (count, m, n), "activation"),
    }
    layer = Layer("p", "MatMul", "linear", "forward", ("a", "b"), ("y",), (Gemm(m, n, k, count),))
    return Workload("w", 1, (layer,), tensors, ("y",))


def naive_blocked(kept_bytes, other_bytes, buffer_bytes):
    """Load one operand block after block; for each block, stream the whole other one past it."""
    read, left = 0, kept_bytes
    while left > 0:
        block = min(left, buffer_bytes)
        read += block + other_bytes
        left -= block
    return read


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 40), count=st.integers(1, 3),
    buffer=st.sampled_from([16, 100, 333, 1000, 5000, 10**6]),
)  # fmt: skip
@example(m=40, n=3, k=40, count=1, buffer=100)  # keeping the small operand moves far less
@example(m=3, n=40, k=40, count=1, buffer=100)
def test_a_product_reads_as_often_as_its_better_blocking_needs(m, n, k, count, buffer):
    work = product(m, n, k, count)
    (moved,) = layer_traffic(work, 4, buffer, "os", 8, 8)
    a, b = 4 * m * k, 4 * k * n
    each = min(naive_blocked(a, b, buffer), naive_blocked(b, a, buffer))
    assert moved == Traffic(count * each, 4 * count * m * n, 0)


def naive_spill(m, n, k, rows, cols, dataflow, buffer):
    """Folds of K one after the other over every result column block; partial sums leave and come back in between."""
    if dataflow == "os":
        return 0
    long, wide = (m, n) if dataflow == "ws" else (n, m)
    if 4 * long * min(wide, cols) <= buffer:
        return 0
    moved = 0
    for fold in range(ceil(k / rows)):
        for left in range(0, wide, cols):
            part = 4 * long * min(cols, wide - left)
            moved += part if fold > 0 else 0  # back in, to be added to
            moved += part if fold < ceil(k / rows) - 1 else 0  # out, since it is not whole yet
    return moved


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 60), n=st.integers(1, 60), k=st.integers(1, 40), rows=st.integers(1, 9), cols=st.integers(1, 9),
    dataflow=st.sampled_from(["os", "ws", "is"]), buffer=st.sampled_from([64, 500, 2000, 10**6]),
    count=st.integers(1, 3),
)  # fmt: skip
@example(m=60, n=2, k=20, rows=4, cols=4, dataflow="ws", buffer=100, count=2)
@example(m=2, n=60, k=20, rows=4, cols=4, dataflow="is", buffer=100, count=2)
def test_partial_sums_spill_where_a_column_block_of_them_does_not_fit(m, n, k, rows, cols, dataflow, buffer, count):
    (moved,) = layer_traffic(product(m, n, k, count), 4, buffer, dataflow, rows, cols)
    assert moved.spilled == count * naive_spill(m, n, k, rows, cols, dataflow, buffer)
    assert moved.total == moved.read + moved.written + moved.spilled


@st.composite
def graphs(draw):
    """Element-wise layers and views over what was made before, some of them read again much later."""
    tensors = {"t0": Tensor("t0", (draw(st.integers(1, 30)),), "input")}
    layers = []
    for index in range(1, draw(st.integers(2, 8))):
        name = f"t{index}"
        kind = draw(st.sampled_from(["elementwise", "elementwise", "view"]))
        reads = tuple(draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=2, unique=True)))
        if kind == "view":
            reads, size = reads[:1], tensors[reads[0]].elements
        else:
            size = draw(st.integers(1, 30))
        tensors[name] = Tensor(name, (size,), "activation")
        layers.append(Layer(f"l{index}", "Op", kind, "forward", reads, (name,)))
    return Workload("g", 1, tuple(layers), tensors, (layers[-1].writes[0],))


def naive_walk(work, buffer):
    """Step by step: the chip holds the last working layer's result if it fits, and nothing else."""
    same = {name: name for name in work.tensors}
    for layer in work.layers:
        if layer.kind == "view":
            same[layer.writes[0]] = same[layer.reads[0]]
    working = [layer for layer in work.layers if layer.kind != "view"]
    on_chip, found = None, {}
    for index, layer in enumerate(working):
        read = sum(4 * work.tensors[n].elements for n in layer.reads if same[n] != on_chip)
        made = layer.writes[0]
        fits = 4 * work.tensors[made].elements <= buffer
        later = working[index + 2 :]
        needed_later = any(same[n] == made for x in later for n in x.reads) or made in {same[n] for n in work.outputs}
        found[layer.name] = (read, 0 if fits and not needed_later else 4 * work.tensors[made].elements)
        on_chip = made if fits else None
    return [found.get(layer.name, (0, 0)) for layer in work.layers]


@settings(max_examples=200, deadline=None)
@given(work=graphs(), buffer=st.sampled_from([8, 40, 80, 1000]))
def test_a_result_stays_on_the_chip_for_the_next_layer_only(work, buffer):
    moved = layer_traffic(work, 4, buffer, "os", 8, 8)
    assert [(each.read, each.written) for each in moved] == naive_walk(work, buffer)


def test_weights_that_are_updated_go_back_to_ddr_even_where_they_would_fit():
    tensors = {"w": Tensor("w", (4,), "parameter"), "g": Tensor("g", (4,), "gradient")}
    update = Layer("u", "SGD", "elementwise", "update", ("w", "g"), ("w",))
    assert layer_traffic(Workload("w", 1, (update,), tensors), 4, 1000, "os", 8, 8) == [Traffic(32, 16, 0)]


# ---- the accelerator around it ----


def test_one_operands_share_is_a_third_of_the_memory_halved_to_double_buffer():
    """The share decides when a product is blocked: at its edge, one byte more reads an operand twice."""
    assert Array(sram_bytes=6_000).buffer_bytes == 1_000
    assert Array().buffer_bytes == 37_080 * 1024 // 8 // 2 // 3
    work = product(10, 25, 10)  # a: 400 bytes, b: 1,000 bytes
    at_edge, below = (simulate(work, Array(sram_bytes=size)).dram_bytes for size in (2_400, 2_394))
    assert at_edge == 400 + 1_000 + 1_000
    assert below == min(naive_blocked(400, 1_000, 399), naive_blocked(1_000, 400, 399)) + 1_000
    assert below > at_edge


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 16), cols=st.integers(1, 16), lanes=st.integers(1, 20), mhz=st.sampled_from([50.0, 100.0]),
    ops=st.integers(0, 500), m=st.integers(1, 20), gb_s=st.sampled_from([0.1, 1.6, 12.8]),
)  # fmt: skip
def test_a_layer_takes_as_long_as_the_longest_of_array_special_unit_and_ddr(rows, cols, lanes, mhz, ops, m, gb_s):
    work = product(m, 7, 5)
    busy = Layer("v", "Relu", "elementwise", "forward", ("y",), ("y",), vector_ops=ops)
    work = Workload("w", 1, (*work.layers, busy), work.tensors, ("y",))
    array = Array(rows=rows, cols=cols, lanes=lanes, mhz=mhz, dram_bytes_per_s=gb_s * 1e9)
    cost = simulate(work, array)
    names = {"array": "array_cycles", "special unit": "vector_cycles", "dram": "dram_cycles"}
    for layer in cost.layers:
        each = {name: getattr(layer, field) for name, field in names.items()}
        assert layer.cycles == max(each.values())
        assert layer.bound == "free" if layer.cycles == 0 else each[layer.bound] == layer.cycles
        seconds = layer.traffic.total / (gb_s * 1e9)
        assert each["dram"] == ceil(round(seconds * mhz * 1e6, 6))
    assert cost.layers[1].vector_cycles == ceil(ops / lanes)
    folds = ceil(m / rows) * ceil(7 / cols)
    assert cost.layers[0].array_cycles == cost.array_cycles == folds * (5 + rows + cols - 2) - 1
    assert cost.cycles == sum(layer.cycles for layer in cost.layers) == sum(cost.phase_cycles().values())
    assert cost.latency_ms == pytest.approx(cost.cycles / (mhz * 1e6) * 1e3)
    wanted = m * 7 * 5
    assert cost.utilisation * cost.array_cycles * rows * cols == pytest.approx(wanted if cost.array_cycles else 0)
    assert array.peak_gflops == pytest.approx(2 * rows * cols * mhz * 1e6 / 1e9)
    placed = cost.layers[0]
    assert placed.sram_writes == m * 7
    assert placed.sram_reads == m * 5 * ceil(7 / cols) + 5 * 7 * ceil(m / rows)
