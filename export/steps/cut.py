"""A network in two parts: a frozen trunk, images to activations, and a trained tail, activations to features.

1. The network is recorded in inference mode, as a graph of functions of the images and of its weights.
2. The tail trains the weights of one layer, `--train-from LAYER`, and of all layers after it, in the order in which the
   recording uses them. `--trainable-blocks K` begins at the K-th block from the end.
3. The trunk is all that follows from the images without any trained weight. What the tail reads of it crosses the cut:
   one tensor in most networks, a few where shortcuts reach over the cut.

Guarantee: the trunk always gives the same activations for an image, so a device computes them once. Both parts run in
inference mode: batch normalisation uses its running statistics, in the tail too, and nothing is random.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from protofleet.contract.bundle.bundle_file import Activation
from protofleet.contract.errors import ExportError, UsageError, near_names
from protofleet.export.modules.norms import to_frozen_batch_norm
from protofleet.export.modules.preprocess import Preprocess
from protofleet.export.objectives import unit_features
from protofleet.export.operators.trace import record

__all__ = ["Cut", "Part", "cut_network"]

_OPENED = (nn.Sequential, nn.ModuleList)  # of just these types: what is derived from them is a block of its own


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a divided network as a module of its inputs and then of its weights.

    Attributes:
        module: gives a tuple of tensors.
        weights: names of the network's tensors that it takes, in order.
        shapes: of its results, the batch first.
    """

    module: fx.GraphModule
    weights: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """Where a network is divided.

    Attributes:
        trained: names of the parameters that the tail trains.
        read: names of all tensors of the network that the tail reads.
        activations: what crosses the cut, in order; shapes without the batch.
    """

    net: nn.Module
    preprocess: Preprocess
    input_shape: tuple[int, int, int]
    trained: frozenset[str]
    read: frozenset[str]
    activations: tuple[Activation, ...]

    def parts(self, batch: int, *, unit: bool = False) -> tuple[Part, Part]:
        """Trunk and tail for a batch of that size, as inference runs them.

        Args:
            unit: whether the tail puts features on the unit sphere.
        """
        return _divided(_recorded(self.net, self.preprocess, self.input_shape, batch, unit=unit), self.trained, batch)

    def trainable_tail(self, batch: int) -> Part:
        """The tail for a batch of that size, of operators whose gradients have a translation."""
        net = to_frozen_batch_norm(copy.deepcopy(self.net), self.read)
        return _divided(_recorded(net, self.preprocess, self.input_shape, batch), self.trained, batch)[1]


def cut_network(
    net: nn.Module,
    preprocess: Preprocess,
    input_shape: tuple[int, int, int],
    *,
    layer: str | None = None,
    blocks: int | None = None,
) -> Cut:
    """Divide a network before a layer, or before its last `blocks` blocks.

    Args:
        net: maps (B, c, H, W) to features (B, D).
        layer: a module's name, as `named_modules` has it.
        blocks: at least 1; instead of `layer`.

    Raises:
        UsageError: there is no such layer, it has no weights, or nothing lies before it.
        ExportError: the network cannot be recorded, or what crosses the cut does not belong to single images.
    """
    net = copy.deepcopy(net).eval()
    recorded = _recorded(net, preprocess, input_shape, 2)
    order = _order_of_use(recorded)
    begin = _begin(net, order, layer, blocks)
    parameters = {name for name, p in net.named_parameters() if p.requires_grad}
    trained = frozenset(name for name, place in order.items() if place >= begin and name in parameters)
    if min(order.values()) >= begin:
        expected = "a layer before which there is another"
        raise UsageError("--train-from", expected=expected, got=layer or f"{blocks} blocks", hint="leaving it out")
    _, tail = _divided(recorded, trained, 2)
    crossing = _crossing(recorded, trained)
    activations = tuple(Activation(f"a{i}", tuple(node.meta["val"].shape[1:])) for i, node in enumerate(crossing))
    return Cut(net, preprocess, input_shape, trained, frozenset(tail.weights), activations)


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A network as a graph; `names` are those of its inputs after the images."""

    graph: fx.GraphModule
    names: tuple[str, ...]

    @property
    def inputs(self) -> dict[fx.Node, str]:
        """The weights' nodes and names."""
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        return dict(zip(placeholders[1:], self.names, strict=True))

    @property
    def images(self) -> fx.Node:
        return next(node for node in self.graph.graph.nodes if node.op == "placeholder")

    @property
    def results(self) -> list[fx.Node]:
        return list(next(node for node in self.graph.graph.nodes if node.op == "output").args[0])

    def reached(self, start: set[fx.Node]) -> set[fx.Node]:
        """These nodes, and all nodes that follow from them."""
        nodes = set(start)
        for node in self.graph.graph.nodes:
            if node.op != "output" and any(source in nodes for source in node.all_input_nodes):
                nodes.add(node)
        return nodes


