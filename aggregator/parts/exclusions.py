"""Of whom, and of which classes, nothing is taken, as operators and devices themselves have said."""

from __future__ import annotations

from protofleet.aggregator.store.durable_store import Store, as_written
from protofleet.aggregator.store.operator_orders import refusal
from protofleet.aggregator.store.order_table import Order

__all__ = ["Exclusions"]


class Exclusions:
    """Of one store.

    Attributes:
        refused: the reason for each refused device.
        forgotten: the names of the classes of which nothing is taken.
        taken: by name of a forgotten class, which generation of each device it was taken out of; under the empty name
            those of classes that were admitted again.
    """

    def __init__(self, store: Store, labels: tuple[str, ...]) -> None:
        self._store, self._labels = store, labels
        self.refused = store.refused_devices.reasons()
        with as_written(store.standing.path):
            self.forgotten = store.standing.classes_forgotten()
            self.taken = store.standing.classes_taken()

    def reload(self) -> None:
        """Read again what another process may have changed."""
        self.refused = self._store.refused_devices.reasons()

    def refusal(self, device: str) -> str:
        """Why nothing of a device is taken; empty where it is."""
        return refusal(device, self.refused)

    @property
    def withheld(self) -> tuple[int, ...]:
        """The numbers, rising, of the classes of which nothing is taken."""
        return tuple(number for number, name in enumerate(self._labels) if name in self.forgotten)

    def admit_class(self, order: Order, wall: float, version: int) -> str:
        """From now on samples of a class are summed again; returns the outcome of the order.

        Args:
            version: of the global state, which stays.
        """
        forgotten = tuple(name for name in self.forgotten if name != order.detail)
        outcome = "done" if forgotten != self.forgotten else "done: it was not forgotten"
        taken = {name: by_device for name, by_device in self.taken.items() if name != order.detail}
        taken[""] = {**self.taken.get("", {}), **self.taken.get(order.detail, {})}
        self._store.standing.class_done(
            order, forgotten, taken, at=wall, before=version, after=version, outcome=outcome
        )
        self.forgotten, self.taken = forgotten, taken
        return outcome
