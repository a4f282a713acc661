"""How many refusals are sent: for each device a few at once, then one a second, and a limit for the fleet. No clock."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Pace"]

_DEVICE_BURST, _DEVICE_EACH_S = 4, 1.0
_FLEET_BURST, _FLEET_EACH_S = 1_000, 0.002
_DEVICES = 4_096


class Pace:
    """Whether to answer now. A device that got no answer sends again, and gets one then.

    Args:
        each_s: seconds from one answer to a device to the next, after its first few.
    """

    def __init__(self, each_s: float = _DEVICE_EACH_S) -> None:
        self._each_s = each_s
        self._spent: OrderedDict[str, float] = OrderedDict()  # device → when its next answer would be due
        self._fleet_spent = float("-inf")

    def allows(self, device: str, now: float) -> bool:
        """Whether `device` may be refused once more at `now`, seconds of a steady clock; if so it is counted."""
        device_spent = max(self._spent.pop(device, float("-inf")), now - _DEVICE_BURST * self._each_s)
        fleet_spent = max(self._fleet_spent, now - _FLEET_BURST * _FLEET_EACH_S)
        allowed = device_spent + self._each_s <= now and fleet_spent + _FLEET_EACH_S <= now
        self._spent[device] = device_spent + self._each_s if allowed else device_spent
        self._fleet_spent = fleet_spent + _FLEET_EACH_S if allowed else fleet_spent
        while len(self._spent) > _DEVICES:
            self._spent.popitem(last=False)
        return allowed
