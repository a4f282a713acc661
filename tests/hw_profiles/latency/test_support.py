"""Intervals from what was left out, and whether a figure has ground."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest
from onnx import TensorProto, helper

from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.latency.cross_validation import (
    LeftOut,
    coverage_table,
    error_table,
    nested,
    with_halves,
)
from protofleet.hw_profiles.latency.datasheet import device_rates, log_cost_ms
from protofleet.hw_profiles.latency.hierarchical_fit import nominal_of
from protofleet.hw_profiles.latency.intervals import CASES, binomial_p, calibrate
from protofleet.hw_profiles.latency.operator_classes import CLASSES, demand
from protofleet.hw_profiles.latency.predict import coefficients, predict
from protofleet.hw_profiles.latency.published_rows import Row, Setting, reference_demands
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import read_workload
from protofleet.hw_profiles.workload.model import Workload

DEVICES = load_devices()
_BOARDS = ("raspberry-pi-4", "jetson-nano")
PI4, SERVER = DEVICES["raspberry-pi-4"], DEVICES["x86-server"]


def _workload(nodes: list, sizes: dict[str, tuple[int, ...]], x: tuple[int, ...], batch: int = 1) -> Workload:
    weights = [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s, np.float32)) for n, s in sizes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *x])]
    graph = helper.make_graph(nodes, "g", inputs, [output], weights)
    return read_workload(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), batch=batch)


def _network(layers: int = 6, side: int = 56, batch: int = 1) -> Workload:
    """3x3 convolutions of 64 channels with a ReLU each, and a classifier: what published networks are made of."""
    sizes: dict[str, tuple[int, ...]] = {f"w{i}": (64, 64, 3, 3) for i in range(layers)} | {"head": (64, 10)}
    nodes = []
    for i in range(layers):
        nodes.append(helper.make_node("Conv", [f"r{i}" if i else "x", f"w{i}"], [f"c{i}"], f"c{i}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i + 1}"], f"r{i}"))
    nodes += [
        helper.make_node("GlobalAveragePool", [f"r{layers}"], ["mean"], "mean"),
        helper.make_node("Flatten", ["mean"], ["flat"], "flat"),
        helper.make_node("MatMul", ["flat", "head"], ["y"], "head"),
    ]
    return _workload(nodes, sizes, (64, side, side), batch)


def _attention(blocks: int = 4) -> Workload:
    """Blocks of attention over 196 tokens of 192 numbers: as many multiply-accumulates as a small network's."""
    nodes, sizes, at = [], {}, "x"
    for b in range(blocks):
        sizes |= {f"{n}{b}": (192, 192) for n in "qkv"} | {f"s{b}": (192,), f"b{b}": (192,)}
        nodes.append(helper.make_node("LayerNormalization", [at, f"s{b}", f"b{b}"], [f"n{b}"], f"norm{b}"))
        nodes += [helper.make_node("MatMul", [f"n{b}", f"{n}{b}"], [f"{n}_{b}"], f"{n}{b}") for n in "qkv"]
        nodes.append(helper.make_node("Transpose", [f"k_{b}"], [f"t{b}"], f"turn{b}", perm=[0, 2, 1]))
        nodes.append(helper.make_node("MatMul", [f"q_{b}", f"t{b}"], [f"a{b}"], f"scores{b}"))
        nodes.append(helper.make_node("Softmax", [f"a{b}"], [f"p{b}"], f"shares{b}"))
        at = "y" if b == blocks - 1 else f"x{b}"
        nodes.append(helper.make_node("MatMul", [f"p{b}", f"v_{b}"], [at], f"mix{b}"))
    return _workload(nodes, sizes, (196, 192))


def test_a_network_like_the_rows_on_their_runtime_and_device_is_interpolated() -> None:
    found = predict(_network(), PI4, runtime="ncnn")
    assert found.rows > 0
    assert found.support.status == "interpolated"
    assert found.support.reasons == ()
    assert found.error.left_out == "family"
    assert found.error.of == "ncnn on this device"
    assert found.error == replace(found.error, **{k: coefficients().errors["family"]["ncnn, raspberry-pi-4"][k]
                                                  for k in ("median", "p90", "rows")})  # fmt: skip


