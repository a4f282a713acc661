"""Writes small ONNX graphs as bytes, without the onnx package, which a board with the base install does not have.

Only what the suite needs of onnx.proto3: nodes with attributes, inputs and outputs of fixed shapes, initializers that
hold their numbers. Numbers are drawn from a seed: the same calls give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

__all__ = ["SmallGraph"]

_IR_VERSION, _OPSET = 10, 20
_FLOAT, _UINT8, _INT64 = 1, 2, 7
_A_FLOAT, _AN_INT, _INTS = 1, 2, 7  # types of attributes
Attribute = int | float | Sequence[int]


class SmallGraph:
    """A graph under construction; tensors are known by their names."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[bytes] = []
        self._stored: list[bytes] = []
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._count = 0
        self.shapes: dict[str, tuple[tuple[int, ...], bool]] = {}  # of inputs, and whether they are bytes

    def input(self, shape: Sequence[int], *, bytes_: bool = False) -> str:
        """An input of float32, or of uint8."""
        name = self._name()
        self.shapes[name] = tuple(shape), bytes_
        self._inputs.append(_field(11, _value(name, shape, _UINT8 if bytes_ else _FLOAT)))
        return name

    def weight(self, shape: Sequence[int]) -> str:
        """Random numbers of a size that keeps activations as they are."""
        fan_in = max(1, prod(shape[1:]))
        return self._store(self._rng.normal(0, fan_in**-0.5, tuple(shape)).astype(np.float32), _FLOAT)

    def filled(self, shape: Sequence[int], value: float) -> str:
        """One number everywhere."""
        return self._store(np.full(tuple(shape), value, np.float32), _FLOAT)

    def ints(self, values: Sequence[int]) -> str:
        """Axes, shapes, pads."""
        return self._store(np.array(values, np.int64), _INT64)

    def add(self, op: str, *inputs: str, **attributes: Attribute) -> str:
        """A node of one output."""
        return self.split(op, *inputs, outputs=1, **attributes)[0]

    def split(self, op: str, *inputs: str, outputs: int, **attributes: Attribute) -> list[str]:
        """A node of several outputs."""
        names = [self._name() for _ in range(outputs)]
        body = b"".join([_text(1, name) for name in inputs] + [_text(2, name) for name in names])
        body += _text(3, f"n{len(self._nodes)}") + _text(4, op)
        body += b"".join(_field(5, _attribute(name, value)) for name, value in sorted(attributes.items()))
        self._nodes.append(_field(1, body))
        return names

    def output(self, name: str, shape: Sequence[int]) -> None:
        """What leaves the graph, of this shape."""
        self._outputs.append(_field(12, _value(name, shape, _FLOAT)))

    def to_bytes(self) -> bytes:
        """The model."""
        parts = [*self._nodes, _text(2, "g"), *self._stored, *self._inputs, *self._outputs]
        return _number(1, _IR_VERSION) + _field(7, b"".join(parts)) + _field(8, _text(1, "") + _number(2, _OPSET))

    def _store(self, array: NDArray[np.float32] | NDArray[np.int64], kind: int) -> str:
        name = self._name()
        dims = b"".join(_number(1, size) for size in array.shape)
        self._stored.append(_field(5, dims + _number(2, kind) + _text(8, name) + _field(9, array.tobytes())))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"t{self._count}"


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are written in 64 bits
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode())


def _value(name: str, shape: Sequence[int], kind: int) -> bytes:
    dims = b"".join(_field(1, _number(1, size)) for size in shape)
    return _text(1, name) + _field(2, _field(1, _number(1, kind) + _field(2, dims)))


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, float):
        body = _varint(2 << 3 | 5) + np.float32(value).tobytes() + _number(20, _A_FLOAT)
    elif isinstance(value, int):
        body = _number(3, value) + _number(20, _AN_INT)
    else:
        body = b"".join(_number(8, one) for one in value) + _number(20, _INTS)
    return _text(1, name) + body
