"""Translations of elementwise operators: arithmetic, comparisons, activations and their gradients.

Types are promoted as torch promotes them. Masks such as `y > 0` are made in one pass with HardSigmoid, max(0, min(1,
αx)) with α = 2¹²⁶, which is exactly 0 for x ≤ 0 and exactly 1 for every normal positive x: masking a gradient that way
is quicker in ONNX Runtime than Greater, Cast and Mul, and much quicker than Where (docs/decisions/011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.translation import (
    Blocks,
    ChannelMajor,
    Form,
    Meta,
    Rows,
    Value,
    as_values,
    refusal,
    translates,
)

__all__ = ["elementwise", "positive"]

aten = torch.ops.aten
STEEP = 2.0**126
_SCALE = 2.0**100  # steep still, and a limit times this is a float32
Operand = Value | float | int | bool


def elementwise(e: Emitter, kind: str, dtype: torch.dtype, *operands: Operand, **attributes: Any) -> str:
    """Emit one broadcasting node on operands promoted to `dtype`, in the order (plain or channel-major) they are in."""
    tensors = [v for v in operands if isinstance(v, Value)]
    form = e.form(tensors)
    names = [_operand(e, v, dtype, form) for v in operands]
    shape = _slow_shape(operands)
    if shape is not None and form not in (Rows, Blocks):
        rows = [e.graph.reshape(n, (-1 if _size(v) > 1 else 1,)) for n, v in zip(names, operands, strict=True)]
        lead = (shape[1], shape[0], *shape[2:]) if form is ChannelMajor else shape
        name = e.graph.reshape(e.op(kind, *rows, **attributes), lead)
    else:
        name = e.op(kind, *names, **attributes)
    return form(name)


def _slow_shape(operands: Sequence[Operand]) -> tuple[int, ...] | None:
    """The common shape, where it ends in 1 and a scalar is among the operands.

    ONNX Runtime then broadcasts number by number, 70 times slower than along a row (docs/decisions/011).
    """
    shapes = {v.shape for v in operands if isinstance(v, Value) and v.fill is None and v.size > 1}
    scalars = [v for v in operands if _size(v) == 1]
    shape = next(iter(shapes)) if len(shapes) == 1 else (0,)
    if shape[-1] != 1 or not scalars or any(isinstance(v, Value) and len(v.shape) > len(shape) for v in scalars):
        return None
    return shape


def _size(value: Operand) -> int:
    return value.size if isinstance(value, Value) and value.fill is None else 1


def positive(e: Emitter, name: str) -> str:
    """1 where the tensor is above zero, else 0, as float."""
    return e.op("HardSigmoid", name, alpha=STEEP, beta=0.0)


def _above(e: Emitter, name: str, limit: float) -> str:
    """1 where the tensor is above the limit, else 0. Scaling by a power of two is exact, and so is the difference."""
    return e.op("HardSigmoid", name, alpha=_SCALE, beta=-limit * _SCALE)


def _below(e: Emitter, name: str, limit: float) -> str:
    return e.op("HardSigmoid", name, alpha=-_SCALE, beta=limit * _SCALE)


def _operand(e: Emitter, value: Operand, dtype: torch.dtype, form: Form) -> str:
    if not isinstance(value, Value):
        return e.graph.scalar(value, dtype)
    if value.fill is not None and value.plain is None:
        return e.graph.scalar(value.fill, dtype)
    name = e.named(value, form)
    return name if value.dtype == dtype else e.graph.cast(name, dtype)


def _shaped(e: Emitter, out: Meta, result: str, *operands: Operand) -> str:
    """Broadcast up to `out` when only filled constants carried the shape."""
    real = [v for v in operands if isinstance(v, Value) and v.fill is None]
    if any(v.shape == out.shape for v in real) or not out.shape:
        return result
    shapes = [v.shape for v in real]
    if shapes and tuple(torch.broadcast_shapes(*shapes)) == out.shape:
        return result
    return e.graph.expand(result, out.shape)


def _binary(kind: str) -> Any:
    def handler(e: Emitter, out: Meta, a: Operand, b: Operand) -> str:
        return _shaped(e, out, elementwise(e, kind, out.dtype, a, b), a, b)

    return handler


@translates(aten.mul.Tensor, aten.mul.Scalar)
def _mul(e: Emitter, out: Meta, a: Operand, b: Operand) -> Value:
    name = _shaped(e, out, elementwise(e, "Mul", out.dtype, a, b), a, b)
    result: Value = as_values(name, out)
    for tensor, factor in ((a, b), (b, a)):
        if isinstance(tensor, Value) and isinstance(factor, float) and tensor.shape == out.shape:
            result.scaled = (factor, tensor)
    return result


for _kind, _targets in {
    "Max": (aten.maximum.default,),
    "Min": (aten.minimum.default,),
    "And": (aten.logical_and.default, aten.bitwise_and.Tensor),
    "Or": (aten.logical_or.default, aten.bitwise_or.Tensor),
    "Pow": (aten.pow.Tensor_Tensor,),
}.items():
    translates(*_targets)(_binary(_kind))


@translates(aten.add.Tensor, aten.add.Scalar)
def _add(e: Emitter, out: Meta, a: Operand, b: Operand, alpha: float = 1) -> str:
    if isinstance(a, Value) and a.fill == 0 and isinstance(b, Value) and b.shape == out.shape and alpha == 1:
        return b  # type: ignore[return-value]
    if isinstance(b, Value) and b.fill == 0 and isinstance(a, Value) and a.shape == out.shape:
        return a  # type: ignore[return-value]
    return _onto_product(e, out, a, b, alpha) or _shaped(
        e, out, elementwise(e, "Add", out.dtype, a, _scaled(e, out, b, alpha)), a, b
    )


def _onto_product(e: Emitter, out: Meta, a: Operand, b: Operand, alpha: float) -> str | None:
    """A matrix product plus a number times a tensor, such as a weight's gradient and its decay, in one node."""
    for product, addend in ((a, b), (b, a)):
        if not isinstance(product, Value) or not isinstance(addend, Value) or addend.scaled is None or alpha != 1:
            continue
        factor, tensor = addend.scaled
        if product.plain is not None and product.shape == tensor.shape == out.shape:
            return e.graph.plus(product.plain, e.plain(tensor), factor, out.shape)
    return None