def test_a_transformer_from_rows_of_convolutions_has_no_ground() -> None:
    for runtime in ("ncnn", "onnxruntime"):
        found = predict(_attention(), PI4, runtime=runtime)
        assert found.support.status == "no ground"
        assert any("MatMul" in reason for reason in found.support.reasons)
        assert "no interval" in found.interval_text()
    assert "80 % within" in predict(_network(), PI4, runtime="ncnn").interval_text()


def test_a_product_with_the_same_matrix_for_every_token_is_one_over_tokens() -> None:
    """Torch writes it as 197 products of one row; each has weights and one row, as a classifier has."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["rows"], "turn", perm=[1, 0, 2]),
        helper.make_node("Expand", ["w", "shape"], ["copies"], "copies"),
        helper.make_node("MatMul", ["rows", "copies"], ["y"], "in_proj"),
    ]
    tensors = [
        helper.make_tensor("w", TensorProto.FLOAT, (768, 2304), np.zeros((768, 2304), np.float32)),
        helper.make_tensor("shape", TensorProto.INT64, (3,), [197, 768, 2304]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 197, 768])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=[helper.make_opsetid("", 20)]
    )
    workload = fold_weights(read_workload(model, batch=1))
    assert predict(workload, PI4, runtime="ncnn").support.status == "no ground"


def test_figures_in_reasons_have_no_exponent() -> None:
    far = predict(_network(layers=20, side=224), PI4, runtime="ncnn")
    assert any("M multiply-accumulates" in reason for reason in far.support.reasons)
    assert "e+0" not in " ".join((far.interval_text(), *far.support.reasons))


def test_each_axis_is_looked_at() -> None:
    nuc = replace(PI4, name="a-board-of-ones-own")
    wanted = {
        "batch 8": predict(_network(batch=8), PI4, runtime="ncnn"),
        "multiply-accumulates; rows of ncnn here": predict(_network(layers=1), PI4, runtime="ncnn"),
        "no row of onnxruntime": predict(_network(), PI4, runtime="onnxruntime"),
        "no row of this device": predict(_network(), nuc, runtime="ncnn"),
    }
    for reason, found in wanted.items():
        assert found.support.status == "extrapolated", reason
        assert any(reason in said for said in found.support.reasons), (reason, found.support)
    far = predict(_network(layers=1, side=8), PI4, runtime="ncnn")
    assert far.support.status == "no ground"
    assert "multiply-accumulates" in far.support.reasons[0]
    ours = predict(_network(), nuc, runtime="onnxruntime")  # no Arm processor has rows of it, nor this board any
    assert ours.support.status == "no ground"
    assert "Arm processors" in ours.support.reasons[-1]
    assert predict(_network(), SERVER, runtime="onnxruntime", threads="1").support.status == "interpolated"


@pytest.mark.parametrize(
    ("name", "runtime", "case"),
    [("raspberry-pi-4", "ncnn", "family"), ("raspberry-pi-4", "onnxruntime", "runtime"), ("mine", "ncnn", "device")],
)
def test_the_interval_is_the_shipped_width_of_the_case(name: str, runtime: str, case: str) -> None:
    device = replace(PI4, name=name)
    found, known = predict(_network(), device, runtime=runtime), coefficients()
    threads = found.setting.threads
    fit = known.fits[name if name != "mine" else "*", runtime, "fp32", threads]
    cost = demand(_network()) * np.exp(log_cost_ms(device_rates(device, "cpu", "fp32", threads), "cpu") + fit.offsets)
    share = cost / cost.sum()
    sd = sqrt(share @ fit.covariance @ share + known.noise**2)
    widths = known.widths[case]  # type: ignore[index]
    effects = widths.runtimes.get(runtime, 0.0) + widths.devices.get(name, 0.0)
    half = widths.factor * exp(widths.base + widths.slope * log(sd / 0.1) + effects)
    assert found.ms == pytest.approx(cost.sum())
    assert log(found.high_ms / found.ms) == pytest.approx(half)
    assert log(found.ms / found.low_ms) == pytest.approx(half)
    assert found.error.left_out == case


def test_shipped_intervals_held_on_families_left_out() -> None:
    """75 to 85 % of all rows, by widths that saw none of the row's family."""
    checks = coefficients().checks["by family"]
    rows = sum(line["rows"] for name, line in checks.items() if name != "all published")
    inside = sum(line["rows"] * line["inside_80"] for name, line in checks.items() if name != "all published")
    assert rows >= 100
    assert 0.75 <= inside / rows <= 0.85


