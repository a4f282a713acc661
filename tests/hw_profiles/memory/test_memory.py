"""Peak memory: packing against exhaustive search, liveness against a naive walk, and our own client's resident set."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.hw_profiles.memory.liveness import Block, blocks_of, largest_batch, pack, peak_memory
from protofleet.hw_profiles.memory.process_rss import (
    COEFFICIENTS,
    ClientMemory,
    client_memory,
    execution_order,
    load_model,
    memory_terms,
)
from protofleet.hw_profiles.workload.baselines import fedavg
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads, read_workload
from protofleet.hw_profiles.workload.model import Layer, Tensor, Workload
from protofleet.hw_profiles.workload.paper_networks import build_network
from protofleet.hw_profiles.workload.training_step import training_step


def _blocks(spans):
    return [Block(f"b{i}", size, start, start + length, "work") for i, (size, start, length) in enumerate(spans)]


def _live(blocks, moment):
    return sum(b.nbytes for b in blocks if b.start <= moment <= b.end)


_spans = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(_spans)
def test_an_arena_holds_all_that_lives_at_once_and_is_near_the_best_possible(spans):
    blocks = _blocks(spans)
    arena = pack(blocks)
    live = max(_live(blocks, moment) for moment in range(12))
    assert live <= arena <= sum(b.nbytes for b in blocks)
    best = min(_first_fit(order) for order in itertools.permutations(blocks)) if len(blocks) <= 5 else live
    assert best <= arena <= 2 * max(best, live)


def _first_fit(order):
    placed = []
    for block in order:
        taken = sorted((o, o + b.nbytes) for o, b in placed if b.start <= block.end and b.end >= block.start)
        offset = 0
        for low, high in taken:
            if low - offset >= block.nbytes:
                break
            offset = max(offset, high)
        placed.append((offset, block))
    return max(o + b.nbytes for o, b in placed)


def _chain(*sizes, kind="pool"):
    """A chain of layers, each writing one tensor of so many floats."""
    tensors = {"t0": Tensor("t0", (sizes[0],), "input")}
    layers = []
    for index, size in enumerate(sizes[1:], 1):
        tensors[f"t{index}"] = Tensor(f"t{index}", (size,), "activation")
        layers.append(Layer(f"l{index}", "Op", kind, "forward", (f"t{index - 1}",), (f"t{index}",)))
    return Workload("chain", 1, tuple(layers), tensors, (f"t{len(sizes) - 1}",))


def test_a_chain_needs_its_two_largest_neighbours():
    assert peak_memory(_chain(160, 320, 480, 16)).peak_bytes == 4 * (320 + 480)


def test_a_view_is_free_and_an_elementwise_result_takes_its_operands_place():
    assert peak_memory(_chain(160, 160, 160, kind="view")).peak_bytes == 4 * 160
    assert peak_memory(_chain(16, 160, 160, 160, kind="elementwise")).peak_bytes == 4 * (16 + 160)


def test_an_operand_that_is_needed_later_is_not_overwritten():
    chain = _chain(16, 160, 160, 160, kind="elementwise")
    last = Layer("sum", "Add", "pool", "forward", ("t1", "t3"), ("t4",))
    tensors = {**chain.tensors, "t4": Tensor("t4", (160,), "activation")}
    held = peak_memory(Workload("w", 1, (*chain.layers, last), tensors, ("t4",)))
    assert held.peak_bytes == 3 * 4 * 160


def test_the_parts_sum_to_the_peak_and_training_saves_activations():
    forward = read_workload(build_network("spherefed_resnet18"), batch=4)
    step = training_step(forward, fedavg(forward, 10))
    memory = peak_memory(step)
    assert sum(memory.by_use().values()) == memory.peak_bytes
    weights = 4 * (forward.parameters + 512 * 10)
    assert memory.weights == memory.optimizer == weights
    saved_at_least = 4 * sum(
        forward.tensors[n].elements for layer in forward.layers if layer.op == "Conv" for n in layer.writes
    )
    assert memory.arena_bytes >= saved_at_least
    assert peak_memory(forward).activations == 0


def test_working_values_grow_with_the_batch_and_weights_do_not():
    works = {batch: read_workload(build_network("spherefed_convnet"), batch=batch) for batch in (1, 16, 64)}
    inference = {batch: peak_memory(work) for batch, work in works.items()}
    assert inference[1].weights == inference[64].weights
    assert inference[64].arena_bytes == 4 * inference[16].arena_bytes
    training = {batch: peak_memory(training_step(work, fedavg(work, 10))) for batch, work in works.items()}
    assert training[1].peak_bytes < training[16].peak_bytes < training[64].peak_bytes
    assert training[1].optimizer == training[64].optimizer


def test_halving_the_precision_halves_the_peak():
    forward = read_workload(build_network("spherefed_convnet"), batch=8)
    step = training_step(forward, fedavg(forward, 10))
    full, half = peak_memory(step, float_bytes=4), peak_memory(step, float_bytes=2)
    assert half.peak_bytes == pytest.approx(full.peak_bytes / 2, rel=0.01)


@settings(max_examples=50, deadline=None)
@given(fixed=st.integers(0, 100), each=st.integers(1, 50), available=st.integers(1, 5000))
def test_the_largest_batch_fits_and_one_more_does_not(fixed, each, available):
    found = largest_batch(lambda batch: fixed + each * batch, available, limit=64)
    naive = max((b for b in range(1, 65) if fixed + each * b <= available), default=0)
    assert found == naive


def test_the_execution_order_is_a_valid_one_of_the_same_layers():
    forward = read_workload(build_network("spherefed_resnet18"), batch=1)
    step = training_step(forward, fedavg(forward, 10))
    ordered = execution_order(step)
    assert sorted(layer.name for layer in ordered.layers) == sorted(layer.name for layer in step.layers)
    makers = {name for layer in step.layers for name in layer.writes} - {
        n for n, t in step.tensors.items() if t.role in ("parameter", "optimizer")
    }
    done = set()
    for layer in ordered.layers:
        assert {name for name in layer.reads if name in makers} <= done
        done.update(layer.writes)


def test_a_gap_of_exactly_its_size_is_taken():
    blocks = [Block("a", 4, 0, 9, "work"), Block("b", 3, 0, 4, "work"), Block("c", 3, 0, 9, "work")]
    assert pack([*blocks, Block("d", 3, 5, 9, "work")]) == 10


def test_buffers_are_whole_lines_of_64_bytes_and_outputs_stay_to_the_end():
    chain = _chain(16, 17, 1, 1)  # 64, 68, 4 and 4 bytes
    blocks = {block.name: block for block in blocks_of(chain)}
    assert [blocks[f"t{i}"].nbytes for i in range(4)] == [64, 128, 64, 64]
    early = Workload("w", 1, chain.layers, chain.tensors, ("t1",))
    assert {b.name: b.end for b in blocks_of(early)} == {"t0": 0, "t1": 2, "t2": 2, "t3": 2}


def test_a_result_of_another_width_does_not_take_its_operands_place():
    chain = _chain(16, 160, 160, kind="elementwise")
    tensors = {**chain.tensors, "t1": Tensor("t1", (160,), "activation", bits=8)}
    assert "t2" in {block.name for block in blocks_of(Workload("w", 1, chain.layers, tensors, chain.outputs))}
    assert "t2" not in {block.name for block in blocks_of(chain)}


def test_what_a_step_holds_is_told_apart_by_what_it_is_for():
    forward = read_workload(build_network("spherefed_convnet"), batch=4)
    step = training_step(forward, fedavg(forward, 10))
    by_use = {use: {b.name for b in blocks_of(step) if b.use == use} for use in ("gradient", "saved")}
    weights = {name for name, tensor in step.tensors.items() if tensor.role == "parameter"}
    assert {name.split(":")[1] for name in by_use["gradient"]} == weights
    made = {name for layer in forward.layers for name in layer.writes}
    assert by_use["saved"] & made
    memory = peak_memory(step)
    assert memory.gradients > 0 < memory.activations
    assert not {b.use for b in blocks_of(forward)} & {"saved", "gradient"}


# ---- our own client ----

CHILD = """
import sys
from protofleet.edge_client.trials.memory_trial import WHOLE, peaks
print(max(peaks(sys.argv[1], 1, WHOLE)))
"""


def terms_of(path, samples):
    bundle = read_bundle(path)
    features, step = bundle_workloads(bundle, batch=bundle.manifest.extraction_batch)
    return memory_terms(bundle.manifest, fold_weights(features), step, samples)


@pytest.mark.parametrize("backbone", ["small_cnn", "fedproto_mnist", "fedhp_mnist"])
def test_our_own_device_takes_at_most_what_is_predicted_through_rounds_and_ffc(backbone, mnist_like_bundle):
    """In a process of its own, network aside, its own head solved; real clients: benchmarks/device/memory_model.py."""
    path = mnist_like_bundle(backbone=backbone, hyper={"epochs": 1})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    predicted = client_memory(terms_of(path, 200))
    assert int(done.stdout) <= predicted.at_most(predicted.peak_bytes)
    assert predicted.peak_bytes == pytest.approx(int(done.stdout), rel=0.35)
    assert not predicted.beyond


def test_ffc_adds_its_sums_and_their_copies(mnist_like_bundle):
    """fedhp_mnist has D = 1,024: its FFC round takes more than its training does."""
    terms = terms_of(mnist_like_bundle(backbone="fedhp_mnist"), 0)
    assert terms.gram == 8 * (1024 * 1025 // 2 + 10 * 1024)
    found = client_memory(terms)
    factor = load_model().coefficients["gram_factor"]
    assert found.closing - found.inference == pytest.approx(factor * terms.gram, abs=2)
    assert 4 < factor < 12, "one triangle in float64, the matrix it comes from, and the copies on its way out"
    assert found.closing > found.training
    assert found.peak_bytes == found.closing


def test_what_sends_class_means_alone_needs_no_room_for_ffcs_sums(mnist_like_bundle):
    """No round of FFC ends its run: `rounds.plan`."""
    ncm, ffc = (terms_of(mnist_like_bundle(name, backbone="fedhp_mnist"), 0).gram for name in ("ncm", "ffc"))
    assert (ncm, ffc) == (8 * 10 * 1024, 8 * (1024 * 1025 // 2 + 10 * 1024))


def test_a_projection_shrinks_ffcs_sums(mnist_like_bundle):
    terms = terms_of(mnist_like_bundle("ffc", hyper={"project": 32}), 0)
    assert terms.gram == 8 * (32 * 33 // 2 + 10 * 32)


def test_training_holds_two_states_and_the_weights_of_two_rounds(mnist_like_bundle):
    bundle = read_bundle(mnist_like_bundle())
    terms = terms_of(mnist_like_bundle(), 500)
    weights = 4 * bundle.manifest.parameter_count
    assert (terms.weights, terms.trained) == (weights, weights)
    assert terms.state == 4 * weights, "weights and momentum, twice"
    assert terms.data == 500 * (28 * 28 + 8)
    c = load_model().coefficients
    found = client_memory(terms)
    session = c["base_bytes"] + terms.data + c["session_bytes"] + c["node_bytes"] * terms.step_nodes
    assert found.training == pytest.approx(session + 7 * weights + c["arena_factor"] * terms.step_arena, abs=2)
    assert found.loading == pytest.approx(c["base_bytes"] + 2 * terms.data + weights, abs=2)
    idle = terms_of(mnist_like_bundle("ffc"), 500)
    assert (idle.trained, idle.state, client_memory(idle).training) == (0, 0, 0)


def test_adam_keeps_twice_as_much_as_momentum(mnist_like_bundle):
    momentum, adam = (terms_of(mnist_like_bundle(method), 0).state for method in ("fedproto", "fedhkd"))
    assert adam == pytest.approx(1.5 * momentum, rel=0.01)


def test_the_upper_bound_is_the_margin_that_left_out_networks_asked_for():
    model = load_model()
    assert model.margin >= 1.1
    assert ClientMemory(1, 1, 1, 1, 1, margin=1.5).at_most(100) == 150
    assert set(model.coefficients) == set(COEFFICIENTS)


def test_what_is_larger_than_all_that_was_measured_is_called_extrapolated(mnist_like_bundle):
    terms, model = terms_of(mnist_like_bundle(), 0), load_model()
    assert client_memory(terms).beyond == ()
    for name, word in (
        ("gram", "sums of the closing round"),
        ("step_arena", "working values of training"),
        ("weights", "weights"),
    ):
        edge = replace(terms, **{name: int(model.largest[name])})
        assert word not in client_memory(edge).beyond
        assert client_memory(replace(edge, **{name: int(model.largest[name]) + 1})).beyond == (word,)