@translates(aten.sub.Tensor, aten.sub.Scalar)
def _sub(e: Emitter, out: Meta, a: Operand, b: Operand, alpha: float = 1) -> str:
    return _shaped(e, out, elementwise(e, "Sub", out.dtype, a, _scaled(e, out, b, alpha)), a, b)


@translates(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(e: Emitter, out: Meta, a: Operand, b: Operand, alpha: float = 1) -> str:
    return _shaped(e, out, elementwise(e, "Sub", out.dtype, b, _scaled(e, out, a, alpha)), a, b)


def _scaled(e: Emitter, out: Meta, value: Operand, alpha: float) -> Operand:
    if alpha == 1:
        return value
    if not isinstance(value, Value):
        return value * alpha
    name = elementwise(e, "Mul", out.dtype, value, alpha)
    result = Value(value.shape, out.dtype)
    setattr(result, "channel_major" if isinstance(name, ChannelMajor) else "plain", str(name))
    return result


@translates(aten.div.Tensor, aten.div.Scalar)
def _div(e: Emitter, out: Meta, a: Operand, b: Operand) -> str:
    if not isinstance(b, Value) and out.dtype == torch.float32:
        mantissa, _ = math.frexp(b)
        if abs(mantissa) == 0.5:  # a power of two: its reciprocal is exact, and a product is faster
            return _shaped(e, out, elementwise(e, "Mul", out.dtype, a, 1.0 / b), a, b)
    return _shaped(e, out, elementwise(e, "Div", out.dtype, a, b), a, b)


@translates(aten.pow.Tensor_Scalar)
def _pow(e: Emitter, out: Meta, a: Value, exponent: float) -> str:
    if exponent == 2:
        return elementwise(e, "Mul", out.dtype, a, a)
    if exponent == 1:
        return a  # type: ignore[return-value]
    return elementwise(e, "Pow", out.dtype, a, exponent)


def _comparison(kind: str) -> Any:
    def handler(e: Emitter, out: Meta, a: Operand, b: Operand) -> str:
        dtypes = [v.dtype for v in (a, b) if isinstance(v, Value)]
        dtype = dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)
        if isinstance(b, float) and not dtype.is_floating_point:
            dtype = torch.float32
        return _shaped(e, out, elementwise(e, kind, dtype, a, b), a, b)

    return handler


