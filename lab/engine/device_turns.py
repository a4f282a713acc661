"""The devices' side of a simulated fleet: a turn in a round, answers, and a device's own test, in any process.

A `Fleet` is the site (`lab/workers/workers.py`): every device's bundle and samples, and the sessions and devices made
from them in this process. A device's `Memory` is all that it keeps from one turn to the next. It travels with each task
and comes back with the result, so any worker can take any turn.

The memory is numbered. A worker that still has the device in exactly this state uses it again, and does not repeat what
the device has computed for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.methods import method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.activations import ActivationStore
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.evaluation import Evaluation
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs, GivenGraphs
from protofleet.edge_client.training.trainer import Weights

if TYPE_CHECKING:
    from torch import nn

    from protofleet.lab.engine.torch_trainer import GraphsBesideTorch

__all__ = ["Back", "Fleet", "Memory", "OwnTest", "TorchSteps", "Turn", "evaluate", "own_test", "run_round"]

_ACTIVATION_BYTES = 1 << 30  # of memory, for what frozen trunks make of all devices' images


@dataclass(frozen=True, eq=False)
class TorchSteps:
    """Torch as the trainer, in place of the bundles' training steps.

    Attributes:
        nets: each device's backbone.
        keep_optimizer: whether a device's optimizer keeps its state for the next round. No real device does this.
    """

    nets: Sequence[nn.Module]
    keep_optimizer: bool = False


@dataclass(frozen=True, eq=False)
class Memory:
    """The state of a device after its turn number `number`: its weights, the global state that it trusts, and its
    optimizer's state where that is kept."""

    number: int
    weights: Weights
    trusted: GlobalState | None
    optimizer: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn: the device's place in the fleet, and its memory."""

    place: int
    memory: Memory


@dataclass(frozen=True, eq=False)
class Back:
    """The result of a turn.

    Attributes:
        payload: the contribution, as bytes of the wire.
        loss: None where nothing was trained.
    """

    memory: Memory
    payload: bytes = b""
    loss: float | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True, eq=False)
class OwnTest:
    """The common values of all own tests: the last announcement and global state, and whether to fit again."""

    again: Announcement
    state: GlobalState
    fit: bool


class Fleet:
    """Devices and their samples.

    Args:
        bundles: the bundle of each device.
        names: the id of each device.
        shares: the samples of each device: images, or features (N, D) that its bundle's extractor has made already.
        test: what every device is tested on, of the same kind.
        local_tests: each device's own test samples.
        run: 4 bytes. With a device's name they seed its noise.
        torch: how torch trains the devices; None for their bundles' graphs.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        names: Sequence[str],
        shares: Sequence[LocalData],
        test: LocalData,
        run: bytes,
        local_tests: Sequence[LocalData] | None = None,
        torch: TorchSteps | None = None,
    ) -> None:
        self._given = (list(bundles), list(names), list(shares), test, run, local_tests, torch)
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
        """Every device, in its state in this process."""
        return [self._device(place) for place in range(len(self._given[1]))]

    def bundle(self, place: int) -> Bundle:
        """The bundle of a device."""
        return self._given[0][place]

    def turn(self, place: int) -> Turn:
        """The next turn of a device."""
        device = self._device(place)
        return Turn(place, Memory(self._turns.get(place, 0), device.state(), device.trusted, self.optimizer(place)))

    def optimizer(self, place: int) -> Weights:
        """The state of a device's optimizer; empty where none is kept."""
        return self._optimizers.get(place, {})

    def resume(self, place: int, weights: Weights, optimizer: Weights) -> None:
        """Restore a device after an interruption. Its turns are numbered from 1 again, so that no worker takes it for a
        device without a turn."""
        self.put(place, Memory(1, weights, None, optimizer))

    def at(self, turn: Turn) -> Device:
        """The device in its state after its last turn."""
        self.put(turn.place, turn.memory)
        self._begin(turn.place, self.optimizer(turn.place))
        return self._device(turn.place)

    def _begin(self, place: int, optimizer: Weights) -> None:
        """Let the device's next training begin with this state of the optimizer."""
        if (graphs := self._keeping(place)) is not None:
            graphs.trainer().begin_with(optimizer)

    def _keeping(self, place: int) -> GraphsBesideTorch | None:
        """The device's graphs where its optimizer's state is kept."""
        torch = self._given[-1]
        return cast("GraphsBesideTorch", self._compiled(place)) if torch is not None and torch.keep_optimizer else None

    def put(self, place: int, memory: Memory) -> None:
        """Put a memory into the device, wherever its turn was computed."""
        if self._turns.get(place, 0) != memory.number:
            self._device(place).restore(memory.weights, memory.trusted)
            self._turns[place], self._optimizers[place] = memory.number, memory.optimizer

    def left(self, place: int) -> Memory:
        """The device's memory after another turn."""
        device, number = self._device(place), self._turns.get(place, 0) + 1
        self._turns[place] = number
        if (graphs := self._keeping(place)) is not None:
            self._optimizers[place] = graphs.trainer().optimizer_state()
        return Memory(number, device.state(), device.trusted, self.optimizer(place))

    def own_device(self, turn: Turn) -> Device | None:
        """A second, equal device that is tested on its own held-back samples; None where it has none."""
        bundles, names, shares, _, _, local_tests, _ = self._given
        place = turn.place
        if local_tests is None or not len(local_tests[place]) or not len(shares[place]):
            return None
        bundle = bundles[place]
        device = Device(bundle, shares[place], names[place], test=local_tests[place], graphs=self._compiled(place))
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
            is_given = self._given[2][place].x.ndim == 2
            net = None if torch is None else torch.nets[place]
            self._graphs[bundle.sha256] = GivenGraphs(bundle) if is_given else _graphs(bundle, net)
        return self._graphs[bundle.sha256]


def _graphs(bundle: Bundle, net: nn.Module | None) -> CompiledGraphs:
    if net is None:
        return CompiledGraphs(bundle, keep=True)
    from protofleet.lab.engine.torch_trainer import (
        GraphsBesideTorch,  # here and not above: the demo need not have torch
    )

    return GraphsBesideTorch(bundle, net)


def _secret(run: bytes, name: str) -> bytes:
    """The seed of a device's noise. It follows from the run's seed, since a simulation has nothing to keep private."""
    return hashlib.sha256(b"protofleet lab noise" + run + name.encode()).digest()


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_round(fleet: Fleet, common: tuple[Announcement, GlobalState | None], turn: Turn) -> Back:
    """One device's turn in an announced round. Without a global state it trains alone and sends nothing."""
    announcement, state = common
    result = fleet.at(turn).run_round(announcement, state)
    payload = b"" if state is None else encode(result.contribution, announcement.encoding)
    return Back(fleet.left(turn.place), payload, result.loss)


def evaluate(fleet: Fleet, state: GlobalState | None, turn: Turn) -> Back:
    """A device's answers to the test images."""
    evaluation = fleet.at(turn).evaluate(state)
    return Back(fleet.left(turn.place), evaluation=evaluation)


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
