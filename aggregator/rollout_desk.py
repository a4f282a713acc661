"""The roll-out of a running aggregator: the machine (`rollout.py`), its tables, what devices and operators say of it.

What devices say is kept in memory as it comes, and made durable with the next look, at most twice a second; if the
process dies before, the broker retains it. What an operator orders is durable before it is announced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from aggregator.orders import LOOK_S
from aggregator.rollout import Moved, Plan, Rollout
from aggregator.rollout_store import RolloutTables
from aggregator.rounds import MAX_DEVICES
from aggregator.standing_store import Order
from contract.bundle import Manifest
from contract.offers import WORDS, Offer, Request, Told

__all__ = ["RolloutDesk"]


class RolloutDesk:
    """One aggregator's roll-out, if there is one.

    Args:
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        shorter: sha256 of the bundles that it extends.

    Attributes:
        current: None where nothing is rolled out.
        counts: known devices of the present stage by what they said, as of the last look.
    """

    def __init__(self, tables: RolloutTables, manifest: Manifest, bundle: bytes, shorter: Collection[bytes]) -> None:
        self._tables, self._version, self._bundles = tables, manifest.version, (bundle, *shorter)
        self.current: Rollout | None = tables.load()
        self._said: dict[str, tuple[str, str]] = {}  # by device its bundle and its word, since this process started
        self._unsaved: set[str] = set()
        self._news: list[tuple[str, Told]] = []
        self._looked_at = -math.inf
        self.counts: Mapping[str, int] = {}
        self._count()

    @property
    def offer(self) -> Offer | None:
        """What is announced."""
        return None if self.current is None else self.current.offer

    @property
    def elsewhere(self) -> str:
        """The fleet that devices go over to, whose status messages are of interest; empty for none."""
        return "" if self.current is None else self.current.plan.fleet

    # ── what devices say and ask ────────────────────────────────────────────────────────────────────────────────────

    def hear(self, device: str, versions: Mapping[str, str], *, elsewhere: bool = False) -> None:
        """What a device's status says of its bundle.

        Args:
            elsewhere: in the fleet that devices go over to.
        """
        bundle, said = versions.get("bundle", ""), versions.get("rollout", "")
        if not (bundle or said):  # a last will, or a release that knows of no roll-out
            return
        if not elsewhere:
            if device not in self._said and len(self._said) >= MAX_DEVICES:
                return
            self._said[device] = bundle, said
        if self.current is None:
            return
        known = len(self.current.told)
        if device not in self.current.told and known >= MAX_DEVICES:
            return
        news = self.current.hear(device, bundle, said, elsewhere=elsewhere)
        if news is not None:
            self._news.append((device, news))
        if news is not None or len(self.current.told) != known:
            self._unsaved.add(device)

    def forget(self, device: str) -> None:
        """A device is refused from now on."""
        self._said.pop(device, None)
        self._unsaved.discard(device)
        if self.current is not None and device in self.current.told:
            self.current.forget(device)
            self._tables.forget(device)

    def take_news(self) -> list[tuple[str, Told]]:
        """What devices have said since the last time."""
        news, self._news = self._news, []
        return news

    def may_have(self, device: str, request: Request) -> bool:
        """Whether what a device asks for is offered to it."""
        offer = self.offer
        return (
            offer is not None
            and self.current is not None
            and request.bundle == offer.digest
            and request.offset < offer.size_bytes
            and self.current.is_in(device)
        )

    def read(self, offset: int, length: int) -> bytes:
        """So many bytes of the offered bundle from there on, fewer at its end; none when nothing is offered."""
        return b"" if self.current is None else self._tables.read(self.current.plan.sha256, offset, length)

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, wall: float) -> Moved | None:
        """The next step that is due, durable; None when nothing is, or it was just looked.

        Args:
            wall: seconds since the epoch.
        """
        if abs(wall - self._looked_at) < LOOK_S:
            return None
        self._tables.sweep()
        moved = None if self.current is None else self.current.advance(wall)
        if moved is None:
            self._looked_at = wall
        if self.current is not None and (moved is not None or self._unsaved):
            self._tables.keep(self.current, self._unsaved, wall)
            self._unsaved.clear()
        self._count()
        return moved

    def _count(self) -> None:
        self.counts = dict.fromkeys(("waiting", *WORDS), 0) if self.current is None else self.current.counts()

    # ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def obey(self, order: Order, wall: float) -> str | None:
        """Do what an order asks for; what became of it, None for an order that is about something else."""
        if not (order.what == "rollout" or order.what.startswith("rollout-")):
            return None
        self._looked_at = -math.inf
        if order.what == "rollout":
            return self._begin(order, wall)
        if self.current is None:
            return "refused: nothing is rolled out"
        if order.what == "rollout-end":
            self._tables.end()
            self.current = None
            self._count()
            return "done"
        outcome = self._steer(self.current, order, wall)
        self._tables.keep(self.current, (), wall)
        return outcome

    def _steer(self, current: Rollout, order: Order, wall: float) -> str:
        if order.what == "rollout-halt":
            was, known = current.state, f"halted by {order.who}"
            current.halt(known if was != "halted" else current.reason)
            return "done" if was != "halted" else "done: it was halted"
        if order.what == "rollout-resume":
            if current.state != "halted":
                return "done: it was not halted"
            current.resume(wall)
            return "done"
        if order.what == "rollout-stage":
            return self._widen(current, order.detail, wall)
        return f"refused: {order.what} is no order"

    def _widen(self, current: Rollout, given: str, wall: float) -> str:
        try:
            fraction = float(given)
        except ValueError:
            fraction = math.nan
        if current.state == "halted":
            return "refused: it is halted, --resume goes on"
        if not current.fraction < fraction <= 1.0:
            return f"refused: expected a stage above {current.fraction:.4g}, up to 1, got {given[:20]}"
        current.widen(fraction, wall)
        return "done"

    def _begin(self, order: Order, wall: float) -> str:
        given, current = self._tables.given(order), self.current
        if given is None:
            return "refused: its bundle is not whole in the store, or another roll-out was given since"
        why = self._unfit(given.plan)
        if not why and current is not None and current.state != "complete" and current.plan.sha256 != given.plan.sha256:
            why = f"version {current.plan.version} is being rolled out, --end ends that"
        if why:
            self._tables.refuse(order)
            return f"refused: {why}"
        given.since = wall
        for device, (bundle, said) in self._said.items():
            given.hear(device, bundle, said)
        self._tables.begin(order, given, wall)
        self.current = given
        self._unsaved.clear()
        self._count()
        return "done"

    def _unfit(self, plan: Plan) -> str:
        if plan.fleet and plan.version <= self._version:
            return f"expected a version above {self._version}, that of this fleet's bundle, got {plan.version}"
        if not plan.fleet and plan.sha256 not in self._bundles:
            return "this aggregator does not run with that bundle yet: start it with --bundle of it first"
        return ""