for _kind, _op in {
    "Equal": aten.eq,
    "Less": aten.lt,
    "LessOrEqual": aten.le,
    "Greater": aten.gt,
    "GreaterOrEqual": aten.ge,
}.items():
    translates(_op.Tensor, _op.Scalar)(_comparison(_kind))


@translates(aten.ne.Tensor, aten.ne.Scalar)
def _ne(e: Emitter, out: Meta, a: Operand, b: Operand) -> str:
    name = _comparison("Equal")(e, out, a, b)
    return type(name)(e.op("Not", name))


@translates(aten.where.self)
def _where(e: Emitter, out: Meta, condition: Value, a: Value, b: Value) -> str:
    form = e.form([condition, a, b])
    names = [_operand(e, condition, torch.bool, form), *(_operand(e, v, out.dtype, form) for v in (a, b))]
    return _shaped(e, out, form(e.op("Where", *names)), condition, a, b)


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(e: Emitter, out: Meta, a: Value, mask: Value, value: Operand) -> str:
    fill = value if isinstance(value, Value) else Value((), out.dtype, fill=float(value))
    return _where(e, out, mask, fill, a)


def _unary(kind: str, **attributes: Any) -> Any:
    def handler(e: Emitter, out: Meta, a: Value) -> str:
        return _shaped(e, out, elementwise(e, kind, out.dtype, a, **attributes), a)

    return handler


for _kind, _target in {
    "Neg": aten.neg.default,
    "Abs": aten.abs.default,
    "Sqrt": aten.sqrt.default,
    "Exp": aten.exp.default,
    "Log": aten.log.default,
    "Reciprocal": aten.reciprocal.default,
    "Sigmoid": aten.sigmoid.default,
    "Tanh": aten.tanh.default,
    "Relu": aten.relu.default,
    "Sign": aten.sign.default,
    "Erf": aten.erf.default,
    "Sin": aten.sin.default,
    "Cos": aten.cos.default,
    "Floor": aten.floor.default,
    "Ceil": aten.ceil.default,
    "Softplus": aten.softplus.default,
}.items():
    translates(_target)(_unary(_kind))
translates(aten.sgn.default)(_unary("Sign"))
translates(aten.logical_not.default, aten.bitwise_not.default)(_unary("Not"))


@translates(aten.rsqrt.default)
def _rsqrt(e: Emitter, out: Meta, a: Value) -> str:
    root = elementwise(e, "Sqrt", out.dtype, a)
    return type(root)(e.op("Reciprocal", root))


@translates(aten.clamp.default, aten.hardtanh.default)
def _clamp(e: Emitter, out: Meta, a: Value, low: float | None = None, high: float | None = None) -> str:
    limits = [e.graph.scalar(v, out.dtype) if v is not None else "" for v in (low, high)]
    form = e.form([a])
    return form(e.op("Clip", _operand(e, a, out.dtype, form), *limits))


@translates(aten.clamp_min.default)
def _clamp_min(e: Emitter, out: Meta, a: Value, low: float) -> str:
    return _clamp(e, out, a, low, None)


@translates(aten.clamp_max.default)
def _clamp_max(e: Emitter, out: Meta, a: Value, high: float) -> str:
    return _clamp(e, out, a, None, high)


def _ordered(e: Emitter, *values: Value) -> tuple[Form, list[str]]:
    """Names of same-shaped tensors in one common form, for formulas of several nodes."""
    form = e.form(values)
    return form, [e.named(v, form) for v in values]


@translates(aten.threshold_backward.default)
def _threshold_backward(e: Emitter, out: Meta, grad: Value, result: Value, threshold: float) -> str:
    form, (go, y) = _ordered(e, grad, result)
    y = e.op("Sub", y, e.graph.scalar(threshold)) if threshold else y
    return form(e.op("Mul", go, positive(e, y)))


@translates(aten.hardtanh_backward.default)
def _hardtanh_backward(e: Emitter, out: Meta, grad: Value, x: Value, low: float, high: float) -> str:
    """The masks are those of the result, which the forward pass has made and others need, too."""
    form, (go, name) = _ordered(e, grad, x)
    y = e.op("Clip", name, e.graph.scalar(low, x.dtype), e.graph.scalar(high, x.dtype))
    return form(e.op("Mul", e.op("Mul", go, _above(e, y, low)), _below(e, y, high)))


