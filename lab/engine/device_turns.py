"""A device's side of a simulated fleet: its turn in a round, its answers, its own test, wherever that is computed.

A `Fleet` is the site (`lab/engine/workers.py`): every device's bundle and samples, and whatever sessions and devices
have been made of them here. What a device knows from one turn to the next, its `Memory`, goes with each task and comes
back with its result, so that any worker can take any turn. It is numbered: a worker that still has the device as it was
left goes on with it, and what the device has computed for itself is not computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from contract.bundle import Bundle
from contract.messages import Announcement
from contract.methods import method
from contract.state import GlobalState
from contract.wire import encode
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.data.activations import ActivationStore
from edge_client.device import Device
from edge_client.evaluate import Evaluation
from edge_client.trainer import Weights

if TYPE_CHECKING:
    from torch import nn

    from lab.engine.torch_trainer import GraphsBesideTorch

__all__ = ["Back", "Fleet", "Memory", "OwnTest", "TorchSteps", "Turn", "evaluate", "own_test", "run_round"]

_ACTIVATION_BYTES = 1 << 30  # of memory, for what frozen trunks make of all devices' images


@dataclass(frozen=True, eq=False)
class TorchSteps:
    """Torch in the place of the bundles' training steps.

    Attributes:
        nets: each device's backbone.
        keep_optimizer: whether a device's optimizer goes on in its next round where it was, which no real device does.
    """

    nets: Sequence[nn.Module]
    keep_optimizer: bool = False


@dataclass(frozen=True, eq=False)
class Memory:
    """What a device knows, as its turn number `number` has left it: its weights, the global state it trusts, and its
    optimizer's state where it is kept."""

    number: int
    weights: Weights
    trusted: GlobalState | None
    optimizer: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Turn:
    """Whose turn it is: the device's place in the fleet, and what it knows."""

    place: int
    memory: Memory


@dataclass(frozen=True, eq=False)
class Back:
    """What comes of a turn.

    Attributes:
        payload: its contribution, as bytes of the wire.
        loss: None when nothing was trained.
    """

    memory: Memory
    payload: bytes = b""
    loss: float | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True, eq=False)
class OwnTest:
    """What all devices' own tests have in common: the last announcement and global state, and whether to fit again."""

    again: Announcement
    state: GlobalState
    fit: bool