def _rows(rng: np.random.Generator, noise: dict[str, float]) -> list[Row]:
    """A world in which one board's times scatter more than another's."""
    rows = []
    for board, sd in noise.items():
        setting = Setting(board, "cpu", "ncnn", "fp32", "all")
        for model, amounts in reference_demands().items():
            ms = float(amounts @ np.exp(nominal_of(setting, DEVICES[board])))
            rows.append(Row(setting, model, amounts, ms * float(np.exp(rng.normal(0, sd))), "synthetic"))
    return rows


def test_widths_learn_which_device_scatters() -> None:
    rng = np.random.default_rng(1)
    rows = _rows(rng, dict(zip(_BOARDS, (0.05, 0.4), strict=True)))
    unit_ms = {d: np.exp(nominal_of(Setting(d, "cpu", "ncnn", "fp32", "all"), DEVICES[d])) for d in _BOARDS}
    left_out = [LeftOut(row, float(row.demand @ unit_ms[row.setting.device]), 0.1, 1.0, 1.0) for row in rows]
    widths = calibrate(left_out, "family")
    quiet, loud = (
        widths.half(Setting(d, "cpu", "ncnn", "fp32", "all"), 0.1) for d in ("raspberry-pi-4", "jetson-nano")
    )
    assert loud > 3 * quiet
    table = coverage_table(with_halves(left_out))
    assert 0.7 <= table["all"]["inside"] / table["all"]["rows"] <= 0.9
    for group in ("device raspberry-pi-4", "device jetson-nano"):
        assert not table[group]["fails"]
    narrow = coverage_table([replace(one, half=0.01) for one in left_out])
    assert narrow["all"]["fails"]
    assert error_table([replace(one, half=9.0) for one in left_out])["all published"]["inside_80"] == 1.0


def test_nested_intervals_saw_nothing_of_the_family() -> None:
    """A family that is ten times slower than all others is outside; had its error been seen, it would be inside."""
    kept = ("ResNet18|224x224", "MnasNet-1.0|224x224", "GoogLeNet|224x224", "SqueezeNet1.1|227x227")
    made = [row for row in _rows(np.random.default_rng(2), {"raspberry-pi-4": 0.05}) if row.model in kept]
    rows = [replace(row, ms=10 * row.ms) if row.model.startswith("Mnas") else row for row in made]
    found = {one.row.model: one for one in nested(rows, DEVICES)}
    assert set(found) == set(kept)
    odd = found["MnasNet-1.0|224x224"]
    assert abs(log(odd.ms / odd.row.ms)) > odd.half > 0


def test_the_binomial_test_is_the_exact_one() -> None:
    assert binomial_p(8, 10) == pytest.approx(1.0)
    assert binomial_p(0, 1) == pytest.approx(0.2)
    assert binomial_p(25, 100) < 1e-20
    assert binomial_p(97, 100) < 0.01
    assert binomial_p(75, 100) > 0.05
    assert {case: coefficients().widths[case].factor > 0 for case in CASES} == dict.fromkeys(CASES, True)
    assert len(CLASSES) == 15