@translates(aten.hardsigmoid.default)
def _hardsigmoid(e: Emitter, out: Meta, a: Value) -> str:
    return elementwise(e, "HardSigmoid", out.dtype, a, alpha=1.0 / 6.0, beta=0.5)


@translates(aten.hardsigmoid_backward.default)
def _hardsigmoid_backward(e: Emitter, out: Meta, grad: Value, x: Value) -> str:
    form, (go, name) = _ordered(e, grad, x)
    mask = _inside(e, name, -3.0, 3.0)
    return form(e.op("Mul", go, e.op("Mul", mask, e.graph.scalar(1.0 / 6.0))))


@translates(aten.hardswish.default)
def _hardswish(e: Emitter, out: Meta, a: Value) -> str:
    form, (name,) = _ordered(e, a)
    return form(e.op("Mul", name, e.op("HardSigmoid", name, alpha=1.0 / 6.0, beta=0.5)))


@translates(aten.hardswish_backward.default)
def _hardswish_backward(e: Emitter, out: Meta, grad: Value, x: Value) -> str:
    """x/3 + ½ between −3 and 3, 1 from 3 on, 0 below."""
    form, (go, name) = _ordered(e, grad, x)
    slope = e.op("Add", e.op("Mul", name, e.graph.scalar(1.0 / 3.0)), e.graph.scalar(0.5))
    middle = e.op("Mul", slope, _inside(e, name, -3.0, 3.0))
    total = e.op("Add", middle, e.op("Sub", e.graph.scalar(1.0), _below(e, name, 3.0)))
    return form(e.op("Mul", go, total))


@translates(aten.sigmoid_backward.default)
def _sigmoid_backward(e: Emitter, out: Meta, grad: Value, result: Value) -> str:
    form, (go, y) = _ordered(e, grad, result)
    return form(e.op("Mul", go, e.op("Mul", y, e.op("Sub", e.graph.scalar(1.0), y))))


@translates(aten.tanh_backward.default)
def _tanh_backward(e: Emitter, out: Meta, grad: Value, result: Value) -> str:
    form, (go, y) = _ordered(e, grad, result)
    return form(e.op("Mul", go, e.op("Sub", e.graph.scalar(1.0), e.op("Mul", y, y))))


@translates(aten.silu.default)
def _silu(e: Emitter, out: Meta, a: Value) -> str:
    form, (name,) = _ordered(e, a)
    return form(e.op("Mul", name, e.op("Sigmoid", name)))


@translates(aten.silu_backward.default)
def _silu_backward(e: Emitter, out: Meta, grad: Value, x: Value) -> str:
    """s + y (1 − s) with s = sigmoid(x) and y = x s, both shared with the forward pass."""
    form, (go, name) = _ordered(e, grad, x)
    s = e.op("Sigmoid", name)
    y = e.op("Mul", name, s)
    slope = e.op("Add", s, e.op("Mul", y, e.op("Sub", e.graph.scalar(1.0), s)))
    return form(e.op("Mul", go, slope))


def _inside(e: Emitter, name: str, low: float, high: float) -> str:
    """1 strictly between the limits, else 0."""
    return e.op("Mul", _above(e, name, low), _below(e, name, high))


@translates(aten.leaky_relu.default)
def _leaky_relu(e: Emitter, out: Meta, a: Value, slope: float = 0.01) -> str:
    return elementwise(e, "LeakyRelu", out.dtype, a, alpha=float(slope))


@translates(aten.leaky_relu_backward.default)
def _leaky_relu_backward(e: Emitter, out: Meta, grad: Value, x: Value, slope: float, is_result: bool) -> str:
    form, (go, name) = _ordered(e, grad, x)
    factor = e.op("Mul", positive(e, name), e.graph.scalar(1.0 - slope))
    return form(e.op("Mul", go, e.op("Add", factor, e.graph.scalar(slope))))


@translates(aten.elu.default)
def _elu(e: Emitter, out: Meta, a: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> str:
    if scale != 1 or input_scale != 1:
        raise refusal("elu with a scale", "plain elu")
    return elementwise(e, "Elu", out.dtype, a, alpha=float(alpha))


@translates(aten.gelu.default)
def _gelu(e: Emitter, out: Meta, a: Value, approximate: str = "none") -> str:
    return elementwise(e, "Gelu", out.dtype, a, approximate=approximate)
