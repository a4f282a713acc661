"""A training step in the operators of the wheel protofleet-kernels: the form that devices with that wheel try.

Activations are in blocks of 16 channels, (B, C/16, H, W, 16), from the first convolution to the last, and on the way
back. What a library of graphs lacks is one operator each (`kernels/src/operators.cpp`):

    Conv, ConvInputGrad, ConvWeightGrad    dense, depthwise, and groups of whole blocks
    BatchNorm, BatchNormGrad               over the real samples, with what is added (a residual) and with the
                                           activation behind it, which needs no pass of its own
    GroupNorm, MaxPool, GlobalMean         and the gradients of the first two
    Spread, ScaleChannels                  a number per channel to its plane: the mean's gradient; a gate
    Sgd, SgdMomentum                       a parameter's step in one pass
    ConvWeightGradSgd[Momentum]            a kernel's step while its gradient is in the cache, which is never written

A normalisation is emitted when its result is first asked for: by then it is known what follows it. An operator that is
not here, or not of such a shape, is translated as in the portable graph, and activations change their order around it.

The bundle stays plain: this form lies beside the portable graph, and a device without the wheel never looks at it
(docs/decisions/245).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from protofleet.export.graphs.values import Blocks, Meta, Value
from protofleet.export.operators.emitter import KERNELS, LANES, Emitter

__all__ = ["IN_BLOCKS", "KernelNodes"]

_MOST_TAPS = 1024
_FEW_CHANNELS = 8  # of an image, which a first convolution takes as it is

aten = torch.ops.aten
_BATCH_NORM = torch.ops.protofleet.batch_norm.default
IN_BLOCKS = frozenset(  # elementwise, and harmless in the lanes that fill a last block up
    (
        aten.relu.default,
        aten.hardtanh.default,
        aten.hardtanh_backward.default,
        aten.threshold_backward.default,
        aten.hardswish.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid.default,
        aten.hardsigmoid_backward.default,
        aten.add.Tensor,
        aten.mul.Tensor,
    )
)
_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)
_ACTS = {aten.relu.default: 1, aten.hardtanh.default: 6, aten.hardswish.default: 3}
_CONV_BACKWARD = aten.convolution_backward.default
_BATCH_NORM_BACKWARD = torch.ops.protofleet.batch_norm_backward.default


@dataclass
class _Norm:
    """A batch normalisation of the trace, and what goes into the same operator.

    Attributes:
        end: the node whose value the operator's result is before the activation: the normalisation, or a sum.
        other: the other operand of that sum.
        act: the activation's node.
    """

    end: fx.Node
    other: fx.Node | None = None
    act: fx.Node | None = None
    emit: Callable[[Value | None, int], str] | None = None

    @property
    def kind(self) -> int:
        return 0 if self.act is None else _ACTS[self.act.target]


@dataclass(frozen=True)
class _Move:
    """A step of SGD in the trace: its nodes, and its numbers."""

    parameter: fx.Node
    gradient: fx.Node
    rate: fx.Node
    velocity: fx.Node | None
    next_velocity: fx.Node | None
    momentum: float
    decay: float


@dataclass
class KernelNodes:
    """Translates what the wheel has operators for; asked before the portable translation."""

    emitter: Emitter
    trace: fx.GraphModule
    _norms: dict[fx.Node, _Norm] = field(default_factory=dict)  # by normalisation, by sum, by activation
    _activated: dict[fx.Node, str] = field(default_factory=dict)  # by what was activated
    _activated_alone: dict[str, str] = field(default_factory=dict)  # the bias, by the mean, where nothing was added
    _moves: dict[fx.Node, _Move] = field(default_factory=dict)  # by the parameter's next value
    _kernel_moves: dict[fx.Node, _Move] = field(default_factory=dict)  # by the convolution that gives the gradient
    _moved_already: dict[int, list[str]] = field(default_factory=dict)  # by the move's identity: its operator's results
    _spread: dict[fx.Node, Value] = field(default_factory=dict)  # by the expansion, what is expanded
    _values: Mapping[fx.Node, Any] = field(default_factory=dict)  # of the trace, as far as it is translated

    def __post_init__(self) -> None:
        for node in self.trace.graph.nodes:
            if node.target is _BATCH_NORM and len(node.meta["val"][0].shape) == 4:
                self._plan(node)
            move = _move_of(node)
            if move is not None:
                self._moves[node] = move
                source = _source(move.gradient)
                if _is_weight_gradient(source) and len(_users(source)) == 1:
                    self._kernel_moves[source.args[0]] = move
        _first(self.trace, [move.rate for move in self._kernel_moves.values()])

    def _plan(self, node: fx.Node) -> None:
        results = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if len(results) != 1:
            return
        norm = _Norm(results[0])
        users = _users(norm.end)
        if len(users) == 1 and _is_sum(users[0]):
            a, b = users[0].args
            norm.end, norm.other = users[0], _source(a if _source(b) is norm.end else b)
        users = _users(norm.end)
        acts = [user for user in users if _is_act(user)]
        if len(acts) == 1 and all(user is acts[0] or _goes_back(user, acts[0], norm) for user in users):
            norm.act = acts[0]
        self._norms[node] = norm
        if norm.other is not None:
            self._norms.setdefault(norm.end, norm)  # of a sum of two normalisations, the first
        if norm.act is not None:
            self._norms.setdefault(norm.act, norm)

    def __call__(self, node: fx.Node, out: Any, values: Mapping[fx.Node, Any]) -> Any:
        """What a node is translated to, as a translation returns it; NotImplemented where it is not done here."""
        self._values = values
        if node in self._moves:
            return self._moved(self._moves[node], values)
        args, kwargs = (fx.map_arg(given, lambda n: values[n]) for given in (node.args, node.kwargs))
        handler = _HANDLERS.get(node.target)
        return NotImplemented if handler is None or kwargs else handler(self, node, out, *args)

    # ── convolution ─────────────────────────────────────────────────────────────────────────────────────────────────

    def convolution(self, node: fx.Node, out: Meta, x: Value, w: Value, bias: Value | None, *options: Any) -> Any:
        sizes = _conv_sizes(x, w, options)
        if sizes is None:
            return NotImplemented
        e = self.emitter
        extra = [] if bias is None else [e.plain(bias)]
        return Blocks(self._op("Conv", self._image(x, sizes), e.plain(w), *extra, sizes=sizes))

    def convolution_backward(
        self, node: fx.Node, out: tuple[Meta, ...], grad: Value, x: Value, w: Value, _: Any, *rest: Any
    ) -> Any:
        *options, asked = rest
        sizes = _conv_sizes(x, w, options)
        if sizes is None or (asked[0] and sizes[-1]):
            return NotImplemented
        e = self.emitter
        dy = e.blocks(grad)
        move = self._kernel_moves.get(node)
        if move is not None and asked[1]:
            self._moved_already[id(move)] = self._move_kernel(move, self._image(x, sizes), dy, sizes)
        return (
            Blocks(self._op("ConvInputGrad", dy, e.plain(w), sizes=sizes)) if asked[0] else None,
            self._op("ConvWeightGrad", self._image(x, sizes), dy, sizes=sizes) if asked[1] else None,
            self._op("ChannelSums", dy, sizes=list(grad.shape)) if asked[2] else None,
        )

    def _move_kernel(self, move: _Move, image: str, dy: str, sizes: Sequence[int]) -> list[str]:
        """A kernel's step. The gradient that the trace asks for, too, is needed by nobody then."""
        kept = [] if move.velocity is None else [move.velocity]
        names = [self.emitter.plain(self._values[n]) for n in (move.parameter, move.rate, *kept)]
        kind = "ConvWeightGradSgdMomentum" if kept else "ConvWeightGradSgd"
        attributes = {"sizes": list(sizes), "momentum": move.momentum, "decay": move.decay, "domain": KERNELS}
        return self.emitter.graph.ops(kind, image, dy, *names, outputs=1 + len(kept), **attributes)

    def _image(self, x: Value, sizes: Sequence[int]) -> str:
        return self.emitter.plain(x) if sizes[-1] else self.emitter.blocks(x)

    # ── normalisation ───────────────────────────────────────────────────────────────────────────────────────────────

    def batch_norm(
        self, node: fx.Node, out: tuple[Meta, ...], x: Value, weight: Value, bias: Value, real: Value, eps: float
    ) -> Any:
        norm = self._norms.get(node)
        if norm is None:
            return NotImplemented
        y, mean, variance = (Value(meta.shape, meta.dtype) for meta in out)

        def emit(other: Value | None, act: int) -> str:
            y.pending = mean.pending = variance.pending = None
            e = self.emitter
            names = [e.blocks(x), e.plain(weight), e.plain(bias), e.plain(real)]
            names += [] if other is None else [e.blocks(other)]
            made = e.graph.ops("BatchNorm", *names, outputs=3, domain=KERNELS, sizes=[*x.shape, act], eps=float(eps))
            mean.plain, variance.plain = made[1], made[2]
            if other is None and act:
                self._activated_alone[made[1]] = names[2]
            return made[0]

        def alone() -> None:
            y.blocks = emit(None, 0)

        norm.emit = emit
        y.pending = mean.pending = variance.pending = alone
        return y, mean, variance

    def sum(self, node: fx.Node, out: Meta, a: Any, b: Any) -> Any:
        norm = self._norms.get(node)
        if norm is None or norm.emit is None:
            return NotImplemented
        name = norm.emit(b if norm.other is _source(node.args[1]) else a, norm.kind)
        return self._ended(norm, out, name)

    def act(self, node: fx.Node, out: Meta, x: Value, *_: Any) -> Any:
        norm = self._norms.get(node)
        if norm is None or norm.emit is None:
            return NotImplemented
        if norm.end not in self._activated:
            self._ended(norm, out, norm.emit(None, norm.kind))
        return Blocks(self._activated[norm.end])

    def _ended(self, norm: _Norm, out: Meta, name: str) -> Any:
        """The value before the activation: where there is one, nobody asks for it but the way back."""
        if norm.act is None:
            return Blocks(name)
        self._activated[norm.end] = name
        return Value(out.shape, out.dtype)

    def hardtanh_backward(self, node: fx.Node, out: Meta, grad: Value, x: Value, low: float, high: float) -> Any:
        name = self._activated.get(_source(node.args[1]))
        if name is None:
            return NotImplemented
        return self._masked(node, out, grad, Value(x.shape, x.dtype, blocks=name), 6, low, high)

    def threshold_backward(self, node: fx.Node, out: Meta, grad: Value, result: Value, threshold: float) -> Any:
        if result.blocks is None or threshold != 0 or len(out.shape) != 4:
            return NotImplemented
        return self._masked(node, out, grad, result, 1, threshold)

    def hardswish_backward(self, node: fx.Node, out: Meta, grad: Value, x: Value) -> Any:
        """Of an activation that the normalisation holds: its gradient makes the activation's argument again."""
        name = self._activated.get(_source(node.args[1]))
        if name is None:
            return NotImplemented
        return Value(out.shape, out.dtype, masked=(grad, Value(x.shape, x.dtype, blocks=name), 3), pending=_nothing)

    def _masked(self, node: fx.Node, out: Meta, grad: Value, result: Value, act: int, *limits: float) -> Value:
        """The gradient of an activation, made in a pass of its own only where no normalisation takes it."""
        from protofleet.export.operators.translation import TABLE

        value = Value(out.shape, out.dtype, masked=(grad, result, act))

        def make() -> None:
            self.emitter.in_blocks, before = True, self.emitter.in_blocks
            self.emitter.blocks(grad)
            value.blocks = str(TABLE[node.target](self.emitter, out, grad, result, *limits))
            self.emitter.in_blocks = before

        value.pending = make
        return value

    def batch_norm_backward(
        self,
        node: fx.Node,
        out: tuple[Meta, ...],
        grad: Value,
        x: Value,
        weight: Value,
        mean: Value,
        variance: Value,
        real: Value,
        eps: float,
    ) -> Any:
        if len(x.shape) != 4:
            return NotImplemented
        e = self.emitter
        names = [e.blocks(x), e.plain(weight), e.plain(mean), e.plain(variance), e.plain(real)]
        attributes: dict[str, Any] = {"domain": KERNELS, "eps": float(eps)}
        if grad.pending is None or grad.masked is None:
            made = e.graph.ops("BatchNormGrad", e.blocks(grad), *names, outputs=3, sizes=[*x.shape, 0], **attributes)
            return Blocks(made[0]), made[1], made[2]
        inner, result, act = grad.masked
        attributes["sizes"] = [*x.shape, act]
        bias = self._activated_alone.get(mean.plain or "")
        if bias is not None and len(node.args[0].users) == 1:  # type: ignore[union-attr]
            made = e.graph.ops("BatchNormGrad", e.blocks(inner), *names, bias, outputs=3, **attributes)
        else:
            names = [e.blocks(inner), *names, e.blocks(result)]
            made = e.graph.ops("BatchNormAddGrad", *names, outputs=4, **attributes)
            grad.pending, grad.blocks = None, made[3]
        return Blocks(made[0]), made[1], made[2]

    def group_norm(
        self,
        node: fx.Node,
        out: tuple[Meta, ...],
        x: Value,
        weight: Value | None,
        bias: Value | None,
        b: int,
        c: int,
        positions: int,
        groups: int,
        eps: float,
    ) -> Any:
        if len(x.shape) != 4 or weight is None or bias is None or LANES % (c // groups):
            return NotImplemented
        e = self.emitter
        names = (e.blocks(x), e.plain(weight), e.plain(bias))
        sizes = [*x.shape, 0, groups]
        made = e.graph.ops("GroupNorm", *names, outputs=3, domain=KERNELS, sizes=sizes, eps=float(eps))
        return Blocks(made[0]), made[1], made[2]

    # arguments: the tensors of the operator
    def group_norm_backward(
        self,
        node: fx.Node,
        out: tuple[Meta, ...],
        grad: Value,
        x: Value,
        mean: Value,
        root: Value,
        weight: Value | None,
        b: int,
        c: int,
        positions: int,
        groups: int,
        asked: Sequence[bool],
    ) -> Any:
        if len(x.shape) != 4 or weight is None or LANES % (c // groups):
            return NotImplemented
        e = self.emitter
        names = (e.blocks(grad), e.blocks(x), e.plain(weight), e.plain(mean), e.plain(root))
        sizes = [*x.shape, 0, groups]
        made = e.graph.ops("GroupNormGrad", *names, outputs=3, domain=KERNELS, sizes=sizes, eps=0.0)
        return Blocks(made[0]), made[1], made[2]

    # ── pooling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def max_pool(self, node: fx.Node, out: tuple[Meta, ...], x: Value, *options: Any) -> Any:
        sizes = _pool_sizes(x, out[0].shape, options)
        if sizes is None:
            return NotImplemented
        return Blocks(self._op("MaxPool", self.emitter.blocks(x), sizes=sizes)), None

    def max_pool_backward(self, node: fx.Node, out: Meta, grad: Value, x: Value, *options: Any) -> Any:
        sizes = _pool_sizes(x, grad.shape, options[:4])
        if sizes is None:
            return NotImplemented
        return Blocks(self._op("MaxPoolGrad", self.emitter.blocks(grad), self.emitter.blocks(x), sizes=sizes))

    def mean(self, node: fx.Node, out: Meta, x: Value, dims: Any, keepdim: bool = False) -> Any:
        held = x.blocks is not None or x.pending is not None
        if not held or len(x.shape) != 4 or {d % 4 for d in dims} != {2, 3}:
            return NotImplemented
        name = self._op("GlobalMean", self.emitter.blocks(x), sizes=list(x.shape))
        return self.emitter.graph.reshape(name, out.shape) if keepdim else name

    def sum_of_planes(self, node: fx.Node, out: Meta, x: Value, dims: Any, keepdim: bool = False) -> Any:
        name = self.mean(node, out, x, dims, keepdim) if dims is not None else NotImplemented
        if name is NotImplemented:
            return NotImplemented
        positions = self.emitter.graph.scalar(float(x.shape[2] * x.shape[3]), out.dtype)
        return self.emitter.op("Mul", name, positions)

    def expand(self, node: fx.Node, out: Meta, x: Value, shape: Any) -> Any:
        if len(out.shape) != 4 or x.shape != (*out.shape[:2], 1, 1) or out.shape == x.shape or x.fill is not None:
            return NotImplemented
        users = list(node.users)
        if len(users) == 1 and users[0].target is aten.div.Scalar:
            self._spread[node] = x
        return Blocks(self._op("Spread", self.emitter.plain(x), sizes=list(out.shape)))

    def divided(self, node: fx.Node, out: Meta, x: Value, number: Any) -> Any:
        """A mean's gradient: a number per channel is divided, and not all of its plane."""
        small = self._spread.get(node.args[0])  # type: ignore[arg-type]
        if small is None:
            return NotImplemented
        scalar = self.emitter.graph.scalar(float(number), out.dtype)
        return Blocks(
            self._op("Spread", self.emitter.op("Div", self.emitter.plain(small), scalar), sizes=list(out.shape))
        )

    def product(self, node: fx.Node, out: Meta, a: Any, b: Any) -> Any:
        """An activation times a number per image and channel."""
        if not isinstance(a, Value) or not isinstance(b, Value) or len(out.shape) != 4:
            return NotImplemented
        small = (*out.shape[:2], 1, 1)
        image, gate = (a, b) if b.shape == small else (b, a)
        held = image.blocks is not None or image.pending is not None
        if image.shape != tuple(out.shape) or gate.shape != small or image.shape == small or not held:
            return NotImplemented
        names = self.emitter.blocks(image), self.emitter.blocks(gate)
        return Blocks(self._op("ScaleChannels", *names, sizes=list(out.shape)))

    # ── the optimizer ───────────────────────────────────────────────────────────────────────────────────────────────

    def _moved(self, move: _Move, values: Mapping[fx.Node, Any]) -> str:
        """SGD in one pass. The nodes that the formula was recorded as are needed by nobody then."""
        e, parameter = self.emitter, values[move.parameter]
        if id(move) in self._moved_already:
            made = self._moved_already[id(move)]
            if move.next_velocity is not None:
                values[move.next_velocity].plain = made[1]
            return made[0]
        names = [e.plain(values[n]) for n in (move.parameter, move.gradient, move.rate)]
        attributes = {"sizes": list(parameter.shape), "momentum": move.momentum, "decay": move.decay}
        if move.velocity is None or move.next_velocity is None:
            return self._op("Sgd", *names, **attributes)
        names.append(e.plain(values[move.velocity]))
        made = e.graph.ops("SgdMomentum", *names, outputs=2, domain=KERNELS, **attributes)
        values[move.next_velocity].plain = made[1]
        return made[0]

    def _op(self, kind: str, *names: str, **attributes: Any) -> str:
        return self.emitter.op(kind, *names, domain=KERNELS, **attributes)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: KernelNodes.convolution,
    aten.convolution_backward.default: KernelNodes.convolution_backward,
    _BATCH_NORM: KernelNodes.batch_norm,
    _BATCH_NORM_BACKWARD: KernelNodes.batch_norm_backward,
    aten.add.Tensor: KernelNodes.sum,
    aten.relu.default: KernelNodes.act,
    aten.hardtanh.default: KernelNodes.act,
    aten.hardswish.default: KernelNodes.act,
    aten.hardtanh_backward.default: KernelNodes.hardtanh_backward,
    aten.hardswish_backward.default: KernelNodes.hardswish_backward,
    aten.threshold_backward.default: KernelNodes.threshold_backward,
    aten.native_group_norm.default: KernelNodes.group_norm,
    aten.native_group_norm_backward.default: KernelNodes.group_norm_backward,
    aten.max_pool2d_with_indices.default: KernelNodes.max_pool,
    aten.max_pool2d_with_indices_backward.default: KernelNodes.max_pool_backward,
    aten.mean.dim: KernelNodes.mean,
    aten.sum.dim_IntList: KernelNodes.sum_of_planes,
    aten.expand.default: KernelNodes.expand,
    aten.div.Scalar: KernelNodes.divided,
    aten.mul.Tensor: KernelNodes.product,
}


def _nothing() -> None:
    """For a value that a normalisation takes in another form; `_plan` has seen that nobody else asks for it."""


def _move_of(node: fx.Node) -> _Move | None:
    """The step of SGD whose result a node is: p − rate · v, v = momentum · v + gradient + decay · p."""
    if node.target is not aten.sub.Tensor or node.kwargs or len(node.meta["val"].shape) not in range(1, 6):
        return None
    parameter, step = node.args
    if not _is_input(parameter) or not _is_call(step, aten.mul.Tensor) or len(step.users) != 1:
        return None
    rate, v = step.args
    if not all(isinstance(n, fx.Node) for n in (rate, v)) or rate.meta["val"].numel() != 1 or _shape(v) != _shape(node):
        return None
    velocity, momentum, gradient, end = None, 0.0, v, None
    if _is_call(v, aten.add.Tensor) and not v.kwargs and (scaled := _scaled(v.args[0])) and _is_input(scaled[0]):
        (velocity, momentum), gradient, end = scaled, v.args[1], v
    decay = 0.0
    if _is_call(gradient, aten.add.Tensor) and not gradient.kwargs and len(gradient.users) == 1:
        scaled = _scaled(gradient.args[1])
        if scaled and scaled[0] is parameter:
            decay, gradient = scaled[1], gradient.args[0]
    if not isinstance(gradient, fx.Node) or _shape(gradient) != _shape(node) or (velocity is parameter):
        return None
    return _Move(parameter, gradient, rate, velocity, end, momentum, decay)


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _is_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _shape(node: Any) -> Any:
    return node.meta["val"].shape if isinstance(node, fx.Node) else None


def _scaled(node: Any) -> tuple[fx.Node, float] | None:
    """A tensor and the number that it is multiplied by."""
    if not _is_call(node, aten.mul.Tensor) or not isinstance(node.args[1], float):
        return None
    return node.args[0], node.args[1]


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two activations of one shape."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
        return False
    return all(isinstance(a, fx.Node) and a.meta["val"].shape == node.meta["val"].shape for a in node.args)


def _is_act(node: fx.Node) -> bool:
    if node.target is aten.hardtanh.default:
        return node.args[1:] == (0.0, 6.0)
    return node.target in (aten.relu.default, aten.hardswish.default)


def _goes_back(node: fx.Node, act: fx.Node, norm: _Norm) -> bool:
    """Whether it is the gradient of that activation, which the normalisation's own gradient can take."""
    if act.target is not aten.hardswish.default:
        return node.target is aten.hardtanh_backward.default and node.args[2:] == (0.0, 6.0)
    # of a hard swish nothing is kept that its gradient could be made of, but for the normalisation
    alone = norm.other is None and node.target is aten.hardswish_backward.default
    return alone and [user.target for user in node.users] == [_BATCH_NORM_BACKWARD]


def _is_weight_gradient(node: Any) -> bool:
    return _is_call(node, operator.getitem) and node.args[1] == 1 and _is_call(node.args[0], _CONV_BACKWARD)


def _first(trace: fx.GraphModule, wanted: Sequence[fx.Node]) -> None:
    """Move these nodes, and what they are made of, to the beginning of a trace: a gradient asks for them early."""
    place = [node for node in trace.graph.nodes if node.op == "placeholder"][-1]
    there: set[fx.Node] = set()

    def go(node: fx.Node) -> None:
        nonlocal place
        if node.op == "placeholder" or node in there:
            return
        there.add(node)
        for needed in node.all_input_nodes:
            go(needed)
        if place.next is not node:
            place.append(node)
        place = node

    for node in wanted:
        go(node)


def _source(node: Any) -> fx.Node:
    """What this is another name of."""
    while node.target in _SAME:
        node = node.args[0]
    return node


def _users(node: fx.Node) -> list[fx.Node]:
    """What takes a value, also under another name."""
    users: list[fx.Node] = []
    for user in node.users:
        users += _users(user) if user.target in _SAME else [user]
    return users


def _conv_sizes(x: Value, w: Value, options: Sequence[Any]) -> list[int] | None:
    """The attribute `sizes` of a convolution; None where there is no operator for it."""
    stride, padding, dilation, transposed, _, groups = options
    if transposed or len(x.shape) != 4 or set(dilation) != {1} or w.shape[2] * w.shape[3] > _MOST_TAPS:
        return None
    if any(pad >= extent for pad, extent in zip(padding, w.shape[2:], strict=True)):
        return None
    depthwise = groups > 1 and groups == x.shape[1] == w.shape[0]
    if groups > 1 and not depthwise and (w.shape[1] % LANES or w.shape[0] // groups % LANES):
        return None
    planar = int(groups == 1 and x.shape[1] <= _FEW_CHANNELS and x.blocks is None and x.pending is None)
    return [*x.shape, w.shape[0], *w.shape[2:], *stride, *padding, groups, planar]


def _pool_sizes(x: Value, places: Sequence[int], options: Sequence[Any]) -> list[int] | None:
    kernel, stride, padding, dilation = (*options, *((), (0, 0), (1, 1))[len(options) - 1 :])[:4]
    if len(x.shape) != 4 or set(dilation) != {1}:
        return None
    pair = lambda values: (values[0], values[-1])  # noqa: E731
    return [*x.shape, *pair(kernel), *pair(stride or kernel), *pair(padding), *places[2:]]
