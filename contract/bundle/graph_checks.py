"""Checks of an ONNX graph before anything opens it: no reads outside the graph's own bytes, and an end to every run.

**The danger.** An ONNX tensor can say that its numbers lie in a file, at any path. A runtime then reads that file: a
graph that a device trusts could turn the device's files into features. An operator that has a graph inside (If, Loop,
Scan) may run without end. Functions of which each calls the next one twice are 2^28 calls after 28 of them, as soon as
a runtime opens the graph.

**The check.** `check_graph` walks the protobuf bytes without the package onnx, and looks at every tensor: initializers,
sparse ones, attributes of nodes.

1. A tensor may lie outside the graph only where the caller lists it. It is then an initializer of the listed shape, in
   the bundle's own `params.safetensors`, at its own place.
2. Operators with a graph inside, functions and training information are refused. The exporter writes none of them.
3. More than `MAX_NODES` nodes are refused. A run executes each node once.

**The walk.** It knows the few fields of onnx.proto3 that lead to tensors, and skips all others by their length. It is
stricter than protobuf: no group, and exactly one graph. A tensor counts as outside if its location flag says so, or if
it has an entry of external data. The time grows with the number of fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from protofleet.contract.errors import BundleError

__all__ = ["MAX_NODES", "WEIGHTS_MEMBER", "Place", "check_graph", "external_weights", "weight_places"]

WEIGHTS_MEMBER = "params.safetensors"
MAX_NODES = 65_536
_MAX_ENTRIES = 64
_MAX_TEXT_BYTES = 4096

# message → field number → message that stands there; only what can lead to a tensor (onnx.proto3, IR versions 3 to 12)
_LEADS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 10: "tensor", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_BARRED: Mapping[str, Mapping[int, str]] = {
    "model": {20: "training information", 25: "a function"},
    "attribute": {6: "an operator with a graph inside", 11: "an operator with graphs inside"},
}
_DIMS, _DATA_TYPE, _TENSOR_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14
_TYPES = {"F32": ("float32", 1), "F16": ("float16", 10)}  # safetensors' name → ours, and ONNX's number
_INITIALIZER = ("model", "graph", "tensor")  # the one place where a tensor may lie outside


@dataclass(frozen=True)
class Place:
    """A tensor's shape and type (`F32` or `F16`), and where its bytes are in `params.safetensors`."""

    shape: tuple[int, ...]
    offset: int
    length_bytes: int
    kind: str = "F32"


