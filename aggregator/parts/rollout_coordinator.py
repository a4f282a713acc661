"""The roll-out of a running aggregator: the state machine (`rollout_stages.py`), its tables, reports and orders.

Devices' reports are kept in memory as they come. They become durable with the next look, at most twice a second; if the
process dies before, the broker retains them. An operator's order is durable before it is announced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from protofleet.aggregator.rollout.rollout_stages import Moved, Plan, Rollout
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.aggregator.store.operator_orders import LOOK_S
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.rollout_tables import RolloutTables
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.wire.rollout_messages import WORDS, Offer, Request, RolloutReport

__all__ = ["RolloutCoordinator"]


class RolloutCoordinator:
    """One aggregator's roll-out, if there is one.

    Args:
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        shorter: sha256 of the bundles that it extends.

    Attributes:
        current: the roll-out; None for none.
        counts: known devices of the present stage by their report, as of the last look.
    """

    def __init__(self, tables: RolloutTables, manifest: Manifest, bundle: bytes, shorter: Collection[bytes]) -> None:
        self._tables, self._version, self._bundles = tables, manifest.version, (bundle, *shorter)
        self.current: Rollout | None = tables.load()
        self._reports: dict[str, tuple[str, str]] = {}  # by device its bundle and its word, since this process started
        self._unsaved: set[str] = set()
        self._news: list[tuple[str, RolloutReport]] = []
        self._looked_at = -math.inf
        self.counts: Mapping[str, int] = {}
        self._count()

    @property
    def offer(self) -> Offer | None:
        """The announced offer."""
        return None if self.current is None else self.current.offer

    @property
    def elsewhere(self) -> str:
        """The fleet that devices go over to, whose status messages are of interest; empty for none."""
        return "" if self.current is None else self.current.plan.fleet

    # ── what devices say and ask ────────────────────────────────────────────────────────────────────────────────────

    def hear(self, device: str, versions: Mapping[str, str], *, elsewhere: bool = False) -> None:
        """Take the report in a device's status.

        Args:
            elsewhere: the status is of the fleet that devices go over to.
        """
        bundle, report_text = versions.get("bundle", ""), versions.get("rollout", "")
        if not (bundle or report_text):  # a last will, or a release that knows of no roll-out
            return
        if not elsewhere:
            if device not in self._reports and len(self._reports) >= MAX_DEVICES:
                return
            self._reports[device] = bundle, report_text
        if self.current is None:
            return
        known_count = len(self.current.told)
        if device not in self.current.told and known_count >= MAX_DEVICES:
            return
        news = self.current.hear(device, bundle, report_text, elsewhere=elsewhere)
        if news is not None:
            self._news.append((device, news))
        if news is not None or len(self.current.told) != known_count:
            self._unsaved.add(device)

    def forget(self, device: str) -> None:
        """Forget a device that is refused from now on."""
        self._reports.pop(device, None)
        self._unsaved.discard(device)
        if self.current is not None and device in self.current.told:
            self.current.forget(device)
            self._tables.forget(device)

    def take_news(self) -> list[tuple[str, RolloutReport]]:
        """The devices' reports since the last call."""
        news, self._news = self._news, []
        return news

    def may_have(self, device: str, request: Request) -> bool:
        """Whether the requested bundle is offered to the device."""
        offer = self.offer
        return (
            offer is not None
            and self.current is not None
            and request.bundle == offer.digest
            and request.offset < offer.size_bytes
            and self.current.is_in(device)
        )

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes of the offered bundle from `offset` on, fewer at its end; none without an offer."""
        return b"" if self.current is None else self._tables.read(self.current.plan.sha256, offset, length)

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, wall: float) -> Moved | None:
        """Do the next due step, durably, and return it; None when nothing is due, or right after a look.

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
        """Carry out an order about roll-outs; returns its outcome, None for another order."""
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
            was, reason = current.state, f"halted by {order.who}"
            current.halt(reason if was != "halted" else current.reason)
            return "done" if was != "halted" else "done: it was halted"
        if order.what == "rollout-resume":
            if current.state != "halted":
                return "done: it was not halted"
            current.resume(wall)
            return "done"
        if order.what == "rollout-stage":
            return self._widen(current, order.detail, wall)
        return f"refused: {order.what} is no order"

    def _widen(self, current: Rollout, stage: str, wall: float) -> str:
        try:
            fraction = float(stage)
        except ValueError:
            fraction = math.nan
        if current.state == "halted":
            return "refused: it is halted, --resume goes on"
        if not current.fraction < fraction <= 1.0:
            return f"refused: expected a stage above {current.fraction:.4g}, up to 1, got {stage[:20]}"
        current.widen(fraction, wall)
        return "done"

    def _begin(self, order: Order, wall: float) -> str:
        rollout, current = self._tables.given(order), self.current
        if rollout is None:
            return "refused: its bundle is not whole in the store, or another roll-out was given since"
        reason = self._unfit(rollout.plan)
        if (
            not reason
            and current is not None
            and current.state != "complete"
            and current.plan.sha256 != rollout.plan.sha256
        ):
            reason = f"version {current.plan.version} is being rolled out, --end ends that"
        if reason:
            self._tables.refuse(order)
            return f"refused: {reason}"
        rollout.since = wall
        for device, (bundle, report_text) in self._reports.items():
            rollout.hear(device, bundle, report_text)
        self._tables.begin(order, rollout, wall)
        self.current = rollout
        self._unsaved.clear()
        self._count()
        return "done"

    def _unfit(self, plan: Plan) -> str:
        if plan.fleet and plan.version <= self._version:
            return f"expected a version above {self._version}, that of this fleet's bundle, got {plan.version}"
        if not plan.fleet and plan.sha256 not in self._bundles:
            return "this aggregator does not run with that bundle yet: start it with --bundle of it first"
        return ""
