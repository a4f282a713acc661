"""What a site gives the aggregator above: what stands, or the sum of each closed round. See `uplink.py`.

With standing sums: if the sums changed and no generation is on its way, they become the next generation. The journal
holds it, with a mark of each device's generation in it, before anything is sent. With rounds: the sum of the newest
closed round becomes the contribution to that round.
"""

from __future__ import annotations

import json
import logging

from protofleet.contract.errors import StatisticError
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Receipt
from protofleet.edge_client.journal.journal import Pending
from protofleet.gateway.rounds_site import Fate, RoundsSite
from protofleet.gateway.site_terms import ABOVE
from protofleet.gateway.standing_site import StandingSite
from protofleet.gateway.uplink import BUSY_S, Uplink

__all__ = ["RoundsUpward", "StandingUpward"]


class StandingUpward:
    """Gives what stands on a site; a `uplink.py: Upward`."""

    def __init__(self, uplink: Uplink, site: StandingSite) -> None:
        self._uplink, self._site, self._core, self._marks = uplink, site, site.core, uplink.journal.standing
        self._known: tuple[bytes, dict[str, int] | None] | None = None  # a run, and the generations settled in it

    def misfit(self, a: Announcement) -> str:
        if a.phase != "standing":
            return _other("there are rounds", "sums that stand")
        here = self._core.method.name
        return (
            "" if a.method == here else f"above sums of {a.method} stand, and here of {here}: try --method {a.method}"
        )

    def heard(self, receipt: Receipt) -> None:
        self._known = None

    def turn(self, a: Announcement | None, now: float) -> None:
        if a is None:
            return
        site, state = self._site, self._uplink.newest_state
        site.hold_to(a, now)
        if state is not None and state.version:
            site.hear(state)
        site.settled = self._settled(a.run)
        self._make(a, now)
        due_s, poll_s = self._core.standing.due_in_s(now), self._uplink.poll_s
        site.wait_s = poll_s if due_s is None else min(poll_s, due_s + BUSY_S)

    def _settled(self, run: bytes) -> dict[str, int] | None:
        """The generation of each device in the sums that are committed above; None while that is not known."""
        if self._known is None or self._known[0] != run:
            marks = self._marks
            generation, counts = marks.newest(run)
            kept = None if not counts or marks.pending(run) else marks.samples(run)
            devices = None if kept is None else dict(json.loads(kept)["devices"])
            self._known = (run, devices if generation else {})
        return self._known[1]

    def _make(self, a: Announcement, now: float) -> None:
        """Make the next generation, if the sums changed and no generation is on its way."""
        core, marks, site, uplink = self._core, self._marks, self._site, self._uplink
        generation, counts = marks.newest(a.run)
        if marks.pending(a.run) or core.standing.paused or not (core.standing.due(now) or not counts):
            return
        mark = site.mark()
        if (counts and marks.samples(a.run) == mark) or (not generation and not core.standing.present):
            core.standing.solved(now)
            return
        if generation >= MAX_ROUND or now < uplink.again_at_s:
            return
        try:
            contribution = site.contribution(a, generation + 1)
        except StatisticError as error:
            line = f"nothing more goes up: {error}, try a second gateway for some of the devices"
            uplink.say(line, level=logging.WARNING)
            core.standing.solved(now)
            return
        payload = uplink.sealed(encode(contribution))
        key = (a.run, generation + 1, a.method)
        metrics = {"standing": key[1], "devices": core.devices, "payload_bytes": len(payload)}
        marks.commit(key, samples=mark, payload=payload, limit_bytes=a.limit_bytes, metrics=metrics)
        self._known = None
        core.standing.solved(now)
        line = f"sums {key[1]} ({a.method}) of {core.devices:,} devices: {len(payload):,} bytes to send"
        uplink.send(Pending(key, payload, a.limit_bytes), line)


class RoundsUpward:
    """Gives the sum of each round that is closed on a site; a `uplink.py: Upward`."""

    def __init__(self, uplink: Uplink, site: RoundsSite) -> None:
        self._uplink, self._site, self._journal = uplink, site, uplink.journal
        self._looked: tuple[int, str] | None = None  # round and phase in which a contribution was last made
        self._reasons: dict[int, Fate] = {}  # by round: the last one that was refused or did not go up
        site.fate = self._fate

    def misfit(self, a: Announcement) -> str:
        if a.phase == "standing":
            return _other("sums stand", "rounds")
        if self._site.run_above not in (None, a.run):
            return "above is another run than the one that this store is of: another --store"
        return ""

    def heard(self, receipt: Receipt) -> None:
        if receipt.status == "rejected":
            self._reasons = {receipt.round: ("rejected", receipt.reason)}
            self._uplink.say(f"round {receipt.round} was refused by {ABOVE}: {receipt.reason}", level=logging.WARNING)

    def turn(self, a: Announcement | None, now: float) -> None:
        if a is not None and (a.phase != "finished" or self._uplink.is_finished):
            self._site.follow(a, self._uplink.newest_state, now)
            self._make(a)
        self._site.rounds.poll_s = self._uplink.poll_s

    def _make(self, a: Announcement) -> None:
        """Send the sum of the newest closed round, unless it was sent."""
        site, uplink = self._site, self._uplink
        looked = (site.rounds.number, site.rounds.phase)
        if looked == self._looked:
            return
        self._looked, record = looked, site.closed
        if record is None or self._journal.is_done((a.run, record.number, record.method)):
            return
        key = (a.run, record.number, record.method)
        try:
            contribution = site.contribution(a, record)
        except StatisticError as error:
            self._reasons = {record.number: ("rejected", str(error))}
            line = f"round {record.number} does not go up: {error}, try a second gateway for some of the devices"
            uplink.say(line, level=logging.WARNING)
            return
        payload = uplink.sealed(encode(contribution))
        metrics = {"round": record.number, "devices": contribution.devices, "payload_bytes": len(payload)}
        self._journal.commit_round(key, weights={}, payload=payload, limit_bytes=a.limit_bytes, metrics=metrics)
        self._journal.mark_reported(key)
        line = f"round {key[1]} ({key[2]}) of {contribution.devices:,} devices: {len(payload):,} bytes to send"
        uplink.send(Pending(key, payload, a.limit_bytes), line)

    def _fate(self, round: int, method: str) -> Fate | None:
        """The outcome above of a round's contribution; None while it is open."""
        run = self._site.run_above
        if round in self._reasons:
            return self._reasons[round]
        if run is None:
            return None
        outcome = self._journal.outcome((run, round, method))
        if outcome is not None:
            fates: dict[str, Fate] = {"rejected": ("rejected", "refused"), "late": ("late", "")}
            return fates.get(outcome[0], ("committed", ""))
        newest = self._site.closed
        is_lost = newest is not None and round < newest.number and not self._journal.is_done((run, round, method))
        return ("late", "") if is_lost else None  # sent from an earlier state directory: its outcome is unknown


def _other(above: str, below: str) -> str:
    return f"above {above}, and this store is of {below}: another --store and --state"
