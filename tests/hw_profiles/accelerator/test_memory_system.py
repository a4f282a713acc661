"""A product behind a DMA: the model's cycles, stalls and bytes are those that the Verilog counted, and counts here."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hardware.rtl_memory import COUNTS, Setting, compile_memory, kind_of, models, recorded, simulated
from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.accelerator.memory_system import (
    Behind,
    Buffers,
    buffers_of,
    least_half_bytes,
    plan,
    timed,
    timed_all,
)
from protofleet.hw_profiles.accelerator.rtl_files import RtlArray
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles
from tests.hw_profiles.accelerator.memory_walk import walked

RECORDED = json.loads(Path(__file__).with_name("rtl_memory_counts.json").read_text())
verilator = pytest.mark.skipif(shutil.which("verilator") is None, reason="verilator is not installed")


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_recorded_counts_of_the_verilog_equal_the_model(dataflow):
    rows = [row for row in RECORDED["rows"] if row[2] == dataflow]
    assert RECORDED["counts"] == list(COUNTS)
    assert len({tuple(row[7]) for row in rows}) >= 50
    assert len({row[4] for row in rows}) >= 5
    assert {row[6] for row in rows} >= {"forward", "input_gradient", "weight_gradient", "drawn"}
    for row, said in zip(rows, models([recorded(row) for row in rows]), strict=True):
        assert said == row[-1], row


def test_recorded_settings_meet_every_kind_of_plan():
    kinds = {(row[2], kind_of(plan(*row[7], recorded(row).array.behind))) for row in RECORDED["rows"]}
    assert kinds >= {
        ("os", "blocks of several tiles"), ("os", "left kept"), ("os", "chunks, left kept"),
        ("os", "chunks, nothing kept"), ("ws", "left kept"), ("ws", "blocks of several tiles"),
        ("ws", "chunks, results by chunk"), ("ws", "chunks, left kept, results by chunk"), ("is", "left kept"),
        ("is", "chunks, results by chunk"),
    }  # fmt: skip


@verilator
@pytest.mark.parametrize("kind", [pytest.param("os", marks=pytest.mark.slow), "ws"])
def test_the_verilog_counts_what_the_model_says(kind, tmp_path):
    """A small array, compiled here: whole tiles, blocks, chunks, partial sums, slow and fast, transposed operands."""
    compile_memory(RtlArray(3, 2, kind, 8, 8, Fraction(2), 200), tmp_path, quick=True)
    cases = [
        ((7, 5, 9), 36, "1/3", 4, (False, True)),
        ((20, 3, 4), 36, "2", 1, (True, False)),
        ((7, 5, 9), 200, "3/2", 4, (True, True)),
        ((1, 1, 1), 100, "2", 4, (False, False)),
        ((4, 11, 30), 60, "2", 4, (False, False)),
    ]
    for dataflow in ["os"] if kind == "os" else ["ws", "is"]:
        for seed, (shape, buffer_bytes, rate, result_bytes, lies) in enumerate(cases):
            array = RtlArray(3, 2, dataflow, 8, 8, Fraction(rate), buffer_bytes, result_bytes)
            setting = Setting(array, "drawn", shape, lies)
            assert [simulated(setting, tmp_path, seed)] == models([setting]), setting
    if kind == "ws":  # a few sums of several kept tiles: some leave a half while the array adds to others of it
        for dataflow, shape in (("ws", (4, 9, 25)), ("is", (9, 4, 25))):
            for rate, result_bytes in (("2", 1), ("1", 4), ("1/3", 4)):
                setting = Setting(
                    RtlArray(3, 2, dataflow, 8, 8, Fraction(rate), 100, result_bytes), "drawn", shape, (False, False)
                )
                assert plan(*shape, setting.array.behind).block == 3
                assert [simulated(setting, tmp_path, 6)] == models([setting]), setting


@st.composite
def products(draw):
    """One product behind a DMA: long loops of steps, of groups, of blocks, and short ones."""
    m, n, k = (draw(st.one_of(st.integers(1, 12), st.integers(1, 60), st.integers(100, 160))) for _ in range(3))
    rows, cols, size = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.sampled_from([150, 600, 3_000, 10**5]))
    each, result = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    rate = draw(
        st.sampled_from([Fraction(1, 3), Fraction(1), Fraction(2), Fraction(7, 2), Fraction(13), Fraction(999)])
    )
    dataflow, buffers = draw(st.sampled_from(["os", "ws", "is"])), buffers_of(max(size, 30 * each), rows, cols, each)
    return (
        m,
        n,
        k,
        Behind(
            rows,
            cols,
            dataflow,
            Buffers(buffers.left, max(buffers.top, rows), max(buffers.results, rows)),
            rate,
            each,
            result,
        ),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(products(), min_size=1, max_size=4))
def test_steps_left_out_together_come_to_what_a_walk_through_every_step_finds(many):
    assert timed_all(many) == [walked(*product) for product in many]


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 40), rows=st.integers(1, 6), cols=st.integers(1, 6),
    dataflow=st.sampled_from(["os", "ws", "is"]), size=st.sampled_from([150, 300, 1_000, 100_000]),
    rate=st.sampled_from([Fraction(1, 3), Fraction(1), Fraction(7, 2), Fraction(1_000)]),
)  # fmt: skip
def test_cycles_and_bytes_keep_their_bounds(m, n, k, rows, cols, dataflow, size, rate):
    said = timed(m, n, k, Behind(rows, cols, dataflow, buffers_of(size, rows, cols), rate))
    assert said.compute_cycles == gemm_cycles(m, n, k, rows=rows, cols=cols, dataflow=dataflow) + 1
    assert said.cycles >= said.dram_bytes / rate
    assert said.stall_cycles > 0
    assert said.first_bytes >= m * k
    assert said.second_bytes >= k * n
    assert said.written_bytes == 4 * m * n
    if size == 100_000:
        assert said.dram_bytes == m * k + k * n + 4 * m * n
    if dataflow == "os":
        assert said.spilled_bytes == 0


def test_no_products_take_nothing():
    assert timed_all([]) == []


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
@pytest.mark.parametrize("each", [1, 4])
def test_the_least_half_of_a_buffer_holds_a_fold_and_one_byte_less_does_not(dataflow, each):
    least = least_half_bytes(Behind(5, 3, dataflow, Buffers(0, 0, 0), Fraction(1), each, each))
    for size, holds in ((least, True), (least - 1, False)):
        behind = Behind(5, 3, dataflow, buffers_of(size, 5, 3, each), Fraction(1), each, each)
        if holds:
            assert timed(9, 9, 9, behind).cycles > 0
        else:
            with pytest.raises(UsageError, match="half a buffer"):
                timed(9, 9, 9, behind)


def test_a_product_of_one_fold_by_hand():
    """Loads of 12 and 8 bytes at 2 a cycle, K + rows + cols - 2 cycles, rows + 1 to drain, 6 results of 4 bytes."""
    said = timed(3, 2, 4, Behind(3, 2, "os", Buffers(10, 10, 10), Fraction(2)))
    assert said.compute_cycles == 4 + 3 + 2 - 2
    assert said.stall_cycles == 1 + 6 + 4 + 1  # one before the first transfer, one before the first fold
    assert said.tail_cycles == 3 + 1 + 1 + 12
    assert (said.first_bytes, said.second_bytes, said.written_bytes) == (12, 8, 24)


def test_partial_sums_go_out_and_come_back_for_each_tile_of_k_but_one():
    said = timed(20, 2, 12, Behind(3, 2, "ws", Buffers(100, 10, 8), Fraction(2)))
    assert said.spilled_bytes == 2 * 3 * 20 * 2 * 4


@pytest.mark.parametrize(
    ("dataflow", "buffers", "said"),
    [("os", Buffers(9, 9, 3), "results"), ("ws", Buffers(9, 3, 9), "top"), ("is", Buffers(0, 9, 9), "left")],
)
def test_buffers_too_small_for_a_fold_are_one_line(dataflow, buffers, said):
    with pytest.raises(UsageError, match=said):
        timed(5, 5, 5, Behind(4, 4, dataflow, buffers, Fraction(1)))