def _recorded(
    net: nn.Module, preprocess: Preprocess, input_shape: tuple[int, int, int], batch: int, *, unit: bool = False
) -> _Recorded:
    names = tuple(name for name, tensor in net.state_dict().items() if tensor.is_floating_point())
    shapes = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}

    def features(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        z = functional_call(net, dict(zip(names, weights, strict=True)), (preprocess(x),))
        return (unit_features(z) if unit else z,)

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty((batch, *input_shape), dtype=torch.uint8)
        example = [x, *(torch.empty(shapes[name]) for name in names)]
    with torch.no_grad():
        return _Recorded(record(features, example, decomposed=False), names)


def _order_of_use(recorded: _Recorded) -> dict[str, int]:
    """For each weight, the position of the first node that combines it with data of the images. Weights that are never
    combined with such data are left out."""
    data = recorded.reached({recorded.images})
    weights_of: dict[fx.Node, set[str]] = {node: {name} for node, name in recorded.inputs.items()}
    order: dict[str, int] = {}
    for place, node in enumerate(recorded.graph.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        names = set[str]().union(*(weights_of.get(source, set()) for source in node.all_input_nodes))
        if node in data:
            order |= {name: place for name in names if name not in order}
        else:
            weights_of[node] = names
    return order


def _begin(net: nn.Module, order: Mapping[str, int], layer: str | None, blocks: int | None) -> int:
    """The place in the order of use where the tail begins."""
    if layer is not None:
        if layer not in dict(net.named_modules()) or not layer:
            names = [name for name, _ in net.named_modules() if name]
            raise UsageError("--train-from", expected="a layer", got=layer, hint=near_names(layer, names))
        places_used = [place for name, place in order.items() if name.startswith(f"{layer}.")]
        if not places_used:
            raise UsageError("--train-from", expected="a layer with weights", got=layer)
        return min(places_used)
    starts = sorted({_first(block, order) for block in _blocks(net)} - {None})  # type: ignore[type-var]
    if blocks is None or not 1 <= blocks < len(starts):
        raise UsageError("--trainable-blocks", expected=f"1 to {len(starts) - 1} for this network", got=blocks)
    return int(starts[-blocks])  # type: ignore[arg-type]


def _first(block: Sequence[str], order: Mapping[str, int]) -> int | None:
    return min((order[name] for name in block if name in order), default=None)


def _blocks(net: nn.Module) -> list[list[str]]:
    """The names of the weights of each block.

    A block is a child of the network, or of its lists and sequences of blocks, that has a matrix. A normalisation
    belongs to the block before it, as the order of use shows. A network in a single wrapper has the blocks of the
    wrapped network.
    """
    names = _block_names(net, "")
    while len(names) == 1 and _block_names(net.get_submodule(names[0]), ""):
        names = _block_names(net.get_submodule(names[0]), f"{names[0]}.")
    return [[f"{name}.{own}" for own, _ in net.get_submodule(name).named_parameters()] for name in names]


def _block_names(net: nn.Module, prefix: str) -> list[str]:
    names = []
    for name, child in net.named_children():
        if type(child) in _OPENED:
            names += _block_names(child, f"{prefix}{name}.")
        elif any(p.dim() > 1 for p in child.parameters()):
            names.append(f"{prefix}{name}")
    return names


def _crossing(recorded: _Recorded, trained: frozenset[str]) -> list[fx.Node]:
    """What the tail reads of the trunk, in order.

    Raises:
        ExportError: it does not belong to single images.
    """
    data = recorded.reached({recorded.images})
    tail = recorded.reached({node for node, name in recorded.inputs.items() if name in trained})
    crossing = [node for node in data - tail if any(user in tail for user in node.users)]
    places = {node: place for place, node in enumerate(recorded.graph.graph.nodes)}
    crossing.sort(key=places.__getitem__)
    batch = recorded.images.meta["val"].shape[0]
    for node in crossing:
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape[:1] != (batch,):
            got = f"{node.target} of shape {tuple(getattr(value, 'shape', ()))}"
            expected = "numbers of single images where trunk and tail meet"
            raise ExportError("the network cannot be divided here", expected=expected, got=got, hint="another layer")
    return crossing


def _divided(recorded: _Recorded, trained: frozenset[str], batch: int) -> tuple[Part, Part]:
    crossing = _crossing(recorded, trained)
    trunk = _part(recorded, [recorded.images], crossing)
    return trunk, _part(recorded, crossing, recorded.results)


def _part(recorded: _Recorded, inputs: list[fx.Node], outputs: list[fx.Node]) -> Part:
    """The part of a graph that leads from some nodes, and from weights, to others."""
    needed, waiting = set[fx.Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in inputs else node.all_input_nodes
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{number}")
        copies[node].meta = dict(node.meta)
    names = []
    for node, name in recorded.inputs.items():
        if node in needed:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            names.append(name)
    for node in recorded.graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    shapes = tuple(tuple(_value(node).shape) for node in outputs)
    return Part(fx.GraphModule(recorded.graph, graph), tuple(names), shapes)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
