"""A graph reads nothing but the bundle's own weights, and ends: every way that ONNX has to point at a file is found by
name, and so is every way to run without end."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from commands import run
from contract_samples import empty_graph, small_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, ModelProto, TensorProto, helper
from safetensors.numpy import save

from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.bundle.graph_checks import MAX_NODES, Place, check_graph, weight_places
from protofleet.contract.errors import BundleError
from tests.contract.bundle.test_bundle_file import members_of, rewrite

PLACES = {"w": Place((2, 3), 64, 24)}


def outside(name: str = "secret", dims: tuple[int, ...] = (4,), kind: int = TensorProto.UINT8, **entries: object):
    """A tensor whose bytes lie in a file."""
    tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": "etc/passwd"} | entries).items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def graph_of(nodes=(), initializers=(), sparse=()):
    return helper.make_graph(list(nodes), "g", [], [], list(initializers), sparse_initializer=list(sparse))


def model_of(graph=None, **parts) -> ModelProto:
    return helper.make_model(graph or graph_of(), opset_imports=[helper.make_opsetid("", 20)], ir_version=10, **parts)


def right(**changes) -> TensorProto:
    entries = {"location": "params.safetensors", "offset": 64, "length": 24} | changes
    return outside(
        entries.pop("name", "w"), entries.pop("dims", (2, 3)), entries.pop("kind", TensorProto.FLOAT), **entries
    )


def sparse(values=None, indices=None) -> object:
    plain = helper.make_tensor("v", TensorProto.INT64, (1,), [0])
    return helper.make_sparse_tensor(values or plain, indices or plain, [3])


def node(**attributes) -> object:
    made = helper.make_node("Constant", [], ["c"])
    for name, value in attributes.items():
        attribute = AttributeProto(name=name)
        field = getattr(attribute, name)
        if name in ("tensors", "graphs", "sparse_tensors"):
            field.extend([value])
        else:
            field.CopyFrom(value)
        made.attribute.append(attribute)
    return made


def function() -> ModelProto:
    return model_of(functions=[helper.make_function("local", "f", [], ["c"], [node()], [])])


def training(kind: str) -> ModelProto:
    model = model_of()
    getattr(model.training_info.add(), kind).CopyFrom(graph_of(initializers=[outside()]))
    return model


def deep(levels: int) -> ModelProto:
    graph = graph_of(initializers=[outside()])
    for _ in range(levels):
        graph = graph_of([node(g=graph)])
    return model_of(graph)


def unflagged(**changes) -> TensorProto:
    tensor = outside(**changes)
    tensor.ClearField("data_location")
    return tensor


def again(key: str, value: str) -> TensorProto:
    """An entry before the right one: of two, a runtime may heed the first."""
    tensor = right()
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    tensor.ClearField("external_data")
    for name, told in [(key, value), *entries]:
        tensor.external_data.add(key=name, value=told)
    return tensor


def bare() -> TensorProto:
    return TensorProto(name="secret", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)


ELSEWHERE = {
    "an extra initializer": (model_of(graph_of(initializers=[outside()])), r"initializer 'secret'.*got .*'etc/passwd'"),
    "an extra one that says the bundle": (
        model_of(graph_of(initializers=[right(name="secret")])),
        "initializer 'secret'",
    ),
    "a flag without a place": (model_of(graph_of(initializers=[bare()])), "initializer 'secret'.*no location"),
    "a place without a flag": (model_of(graph_of(initializers=[unflagged()])), "initializer 'secret'"),
    "another location": (model_of(graph_of(initializers=[right(location="other.safetensors")])), "location params"),
    "an absolute path": (model_of(graph_of(initializers=[right(location="/etc/passwd")])), "got '/etc/passwd'"),
    "a path upwards": (model_of(graph_of(initializers=[right(location="../params.safetensors")])), "location params"),
    "this folder": (model_of(graph_of(initializers=[right(location="./params.safetensors")])), "location params"),
    "memory of the process": (
        model_of(graph_of(initializers=[right(location="*/_ORT_MEM_ADDR_/*")])),
        "location params",
    ),
    "another offset": (model_of(graph_of(initializers=[right(offset=0)])), "offset 64 and length 24"),
    "a negative offset": (model_of(graph_of(initializers=[right(offset=-64)])), "offset 64 and length 24"),
    "another length": (model_of(graph_of(initializers=[right(length=1 << 40)])), "offset 64 and length 24"),
    "another location before the right one": (
        model_of(graph_of(initializers=[again("location", "/etc/passwd")])),
        "offset 64 and length 24",
    ),
    "another offset before the right one": (
        model_of(graph_of(initializers=[again("offset", "0")])),
        "offset 64 and length 24",
    ),
    "a key more": (model_of(graph_of(initializers=[right(checksum="x")])), "offset 64 and length 24"),
    "another shape": (model_of(graph_of(initializers=[right(dims=(3, 2))])), r"float32 \(2, 3\)"),
    "another type": (model_of(graph_of(initializers=[right(kind=TensorProto.INT32)])), r"float32 \(2, 3\)"),
    "a weight twice": (model_of(graph_of(initializers=[right(), right()])), "each initializer once"),
    "a sparse initializer": (model_of(graph_of(sparse=[sparse(values=outside())])), "sparse initializer 'secret'"),
    "its indices": (model_of(graph_of(sparse=[sparse(indices=outside())])), "sparse initializer 'secret'"),
    "an attribute": (model_of(graph_of([node(t=outside())])), "attribute 'secret'"),
    "an attribute of a listed name": (model_of(graph_of([node(t=right())])), "attribute 'w'"),
    "an attribute of several": (model_of(graph_of([node(tensors=outside())])), "attribute 'secret'"),
    "a sparse attribute": (model_of(graph_of([node(sparse_tensor=sparse(outside()))])), "sparse attribute 'secret'"),
    "several sparse ones": (model_of(graph_of([node(sparse_tensors=sparse(outside()))])), "sparse attribute 'secret'"),
}


@pytest.mark.parametrize("way", ELSEWHERE)
def test_a_tensor_that_lies_elsewhere_is_refused_by_name(way: str) -> None:
    model, words = ELSEWHERE[way]
    with pytest.raises(BundleError, match=words) as caught:
        check_graph(model.SerializeToString(), "a.bundle: features.onnx", PLACES)
    assert str(caught.value).startswith("a.bundle: features.onnx: ")
    assert "\n" not in str(caught.value)


def test_the_listed_weights_at_their_place_may_lie_outside_and_all_else_inside() -> None:
    inside = helper.make_tensor("k", TensorProto.FLOAT, (2,), [1.0, 2.0])
    model = model_of(graph_of([node(t=inside)], [right(), inside]))
    check_graph(model.SerializeToString(), "f", PLACES)
    check_graph(empty_graph(b"words"), "f", {})


def test_the_places_are_those_of_the_file() -> None:
    params = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.float32([7.0])}
    raw = save(params)
    for name, place in weight_places(raw).items():
        assert raw[place.offset : place.offset + place.length_bytes] == params[name].tobytes()
        assert place.shape == params[name].shape


def loop() -> ModelProto:
    """A Loop whose condition stays true: ONNX Runtime opens it, and does not come back from running it."""
    start = helper.make_tensor("start", TensorProto.FLOAT, (), [0.0])
    true = helper.make_tensor("true", TensorProto.BOOL, (), [True])
    kinds = {"i": TensorProto.INT64, "on": TensorProto.BOOL, "v": TensorProto.FLOAT}
    kinds |= {"again": TensorProto.BOOL, "w": TensorProto.FLOAT}
    ends = [helper.make_tensor_value_info(name, kind, ()) for name, kind in kinds.items()]
    copies = [helper.make_node("Identity", [x], [y]) for x, y in (("on", "again"), ("v", "w"))]
    made = helper.make_node(
        "Loop", ["", "true", "start"], ["z"], body=helper.make_graph(copies, "b", ends[:3], ends[3:])
    )
    graph = graph_of([made], [start, true])
    graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ()))
    return model_of(graph)


def doubling(levels: int) -> ModelProto:
    """Functions, each of which calls the next one twice: ONNX Runtime does not come back from opening them."""
    opset = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]

    def calls(level: int) -> list[object]:
        names = (("x", "y"), ("y", "z"))
        kind = {"domain": "f"} if level < levels else {}
        return [helper.make_node(f"f{level}" if kind else "Neg", [x], [y], **kind) for x, y in names]

    made = [helper.make_function("f", f"f{n}", ["x"], ["z"], calls(n + 1), opset) for n in range(levels)]
    return model_of(graph_of(calls(0)), functions=made)


ENDLESS = {
    "a Loop": (loop(), "got an operator with a graph inside"),
    "a graph's graph": (deep(5), "got an operator with a graph inside"),
    "graphs": (model_of(graph_of([node(graphs=graph_of())])), "got an operator with graphs inside"),
    "a function": (function(), "got a function"),
    "functions of functions": (doubling(28), "got a function"),
    "what training starts from": (training("initialization"), "got training information"),
    "what training does": (training("algorithm"), "got training information"),
    "too many nodes": (model_of(graph_of([node()] * (MAX_NODES + 1))), "expected at most 65,536 nodes, got more"),
}


# of DenseNet-201's features.onnx, of FedProto's step of it (`benchmarks/hardware/graph_nodes.py densenet201`), and of
# any graph
LARGE = {"DenseNet-201's features": 719, "a training step of it": 15_041, "the limit": MAX_NODES}


@pytest.mark.parametrize("way", LARGE)
def test_a_large_networks_graph_is_taken(way: str) -> None:
    check_graph(model_of(graph_of([node()] * LARGE[way])).SerializeToString(), "a.bundle: train_step.onnx", {})


@pytest.mark.parametrize("way", ENDLESS)
def test_a_graph_that_may_not_end_is_refused(way: str) -> None:
    model, words = ENDLESS[way]
    with pytest.raises(BundleError, match=words) as caught:
        check_graph(model.SerializeToString(), "a.bundle: features.onnx", PLACES)
    assert str(caught.value).startswith("a.bundle: features.onnx, expected ")


def test_a_bundle_with_an_endless_graph_is_read_by_no_command(tmp_path: Path) -> None:
    """Running such a graph never ends."""
    parts = small_parts()
    write_bundle(tmp_path / "a.bundle", **parts)
    members = members_of(tmp_path / "a.bundle")
    manifest = json.loads(members["manifest.json"])
    members["features.onnx"] = loop().SerializeToString()
    manifest["members"]["features.onnx"] = hashlib.sha256(members["features.onnx"]).hexdigest()
    rewrite(tmp_path / "a.bundle", members | {"manifest.json": json.dumps(manifest).encode()})
    for words in (("inspect",), ("doctor", "--bundle"), ("predict", tmp_path, "--bundle")):
        done = run(*words, tmp_path / "a.bundle")
        assert done.returncode, words
        assert "no If, Loop or Scan" in " ".join((done.stdout + done.stderr).split())


MALFORMED = {
    "nothing": b"",
    "text": b"this is no model",
    "no graph": b"\x32\x01a",
    "two graphs": b"\x3a\x00\x3a\x00",
    "a length beyond the end": b"\x3a\x7f",
    "a length of an exabyte": b"\x3a" + b"\xff" * 8 + b"\x7f",
    "a number without end": b"\x08" + b"\xff" * 40,
    "a group": b"\x3b\x3c",
    "field 0": b"\x02\x00\x3a\x00",
    "ONNX Runtime's own format": b"\x0a\x06\x00\x00ORTM\x3a\x00",
    "dimensions without end": model_of(graph_of(initializers=[right(dims=(1,) * 1000)])).SerializeToString(),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_no_model_of_one_graph_are_refused(name: str) -> None:
    with pytest.raises(BundleError, match="an ONNX model"):
        check_graph(MALFORMED[name], "f", PLACES)


def test_any_mutation_is_refused_or_points_nowhere_else() -> None:
    """Whatever onnx itself still reads after a mutation that we accept has its outside tensors where they may be."""
    rng, accepted = random.Random(4), 0
    seeds = [model.SerializeToString() for model, _ in ELSEWHERE.values()]
    seeds += [model_of(graph_of([node()], [right()])).SerializeToString()] * 12
    for _ in range(8000):
        edited = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(edited))
            edited[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        try:
            check_graph(bytes(edited), "f", PLACES)
        except BundleError:
            continue
        try:
            model = ModelProto.FromString(bytes(edited))
        except Exception:  # what onnx refuses, a runtime does not open
            continue
        accepted += 1
        for tensor in (t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL):
            told = {entry.key: entry.value for entry in tensor.external_data}
            assert (tensor.name, told) == ("w", {"location": "params.safetensors", "offset": "64", "length": "24"})
    assert accepted > 40


def test_a_field_of_another_wire_type_does_not_stand_for_the_real_one() -> None:
    """Protobuf reads `location` of fixed width as unknown: it must not hide what the key really says."""
    entry = b"\x0a\x04none" + b"\x12\x12params.safetensors" + b"\x09location"  # the last: field 1 in 8 bytes
    told = b"\x6a" + bytes([len(entry)]) + entry
    for key, value in (("offset", "64"), ("length", "24")):
        pair = b"\x0a\x06" + key.encode() + b"\x12\x02" + value.encode()
        told += b"\x6a" + bytes([len(pair)]) + pair
    tensor = b"\x08\x02\x08\x03\x10\x01\x42\x01w" + told + b"\x70\x01"
    assert TensorProto.FromString(tensor).external_data[0].key == "none"
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    with pytest.raises(BundleError, match=r"location params\.safetensors"):
        check_graph(b"\x3a" + bytes([len(graph)]) + graph, "f", PLACES)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_bundle_error_or_fine(data: bytes) -> None:
    try:
        check_graph(data, "f", PLACES)
    except BundleError as error:
        assert "\n" not in str(error)  # noqa: PT017


_STARVED = """
import resource, sys
sys.path.insert(0, {root!r})
from protofleet.contract.errors import BundleError
from protofleet.contract.bundle.graph_checks import check_graph
many = b"\\x3a" + bytes([0x80 | 0x20, 0x80 | 0x09, 0x7A]) + b"\\x0a\\x00" * 999_952
now_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now_bytes + (16 << 20),) * 2)
for data in (many, b"\\x3a" + b"\\x80\\x80\\x01" + bytes(16384)):
    try:
        check_graph(data, "f", {{}})
    except BundleError:
        pass
