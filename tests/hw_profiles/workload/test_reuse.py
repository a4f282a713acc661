"""How far back a number was touched: weights a whole run, activations a few layers, and what a run finds between."""

from __future__ import annotations

from protofleet.hw_profiles.workload.model import Layer, Role, Tensor, Workload
from protofleet.hw_profiles.workload.reuse import constant_layers, touches

KB = 256  # elements of 4 bytes


def _chain(layers: int, *, weight: int = 100 * KB, made: int = 10 * KB) -> Workload:
    """x through some products, each with a weight of its own."""

    def tensor(name: str, elements: int, role: Role) -> tuple[str, Tensor]:
        return name, Tensor(name, (elements,), role)

    tensors = dict([tensor("a0", made, "input")])
    tensors |= dict(tensor(f"w{index}", weight, "parameter") for index in range(layers))
    tensors |= dict(tensor(f"a{index + 1}", made, "activation") for index in range(layers))
    steps = tuple(
        Layer(f"l{i}", "Gemm", "linear", "forward", (f"a{i}", f"w{i}"), (f"a{i + 1}",), weights=(f"w{i}",))
        for i in range(layers)
    )
    return Workload("chain", 1, steps, tensors, (f"a{layers}",))


def _distances(workload: Workload, kind: str, **given: object) -> list[float]:
    return [t.distance / 1024 for row in touches(workload, **given) for t in row if t.kind == kind]  # type: ignore[arg-type]


def test_weights_are_met_once_a_run_and_activations_at_once() -> None:
    workload = _chain(8)
    weights = _distances(workload, "weight")
    assert weights == [weights[0]] * 8
    assert 800 <= weights[0] <= 860  # eight weights, and the few buffers that activations take in turn
    assert max(_distances(workload, "read")[1:]) <= 20  # what the layer before has just written


def test_what_is_between_two_runs_is_added_to_what_one_finds_of_the_other() -> None:
    alone, between = _chain(8), float(1 << 20)
    assert _distances(alone, "weight", between=between)[3] == _distances(alone, "weight")[3] + 1024
    assert _distances(alone, "read", between=between)[1:] == _distances(alone, "read")[1:]


def test_an_intermediate_takes_the_memory_of_one_that_is_no_longer_needed() -> None:
    """Forty activations of 10 KB take three buffers, so none of them is written where nothing was for a whole run."""
    written = _distances(_chain(40, weight=1 * KB), "written")
    assert max(written[2:-1]) < 60
    long = _chain(40, weight=1 * KB)
    kept = Workload(long.name, 1, long.layers, long.tensors, tuple(f"a{i + 1}" for i in range(40)))
    assert min(_distances(kept, "written")) > 400  # all of them are wanted at the end


def test_views_and_what_a_product_takes_in_touch_nothing_of_their_own() -> None:
    workload = _chain(2)
    view = Layer("v", "Reshape", "view", "forward", ("a2",), ("v",))
    act = Layer("r", "Relu", "elementwise", "forward", ("v",), ("r",))
    tensors = workload.tensors | {n: Tensor(n, (10 * KB,), "activation") for n in ("v", "r")}
    longer = Workload("chain", 1, (*workload.layers, view, act), tensors, ("r",))
    apart = touches(longer)
    inside = touches(longer, inside={"r"})
    assert [t.kind for t in apart[2]] == ["node", "code"]
    assert [t.kind for t in apart[3]] == ["node", "code", "read", "written"]
    assert inside[3] == []


def test_a_layer_is_met_again_after_a_run_and_its_operators_code_after_the_last_of_them() -> None:
    workload = _chain(8)
    assert _distances(workload, "node") == [_distances(workload, "node")[0]] * 8
    assert _distances(workload, "node")[0] >= 800
    assert max(_distances(workload, "code")) <= 130  # one layer's weight and activations


def test_a_view_that_leaves_the_graph_is_copied() -> None:
    workload = _chain(2)
    view = Layer("v", "Reshape", "view", "forward", ("a2",), ("v",))
    tensors = workload.tensors | {"v": Tensor("v", (10 * KB,), "activation")}
    rows = touches(Workload("chain", 1, (*workload.layers, view), tensors, ("v",)))
    assert [t.kind for t in rows[2]] == ["node", "code", "read", "written"]


def test_what_reads_constants_alone_is_computed_when_the_graph_is_loaded() -> None:
    workload = _chain(1)
    fixed = Layer("f", "Reshape", "view", "forward", (), ("f",))
    later = Layer("g", "Neg", "elementwise", "forward", ("f",), ("g",))
    tensors = workload.tensors | {name: Tensor(name, (KB,), "activation") for name in "fg"}
    longer = Workload("chain", 1, (fixed, later, *workload.layers), tensors, workload.outputs)
    assert constant_layers(longer) == {"f", "g"}
    assert touches(longer)[:2] == [[], []]
