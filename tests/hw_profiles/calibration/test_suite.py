"""The suite's graphs: what is written without the onnx package, what ships of them, and that our runtime runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from protofleet.commands.calibrate import prepared, timed_run
from protofleet.hw_profiles.calibration import suite
from protofleet.hw_profiles.calibration.amounts import AMOUNTS, amounts_of
from protofleet.hw_profiles.calibration.design import Point, halton
from protofleet.hw_profiles.calibration.graph_bytes import SmallGraph
from protofleet.hw_profiles.calibration.suite import cases, suite_operators, suite_table
from protofleet.hw_profiles.workload.from_onnx import read_workload


def test_what_ships_is_what_the_graphs_ask_for() -> None:
    shipped = json.loads(Path(suite.__file__).with_name("suite.json").read_text(encoding="utf-8"))
    made = suite_table()
    assert shipped["operators"] == made["operators"]
    assert shipped["rows"] == made["rows"]
    assert 240 <= len(cases()) <= 310


def test_some_graphs_are_whole_networks_and_steps_whose_numbers_no_small_cache_keeps() -> None:
    """Weights that are met once a run are `near` or `far`, as a small graph's are where other numbers lie between."""
    near, far = AMOUNTS.index("near"), AMOUNTS.index("far")
    for part in ("inference", "training"):
        whole = [case for case in cases() if case.part == part and case.whole]
        assert len(whole) >= 10
        assert all(case.between == 0 for case in whole)
        assert max(case.amounts[far] for case in whole) > 1e6
        assert max(len(case.graph().to_bytes()) for case in whole) < 26e6  # beside 64 MB in a board's 512
        small = [case for case in cases() if case.part == part and not case.whole]
        assert {case.between for case in small} == {8 << 20, 64 << 20}
        assert all(case.amounts[near] > 0 for case in small)
        assert all(case.amounts[far] > 0 for case in small if case.between == 64 << 20)
        assert sum(case.amounts[far] == 0 for case in small if case.between == 8 << 20) > 30  # all but the large ones


def test_every_amount_is_in_some_graph() -> None:
    """What no graph has, nothing could be learned of; fusing and layouts are inference's alone."""
    asked = np.array([case.amounts for case in cases()])
    missing = [name for name, amount in zip(AMOUNTS, asked.sum(axis=0), strict=True) if not amount]
    assert missing == ["gathered"]  # a few numbers of a step's head


def test_a_graph_is_one_that_onnx_reads() -> None:
    for case in cases()[::7]:
        model = onnx.load_from_string(case.graph().to_bytes())
        onnx.checker.check_model(model, full_check=True)
        assert case.graph().to_bytes() == case.graph().to_bytes()


@pytest.mark.parametrize("part", ["inference", "training"])
def test_our_runtime_runs_a_graph_of_each_kind(part: str) -> None:
    filler = np.ones(1024, np.float32)
    for case in cases():
        if case.part == part and case.index == 0:
            run = prepared(case.graph(), case.kind, training=part == "training", threads=1)
            assert timed_run(run, 1, filler, seconds=0.0) > 0


def test_the_design_fills_the_space() -> None:
    numbers = sorted(halton(index, 2) for index in range(1, 17))
    assert max(np.diff(numbers)) <= 1 / 8
    sizes = [Point(3, index).size(16, 1024, 16) for index in range(30)]
    assert min(sizes) <= 32
    assert max(sizes) >= 512
    assert all(size % 16 == 0 for size in sizes)


def test_runs_are_shorter_where_an_operator_has_to_look_up() -> None:
    """A transposition that keeps rows moves whole rows; one that turns them, single numbers; so with cuts and sums."""

    def amounts(
        op: str, shape: tuple[int, ...], *more: str, graph: SmallGraph, **attributes: object
    ) -> dict[str, float]:
        at = graph.add(op, graph.input(shape), *more, **attributes)  # type: ignore[arg-type]
        graph.output(at, [1] * len(shape))
        onnx_graph = onnx.load_from_string(graph.to_bytes())
        onnx_graph.graph.output[0].type.tensor_type.ClearField("shape")
        row = amounts_of(read_workload(onnx_graph.SerializeToString()), training=True)
        return dict(zip(AMOUNTS, row, strict=True))

    kept = amounts("Transpose", (8, 16, 32), graph=SmallGraph(), perm=[1, 0, 2])
    turned = amounts("Transpose", (8, 16, 32), graph=SmallGraph(), perm=[0, 2, 1])
    assert kept["turned rows"] == turned["turn"] == 8 * 16 * 32
    assert kept["runs turned rows"] == 8 * 16
    assert turned["runs turn"] == 8 * 32  # rows that are written number by number

    graph = SmallGraph()
    ends = [graph.ints([0]), graph.ints([32]), graph.ints([2])]
    whole = amounts("Slice", (8, 16, 64), *ends, graph=graph)
    graph = SmallGraph()
    ends = [graph.ints([0]), graph.ints([64]), graph.ints([2]), graph.ints([2])]
    second = amounts("Slice", (8, 16, 64), *ends, graph=graph)
    assert whole["cut"] == second["cut"]
    assert second["runs cut"] == 32 * whole["runs cut"]

    graph = SmallGraph()
    by_channel = amounts("Mul", (8, 16, 64), graph.input((16, 1)), graph=graph)
    graph = SmallGraph()
    at_once = amounts("Mul", (8, 16, 64), graph.input(()), graph=graph)
    assert by_channel["runs two"] == 8 * 16
    assert at_once["runs two"] == 1