print("bounded")
"""


def test_a_million_empty_nodes_cost_time_in_proportion_and_no_memory() -> None:
    script = _STARVED.format(root=str(Path(__file__).parents[3]))
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "bounded", done.stderr[-2000:]
    assert time.perf_counter() - began < 60


# ── in a bundle ─────────────────────────────────────────────────────────────────────────────────────────────────────


def forge_graph(path: Path, name: str, graph: bytes) -> Path:
    """The bundle with another graph, every hash right."""
    members = members_of(path)
    manifest = msgspec.json.decode(members["manifest.json"])
    manifest["members"][name] = hashlib.sha256(graph).hexdigest()
    return rewrite(path, members | {"manifest.json": msgspec.json.encode(manifest), name: graph})


@pytest.mark.parametrize("name", ["features.onnx", "train_step.onnx"])
def test_a_bundle_whose_graph_reads_a_file_is_neither_read_nor_written(tmp_path: Path, name: str) -> None:
    graph = model_of(graph_of(initializers=[outside()])).SerializeToString()
    write_bundle(tmp_path / "b.bundle", **small_parts())
    with pytest.raises(BundleError, match=rf"{name}: initializer 'secret', expected no tensor outside the bundle"):
        read_bundle(forge_graph(tmp_path / "b.bundle", name, graph))
    parts = small_parts() | {name.removesuffix(".onnx"): graph}
    with pytest.raises(BundleError, match="initializer 'secret'"):
        write_bundle(tmp_path / "c.bundle", **parts)
    assert not (tmp_path / "c.bundle").exists()


def test_a_training_step_has_no_weight_outside(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b.bundle", **small_parts())
    places = weight_places(members_of(tmp_path / "b.bundle")["params.safetensors"])
    place = places["backbone.weight"]
    weight = right(name="backbone.weight", dims=place.shape, offset=place.offset, length=place.length_bytes)
    graph = model_of(graph_of(initializers=[weight])).SerializeToString()
    read_bundle(forge_graph(tmp_path / "b.bundle", "features.onnx", graph))
    with pytest.raises(BundleError, match=r"train_step\.onnx: initializer 'backbone\.weight'"):
        read_bundle(forge_graph(tmp_path / "b.bundle", "train_step.onnx", graph))
    head = right(name="head.weight", dims=(3, 2), offset=places["head.weight"].offset)  # a device would not supply it
    graph = model_of(graph_of(initializers=[head])).SerializeToString()
    with pytest.raises(BundleError, match=r"features\.onnx: initializer 'head\.weight'"):
        read_bundle(forge_graph(tmp_path / "b.bundle", "features.onnx", graph))


_LEAK = textwrap.dedent(
    """
    import os, sys
    import numpy as np
    from protofleet.contract.bundle.bundle_file import read_bundle
    from protofleet.contract.errors import BundleError
    {more}
    path, folder = sys.argv[1:]
    graph = open(path, "rb").read()
    os.chdir(folder)
    try:
        print(bytes({opened}.run(None, {{}})[0].astype(np.uint8)))
    except {errors} as error:
        print("refused", str(error)[:200].replace(chr(10), " "))
    """
)
_WAYS = {
    "plainly": ("import onnxruntime", "onnxruntime.InferenceSession(graph)", "RuntimeError"),
    "as a device": (
        "from protofleet.edge_client.training.onnx_session import open_session",
        'open_session(graph, "features.onnx")[0]',
        "BundleError",
    ),
}


@pytest.mark.parametrize(("way", "leaks"), [("plainly", True), ("as a device", False)])
def test_even_a_graph_that_nobody_checked_reads_no_file_on_a_device(tmp_path: Path, way: str, leaks: bool) -> None:
    """ONNX Runtime opens a file below the working directory for a model given as bytes; our sessions have no folder."""
    (tmp_path / "secret.txt").write_bytes(b"pass")
    graph = helper.make_graph(
        [helper.make_node("Cast", ["secret"], ["z"], to=TensorProto.FLOAT)],
        "g",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])],
        [outside(location="secret.txt", length=4)],
    )
    (tmp_path / "leak.onnx").write_bytes(model_of(graph).SerializeToString())
    more, opened, errors = _WAYS[way]
    script = _LEAK.format(more=more, opened=opened, errors=errors)
    asked = [sys.executable, "-c", script, str(tmp_path / "leak.onnx"), str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3])
    assert (done.stdout.strip() == "b'pass'") is leaks, done.stdout + done.stderr
    assert leaks or done.stdout.startswith("refused")
