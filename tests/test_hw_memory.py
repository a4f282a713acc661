"""Peak memory: packing against exhaustive search, liveness against a naive walk, and our own client's resident set."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.bundle import read_bundle
from hw_profiles.client_memory import COEFFICIENTS, client_memory, execution_order, load_coefficients
from hw_profiles.graph import bundle_workloads, read_workload
from hw_profiles.memory import Block, largest_batch, pack, peak_memory
from hw_profiles.networks import build_network
from hw_profiles.training import training_step
from hw_profiles.workload import Layer, Tensor, Workload


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
    step = training_step(forward, "fedavg", 10)
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
    training = {batch: peak_memory(training_step(work, "fedavg", 10)) for batch, work in works.items()}
    assert training[1].peak_bytes < training[16].peak_bytes < training[64].peak_bytes
    assert training[1].optimizer == training[64].optimizer


def test_halving_the_precision_halves_the_peak():
    step = training_step(read_workload(build_network("spherefed_convnet"), batch=8), "fedavg", 10)
    full, half = peak_memory(step, float_bytes=4), peak_memory(step, float_bytes=2)
    assert half.peak_bytes == pytest.approx(full.peak_bytes / 2, rel=0.01)


@settings(max_examples=50, deadline=None)
@given(fixed=st.integers(0, 100), each=st.integers(1, 50), available=st.integers(1, 5000))
def test_the_largest_batch_fits_and_one_more_does_not(fixed, each, available):
    found = largest_batch(lambda batch: fixed + each * batch, available, limit=64)
    naive = max((b for b in range(1, 65) if fixed + each * b <= available), default=0)
    assert found == naive


def test_the_execution_order_is_a_valid_one_of_the_same_layers():
    step = training_step(read_workload(build_network("spherefed_resnet18"), batch=1), "fedavg", 10)
    ordered = execution_order(step)
    assert sorted(layer.name for layer in ordered.layers) == sorted(layer.name for layer in step.layers)
    makers = {name for layer in step.layers for name in layer.writes} - {
        n for n, t in step.tensors.items() if t.role in ("parameter", "optimizer")
    }
    done = set()
    for layer in ordered.layers:
        assert {name for name in layer.reads if name in makers} <= done
        done.update(layer.writes)


CHILD = """
import sys
import numpy as np
from contract.bundle import read_bundle
from edge_client.data import LocalData
from edge_client.measure import peak_rss_bytes
from edge_client.trainer import Trainer
bundle = read_bundle(sys.argv[1])
m = bundle.manifest
trainer = Trainer(bundle)
trainer.load_state(bundle.params)
x, y = np.zeros((2 * m.batch, *m.input_shape), np.uint8), np.zeros(2 * m.batch, np.int64)
trainer.fit(LocalData(x, y), epochs=1, lr=1e-3, given={}, seed=0)
print(peak_rss_bytes())
"""


def test_our_own_clients_peak_is_predicted_within_a_quarter(mnist_like_bundle):
    """Default network, in a process of its own; the whole table is benchmarks/memory_model.py."""
    path = mnist_like_bundle()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    _, step = bundle_workloads(read_bundle(path))
    predicted = client_memory(step, training=True)
    assert predicted.peak_bytes == pytest.approx(int(done.stdout), rel=0.25)
    assert sum(predicted.by_use().values()) == predicted.peak_bytes
    assert predicted.peak_bytes > 1.1 * load_coefficients()["base_bytes"]
    assert set(load_coefficients()) == set(COEFFICIENTS)


def test_a_bundle_without_training_needs_no_second_state(mnist_like_bundle):
    features, step = bundle_workloads(read_bundle(mnist_like_bundle()), batch=32)
    inference, training = client_memory(features, training=False), client_memory(step, training=True)
    assert inference.state == 0
    assert training.state >= 2 * training.weights
    assert client_memory(step, training=True, arena_scale=2).arena == pytest.approx(2 * training.arena, abs=2)