def test_a_pad_copies_planes_where_rows_are_whole_and_rows_where_something_is_cut_off() -> None:
    def rows(*pads: int) -> float:
        graph = SmallGraph()
        top, bottom, right = pads
        made = graph.add("Pad", graph.input((4, 8, 16, 16)), graph.ints([0, 0, top, 0, 0, 0, bottom, right]))
        graph.output(made, (4, 8, 16 + top + bottom, 16 + right))
        found = amounts_of(read_workload(graph.to_bytes(), roles={}), training=True)
        return float(found[AMOUNTS.index("runs padded")] * 16 / (16 + top + bottom) * 16 / (16 + right))

    assert rows(1, 1, 0) == 4 * 8
    assert rows(1, 1, 1) == 4 * 8 * 16
    assert rows(-1, 0, 0) == pytest.approx(4 * 8 * 16)


def test_a_product_with_a_constant_vector_is_one_with_a_block_of_columns() -> None:
    """A runtime lays a constant out in blocks when it loads, one column, too; a vector that varies it does not."""

    def found(constant: bool) -> dict[str, float]:
        graph = SmallGraph()
        vector = graph.filled((64, 1), 0.5) if constant else graph.input((64, 1))
        graph.output(graph.add("MatMul", graph.input((32, 64)), vector), (32, 1))
        row = amounts_of(read_workload(graph.to_bytes(), roles={}), training=True)
        return dict(zip(AMOUNTS, row, strict=True))

    assert found(False)["vector"] == 32 * 64
    assert found(True)["vector"] == 0
    assert found(True)["gemm"] == 32 * 64 * 16
    assert found(True)["packed"] == 64 * 16


def test_a_convolution_whose_kernel_changes_is_products_and_their_columns() -> None:
    graph = SmallGraph()
    window = {"kernel_shape": [3, 3], "pads": [1] * 4}
    graph.output(graph.add("Conv", graph.input((2, 4, 8, 8)), graph.input((16, 4, 3, 3)), **window), (2, 16, 8, 8))
    row = dict(zip(AMOUNTS, amounts_of(read_workload(graph.to_bytes(), roles={}), training=True), strict=True))
    assert row["gemm"] == 2 * 16 * 36 * 64
    assert row["columns"] == row["gemm right"] == 2 * 36 * 64
    assert row["pieces"] == 2


def test_what_many_are_added_to_is_read_again_for_each_of_them() -> None:
    graph = SmallGraph()
    graph.output(graph.add("Sum", *(graph.input((8, 64)) for _ in range(4))), (8, 64))
    row = amounts_of(read_workload(graph.to_bytes(), roles={}), training=True)
    assert row[AMOUNTS.index("two")] == 3 * 3 * 8 * 64


def test_an_operator_begins_in_the_cold_where_much_lay_between() -> None:
    graph = SmallGraph()
    graph.output(graph.add("Relu", graph.add("Neg", graph.input((8, 64)))), (8, 64))
    workload = read_workload(graph.to_bytes(), roles={})
    for between, near, far in ((0, 0, 0), (8 << 20, 2, 0), (64 << 20, 2, 2)):
        row = dict(zip(AMOUNTS, amounts_of(workload, training=True, between=between), strict=True))
        assert [row["launch near"], row["code near"]] == [near, near]
        assert [row["launch far"], row["code far"]] == [far, far]


def test_operators_of_a_part_are_named() -> None:
    assert {"Conv", "Clip", "HardSwish", "Concat"} <= suite_operators("inference")
    assert {"Gemm", "MatMul", "HardSigmoid", "Slice", "ConvTranspose"} <= suite_operators("training")