class Fleet:
    """Devices, and their samples.

    Args:
        bundles: of each device.
        names: their ids.
        test: images that every device is asked about.
        held: each device's own test samples.
        run: 4 bytes; with its name, what a device's noise is drawn from.
        torch: how torch trains them; their bundles' graphs do when left out.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        names: Sequence[str],
        shares: Sequence[LocalData],
        test: LocalData,
        run: bytes,
        held: Sequence[LocalData] | None = None,
        torch: TorchSteps | None = None,
    ) -> None:
        self._given = (list(bundles), list(names), list(shares), test, run, held, torch)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._given = state["_given"]
        self._forget()

    def _forget(self) -> None:
        self._graphs: dict[bytes, CompiledGraphs] = {}
        self._devices: dict[int, Device] = {}
        self._turns: dict[int, int] = {}
        self._optimizers: dict[int, Weights] = {}

    @property
    def devices(self) -> list[Device]:
        """Every one, as it is here."""
        return [self._device(place) for place in range(len(self._given[1]))]

    def bundle(self, place: int) -> Bundle:
        """A device's."""
        return self._given[0][place]

    def turn(self, place: int) -> Turn:
        """The device's next."""
        device = self._device(place)
        return Turn(place, Memory(self._turns.get(place, 0), device.state(), device.trusted, self.optimizer(place)))

    def optimizer(self, place: int) -> Weights:
        """The device's optimizer's state; empty where none is kept."""
        return self._optimizers.get(place, {})

    def resume(self, place: int, weights: Weights, optimizer: Weights) -> None:
        """The device goes on from what it knew when a run was interrupted; its turns are numbered anew, from 1, so that
        it is not taken anywhere for one that has not had any."""
        self.put(place, Memory(1, weights, None, optimizer))

    def at(self, turn: Turn) -> Device:
        """The device as its last turn has left it."""
        self.put(turn.place, turn.memory)
        self._begin(turn.place, self.optimizer(turn.place))
        return self._device(turn.place)

    def _begin(self, place: int, optimizer: Weights) -> None:
        """The next training, which is the device's, begins with this state of the optimizer."""
        if (graphs := self._keeping(place)) is not None:
            graphs.trainer().begin_with(optimizer)

    def _keeping(self, place: int) -> GraphsBesideTorch | None:
        """The device's graphs where its optimizer's state is kept."""
        torch = self._given[-1]
        return cast("GraphsBesideTorch", self._compiled(place)) if torch is not None and torch.keep_optimizer else None

    def put(self, place: int, memory: Memory) -> None:
        """The device knows this, wherever it has come to know it."""
        if self._turns.get(place, 0) != memory.number:
            self._device(place).restore(memory.weights, memory.trusted)
            self._turns[place], self._optimizers[place] = memory.number, memory.optimizer

    def left(self, place: int) -> Memory:
        """What the device knows after another turn."""
        device, number = self._device(place), self._turns.get(place, 0) + 1
        self._turns[place] = number
        if (graphs := self._keeping(place)) is not None:
            self._optimizers[place] = graphs.trainer().optimizer_state()
        return Memory(number, device.state(), device.trusted, self.optimizer(place))

    def own_device(self, turn: Turn) -> Device | None:
        """A second device like it, which is tested on its own held-back samples; None where it has none."""
        bundles, names, shares, _, _, held, _ = self._given
        place = turn.place
        if held is None or not len(held[place]) or not len(shares[place]):
            return None
        bundle = bundles[place]
        device = Device(bundle, shares[place], names[place], test=held[place], graphs=self._compiled(place))
        device.restore(turn.memory.weights)
        self._begin(place, turn.memory.optimizer)
        return device

    def _device(self, place: int) -> Device:
        if place not in self._devices:
            bundles, names, shares, test, run, *_ = self._given
            self._devices[place] = Device(
                bundles[place],
                shares[place],
                names[place],
                test=test,
                activations=ActivationStore(None, _ACTIVATION_BYTES // len(shares)),
                graphs=self._compiled(place),
                secret=_secret(run, names[place]),
            )
        return self._devices[place]

    def _compiled(self, place: int) -> CompiledGraphs:
        bundle, torch = self.bundle(place), self._given[-1]
        if bundle.sha256 not in self._graphs:
            self._graphs[bundle.sha256] = _graphs(bundle, None if torch is None else torch.nets[place])
        return self._graphs[bundle.sha256]


def _graphs(bundle: Bundle, net: nn.Module | None) -> CompiledGraphs:
    if net is None:
        return CompiledGraphs(bundle, keep=True)
    from lab.engine.torch_trainer import GraphsBesideTorch  # here and not above: the demo need not have torch

    return GraphsBesideTorch(bundle, net)


def _secret(run: bytes, name: str) -> bytes:
    """What a simulated device draws its noise from: from the seed, since a simulation has nothing to keep private."""
    return hashlib.sha256(b"protofleet lab noise" + run + name.encode()).digest()


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_round(fleet: Fleet, common: tuple[Announcement, GlobalState | None], turn: Turn) -> Back:
    """A device's turn in an announced round; without a global state it trains alone and sends nothing."""
    announcement, state = common
    result = fleet.at(turn).run_round(announcement, state)
    payload = b"" if state is None else encode(result.contribution, announcement.encoding)
    return Back(fleet.left(turn.place), payload, result.loss)


def evaluate(fleet: Fleet, state: GlobalState | None, turn: Turn) -> Back:
    """A device's answers to the test images."""
    found = fleet.at(turn).evaluate(state)
    return Back(fleet.left(turn.place), evaluation=found)


def own_test(fleet: Fleet, common: OwnTest, turn: Turn) -> tuple[Evaluation | None, Evaluation | None]:
    """A device's own test, before and after one more fit; None where it has none."""
    device = fleet.own_device(turn)
    if device is None:
        return None, None
    before = device.evaluate(common.state)
    if not common.fit or not method(fleet.bundle(turn.place).manifest.method).trains:
        return before, None
    device.run_round(common.again, common.state)
    return before, device.evaluate(common.state)