def weight_places(safetensors: bytes) -> dict[str, Place]:
    """Where each tensor of a `params.safetensors` lies: the header says it, after 8 bytes of the header's length."""
    header_bytes = int.from_bytes(safetensors[:8], "little")
    header = json.loads(safetensors[8 : 8 + header_bytes])
    return {
        name: Place(tuple(entry["shape"]), 8 + header_bytes + start, end - start, entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
        for start, end in [entry["data_offsets"]]
    }


def external_weights(graph: bytes) -> tuple[str, ...]:
    """The names of the initializers whose bytes lie outside a graph. The graph must have been checked before."""
    graphs = [body for number, body in _fields(memoryview(graph)) if number == 7 and isinstance(body, memoryview)]
    tensors = (value for body in graphs for number, value in _fields(body) if number == 5)
    tensors_read = (_tensor(value) for value in tensors if isinstance(value, memoryview))
    return tuple(tensor.name for tensor in tensors_read if tensor.outside)


class _Malformed(ValueError):
    """The bytes are no protobuf message."""


def check_graph(graph: bytes, what: str, allowed: Mapping[str, Place]) -> None:
    """Refuse a graph that would read anything but the listed tensors, or that may never end.

    Args:
        graph: an ONNX model.
        what: the name of the graph in an error, e.g. `a.bundle: features.onnx`.
        allowed: initializers that may lie in `params.safetensors`, by name.

    Raises:
        BundleError: a tensor lies elsewhere (the error names the first), an operator may never end, or the bytes are
            no ONNX model.
    """
    if graph[4:8] == b"ORTM":  # ONNX Runtime would take these bytes for its own format, which is not walked here
        raise BundleError(what, expected="an ONNX model", got="ONNX Runtime's own format")
    try:
        _walk(graph, what, allowed)
    except _Malformed as error:
        raise BundleError(what, expected="an ONNX model", got=error) from None


def _walk(graph: bytes, what: str, allowed: Mapping[str, Place]) -> None:
    graphs, nodes, checked = 0, 0, set[str]()
    path = ["model"]  # the messages around the present field; `unread` has the rest of each of them
    unread = [_fields(memoryview(graph))]
    while unread:
        entry = next(unread[-1], None)
        if entry is None:
            unread.pop()
            path.pop()
            continue
        number, value = entry
        if not isinstance(value, memoryview):
            continue
        if barred := _BARRED.get(path[-1], {}).get(number):
            _refuse(what, "operators that end: no If, Loop or Scan, and no functions", barred)
        lead = _LEADS[path[-1]].get(number)
        if lead is None:
            continue
        graphs, nodes = graphs + (lead == "graph"), nodes + (lead == "node")
        if nodes > MAX_NODES:
            _refuse(what, f"at most {MAX_NODES:,} nodes", "more")
        if lead == "tensor":
            _check_tensor((*path, lead), value, what, allowed, checked)
        else:
            path.append(lead)
            unread.append(_fields(value))
    if graphs != 1:  # protobuf merges several into one
        raise _Malformed(f"{graphs} graphs where one belongs")


def _check_tensor(
    path: tuple[str, ...], message: memoryview, what: str, allowed: Mapping[str, Place], checked: set[str]
) -> None:
    tensor = _tensor(message)
    if not tensor.outside:
        return
    where = f"{what}: {_kind(path)} {tensor.name!r}"
    place = allowed.get(tensor.name) if path == _INITIALIZER else None
    external = dict(tensor.entries)
    if place is None:
        _refuse(where, "no tensor outside the bundle", f"external data at {external.get('location', 'no location')!r}")
    if tensor.name in checked:
        _refuse(where, "each initializer once", "it twice")
    checked.add(tensor.name)
    if external.get("location") != WEIGHTS_MEMBER:
        _refuse(where, f"location {WEIGHTS_MEMBER}", repr(external.get("location", "none")))
    right = {"location": WEIGHTS_MEMBER, "offset": str(place.offset), "length": str(place.length_bytes)}
    if len(tensor.entries) != len(external) or external != right:
        _refuse(where, f"offset {place.offset} and length {place.length_bytes}", sorted(tensor.entries))
    kind, number = _TYPES.get(place.kind, (place.kind, None))
    if tuple(tensor.dims) != place.shape or tensor.data_type != number:
        _refuse(where, f"{kind} {place.shape}", f"data type {tensor.data_type} {tuple(tensor.dims)}")


@dataclass
class _Tensor:
    """The fields of a TensorProto, without its numbers."""

    name: str = ""
    data_type: int = 0
    dims: list[int] = field(default_factory=list)
    entries: list[tuple[str, str]] = field(default_factory=list)
    flagged: bool = False

    @property
    def outside(self) -> bool:
        return self.flagged or bool(self.entries)


def _tensor(message: memoryview) -> _Tensor:
    tensor = _Tensor()
    for number, value in _fields(message):
        if number == _DIMS and value is not None:
            tensor.dims += _integers(value)
        elif number == _DATA_TYPE and isinstance(value, int):
            tensor.data_type = value
        elif number == _DATA_LOCATION and isinstance(value, int):
            tensor.flagged |= value != 0
        elif number == _TENSOR_NAME and isinstance(value, memoryview):
            tensor.name = _text(value)
        elif number == _EXTERNAL_DATA and isinstance(value, memoryview):
            entry = {n: _text(text) for n, text in _fields(value) if isinstance(text, memoryview)}
            tensor.entries.append((entry.get(1, ""), entry.get(2, "")))
        if max(len(tensor.dims), len(tensor.entries)) > _MAX_ENTRIES:
            raise _Malformed(f"a tensor of more than {_MAX_ENTRIES} dimensions or entries")
    return tensor


def _text(value: memoryview) -> str:
    return bytes(value[:_MAX_TEXT_BYTES]).decode("utf-8", "replace")


def _refuse(where: str, expected: object, got: object) -> NoReturn:
    raise BundleError(where, expected=expected, got=got, hint="a bundle from a source that you trust")


def _kind(path: tuple[str, ...]) -> str:
    """What a reader would call the tensor at the end of this path."""
    if path == _INITIALIZER:
        return "initializer"
    if "sparse" in path:
        return "sparse initializer" if path[-3] == "graph" else "sparse attribute"
    return "attribute"


# ── protobuf ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview | None]]:
    """Each field in turn: its number and its value. A value is an integer, or a view of bytes.

    It is None for a number of fixed width. None of the fields that are checked has such a number.
    """
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        number, wire = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise _Malformed(f"field number {number}")
        if wire == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(message, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise _Malformed(f"wire type {wire}")
        if size > end - position:
            raise _Malformed("a field that is longer than what is left")
        yield number, message[position : position + size] if wire == 2 else None
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise _Malformed("the end within a number")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
    raise _Malformed("a number of more than 64 bits")


def _integers(value: int | memoryview) -> list[int]:
    """One integer, or several that are packed."""
    if isinstance(value, int):
        return [value]
    numbers: list[int] = []
    position = 0
    while position < len(value) and len(numbers) <= _MAX_ENTRIES:
        number, position = _varint(value, position)
        numbers.append(number)
    return numbers
