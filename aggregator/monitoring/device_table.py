"""What is known of each device, and what happened to it, kept in the store for the operator.

1. `status` and `decided` note in memory what devices say and what was decided on it. A message that somebody published
   just now is a sign of life. A birth that a broker retained is none: the device may be gone for days. So a device that
   only such a birth speaks for is online, but not confirmed, and `heard_at` stays what it was.
2. `keep` makes it durable every `KEEP_S` seconds, in one transaction: whole rows where something changed, and what
   only counts (when it was heard, bytes) every `COUNT_S` seconds. After kill -9 so much is unknown. Writing that took
   long is followed by a rest that is many times as long, so that it never takes more than a small share of the time.
3. What happens goes into a log. It keeps the newest `EVENTS` entries, and the newest `EVENTS_OF_ONE` of one device. It
   takes `EVENTS_AT_ONCE`, as when a whole fleet connects, but no more than `EVENTS_A_SECOND` for long: neither a device
   that comes and goes nor a flood of invented names pushes all others out. One device has `ONES_AT_ONCE` of them, and
   one each `_ONES_EACH_S` for long, so what happens to others has room while it floods.

All times are the aggregator's. A device's own clock decides nothing; how far it is off when a birth comes is one of its
figures. What devices say is kept as `printable` text.

Only who leads writes these tables. Another process of the same store (`leads` is false) has no rows: it notes what it
took, and sends that to who leads as a letter, a row of the store that the leader reads and deletes. Such notes are
stamped when the leader reads them.

When a device is forgotten, its rows are removed with all its other data, and nothing of it is noted while it is
refused. See docs/decisions/257.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from protofleet.aggregator.database import Connection, Database, upsert
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.contract.conditions import CLOCK, CONDITIONS, DISK_FREE
from protofleet.contract.printable import printable
from protofleet.contract.wire.messages import Status
from protofleet.contract.wire.rollout_messages import APART

__all__ = [
    "CLOCK_AHEAD",
    "COUNT_S",
    "EVENTS",
    "EVENTS_AT_ONCE",
    "EVENTS_A_SECOND",
    "EVENTS_OF_ONE",
    "KEEP_S",
    "ONES_AT_ONCE",
    "SETTLE_S",
    "Device",
    "DeviceEvent",
    "DeviceReader",
    "DeviceTable",
    "accuracy_of",
    "device_events",
    "known_devices",
]

KEEP_S, COUNT_S = 1.0, 10.0
_REST, _COUNT_REST = 20.0, 200.0  # times as long as writing took
SETTLE_S = 120.0  # after a connection: by then a living device has connected again, or its birth is retained
EVENTS, EVENTS_OF_ONE = 20_000, 200
EVENTS_AT_ONCE, EVENTS_A_SECOND = 2_000, 1.0
ONES_AT_ONCE, _ONES_EACH_S = 50, 60.0  # of one device
_LEFT_OUT_S = 60.0  # between two entries that say how many there was no room for
_REFUSED_AGAIN_S = 3_600.0  # between two entries of one device for the same reason
_LETTERS = 256  # that wait for somebody who leads
_ROWS = 128  # in one statement: a server is asked once for so many
_PACKAGES = ("protofleet", "python", "onnxruntime", "numpy", "paho-mqtt")
_FIGURES = ("rss_bytes", "peak_rss_bytes", "train_step_ms", "samples_new")
_SHARES = ("unknown_share",)  # figures of 0 to 1
CLOCK_AHEAD = "clock_ahead_s"  # a figure of ours: by how much a device's clock differed when its birth came
_PROFILED = "profile_"  # how the figures of `profile --measure` begin
_LONGEST_REASON = 200
_LARGEST = 1e18  # of a figure: more bytes or seconds has no device, and rounding it, or writing it out, makes no sense


@dataclass(slots=True)
class Device:
    """What is known of one device.

    Attributes:
        first_seen: when it was heard of for the first time, seconds since the epoch, as all times here.
        online: whether its newest status is a birth.
        confirmed: whether it was heard since the aggregator has this connection to the broker. Otherwise the broker
            only retains its birth.
        since: when `online` changed last.
        heard_at: when a message of it came last, or None. What a broker retained does not count.
        boot: how often its state directory was opened.
        board: its own name.
        bundle: version and beginning of the sha256 of what it runs.
        apart: why it takes no part in what is announced; empty where it does.
        software: versions by package.
        figures: what it measured of itself, by name: memory, the time of a training step, new samples, and what
            `profile --measure` had measured. `unknown_share` is the share of its camera's photos that were unlike all
            classes. `clock_ahead_s` is how far its clock was ahead of ours when its last birth came; what it says of
            disk and certificate has the names of `contract/conditions.py`. A device that has an ε says none of these
            but the times of `profile --measure`.
        proposed: classes that its owner has proposed, as `printable` text, and for how many photos.
        up_bytes, down_bytes: payloads of its messages, and of what was published for it, or for all while it was
            online; in total.
        refused: how many of its messages were refused.
        refusal, refused_at: why and when the last one was.
        members: of how many devices the last sums were, for a gateway; 0 for a device, and for a gateway with nobody.
    """

    first_seen: float
    online: bool = False
    confirmed: bool = False
    since: float = 0.0
    heard_at: float | None = None
    boot: int = 0
    board: str = ""
    bundle: str = ""
    apart: str = ""
    software: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    proposed: dict[str, int] = field(default_factory=dict)
    up_bytes: int = 0
    down_bytes: int = 0
    refused: int = 0
    refusal: str = ""
    refused_at: float | None = None
    members: int = 0


@dataclass(frozen=True)
class DeviceEvent:
    """An entry of the log.

    Attributes:
        what: "first seen", "online", "gone", "silent", "started", "bundle", "software", "apart", "refused", or "left
            out" for entries that there was no room for.
    """

    at: float
    device: str
    what: str
    detail: str = ""


_COUNTS = ("heard_at", "up_bytes", "down_bytes")  # the columns of `device_count`
_COLUMNS = tuple(each.name for each in fields(Device) if each.name not in _COUNTS)  # those of `device`
_JSON = ("software", "figures", "proposed")


class DeviceTable:
    """These tables of an open store.

    Args:
        leads: whether this process writes them.

    Attributes:
        counts: how many devices are known, gone or unconfirmed, as of the last `keep`; of those that nothing is taken
            of, none is gone.
        up_bytes, down_bytes: payloads that came from devices, and that were published, since this process began.
    """

    def __init__(self, file: Database, *, leads: bool = True) -> None:
        self._db, self._disk, self._transaction = file.connection, file.guard, file.transaction
        self._leads = leads
        self._rows: dict[str, Device] = {}
        if leads:
            with self._disk():
                self._rows = known_devices(self._db)
        self._instances: dict[str, bytes] = {}
        self._changed, self._counted = set[str](), set[str]()
        self._spoke = set[str]()  # who has sent sums since the last letter
        self._events: list[DeviceEvent] = []
        self._left_out, self._left_out_at = 0, float("-inf")
        self._room, self._room_at = float(EVENTS_AT_ONCE), float("inf")  # for entries
        self._ones: dict[str, tuple[float, float]] = {}  # of a device: room for its entries, and at which moment
        self._retained = set[str]()  # whose birth the broker retained, on this connection
        self._for_all_bytes = 0  # published for all since the last `keep`
        self._settle_at: float | None = None
        self._keep_at = self._count_at = float("-inf")
        self.up_bytes = self.down_bytes = 0
        self.counts: Mapping[str, int] = {"known": len(self._rows), "gone": 0, "unconfirmed": 0}
        self.disconnected()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, device: str) -> Device | None:
        """What is known of a device."""
        return self._rows.get(device)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    # arguments: what is known of the message
    def status(
        self,
        device: str,
        status: Status,
        size_bytes: int,
        at: float,
        *,
        is_ours: bool = False,
        is_news: bool = True,
        is_refused: bool = False,
    ) -> None:
        """A device's birth or death.

        Args:
            at: seconds since the epoch.
            is_ours: whether we have published it in the device's name.
            is_news: whether it was published just now, and is not what a broker retained.
            is_refused: whether nothing of the device is taken; then it gets no row.
        """
        is_new = device not in self._rows
        row = self._row(device, at, is_refused=is_refused)
        if row is None:
            return
        if is_news and not is_ours:
            row.heard_at, row.up_bytes = at, row.up_bytes + size_bytes
            self.up_bytes += size_bytes
            self._counted.add(device)
        if not status.online:
            self._ends(device, row, status, at, is_ours=is_ours)
            return
        self._retained.add(device)
        self._instances[device] = status.instance
        self._tell(device, row, status, at, is_news=is_news)
        if not row.online:
            row.online, row.since, row.confirmed = True, at, False
            if not is_new:  # "first seen" says it
                self._note(at, device, "online")
        row.confirmed = row.confirmed or is_news
        self._changed.add(device)

    def _ends(self, device: str, row: Device, status: Status, at: float, *, is_ours: bool) -> None:
        """A death, which may be of an older process."""
        known = self._instances.get(device)
        if known is not None and known != status.instance:
            return
        self._instances.pop(device, None)
        self._retained.discard(device)
        free = status.metrics.get(DISK_FREE)
        if free is not None and abs(free) <= _LARGEST and free != row.figures.get(DISK_FREE):
            row.figures = {**row.figures, DISK_FREE: free}
            self._changed.add(device)
        if row.online:
            self._goes(device, row, at, "silent" if is_ours else "gone")

    def _goes(self, device: str, row: Device, at: float, what: str, detail: str = "") -> None:
        row.online, row.confirmed, row.since = False, False, at
        self._changed.add(device)
        self._note(at, device, what, detail)

    def _tell(self, device: str, row: Device, status: Status, at: float, *, is_news: bool) -> None:
        """What a birth says of its device. One that was retained says nothing of the clock as it is."""
        versions, metrics = status.versions, _possible(status.metrics)
        software = {name: printable(versions[name]) for name in _PACKAGES if name in versions}
        bundle, apart = printable(versions.get("bundle", "")), printable(versions.get(APART, ""))
        figures = {name: value for name, value in metrics.items() if name in _FIGURES or name.startswith(_PROFILED)}
        figures |= {name: metrics[name] for name in _SHARES if 0 <= metrics.get(name, -1.0) <= 1}
        figures |= {name: metrics[name] for name in CONDITIONS if name in metrics and name != CLOCK}
        if is_news and CLOCK in metrics:
            figures[CLOCK_AHEAD] = metrics[CLOCK] - at
        elif not is_news and CLOCK_AHEAD in row.figures and status.boot == row.boot:
            figures[CLOCK_AHEAD] = row.figures[CLOCK_AHEAD]
        proposed = {printable(name): photos for name, photos in (status.proposed or {}).items()}
        if row.boot and status.boot != row.boot:
            self._note(at, device, "started", f"boot {status.boot}")
        if row.bundle and bundle != row.bundle:
            self._note(at, device, "bundle", f"{row.bundle} → {bundle}")
        if row.software and software != row.software:
            news = [f"{name} {text}" for name, text in software.items() if row.software.get(name) != text]
            news += [f"{name} no more" for name in row.software if name not in software]
            self._note(at, device, "software", ", ".join(news))
        if apart and apart != row.apart:
            self._note(at, device, "apart", apart)
        row.boot, row.board, row.bundle, row.apart = status.boot, printable(status.profile), bundle, apart
        row.software, row.figures, row.proposed = software, figures, proposed

    def decided(
        self,
        device: str,
        size_bytes: int,
        at: float,
        *,
        refusal: str = "",
        members: int | None = None,
        is_refused: bool = False,
    ) -> None:
        """A message that is the device's own was decided on.

        Args:
            refusal: why it was refused; empty where it was not.
            members: of how many devices its sums are, for a gateway; 0 for a device; None where it brought no sums.
            is_refused: as for `status`.
        """
        row = self._rows.get(device) or self._row(device, at, is_refused=is_refused)
        if row is None:
            return
        row.heard_at = at
        row.up_bytes += size_bytes
        self.up_bytes += size_bytes
        self._counted.add(device)
        if row.online and not row.confirmed:
            row.confirmed = True
            self._changed.add(device)
        if members is not None:
            self._spoke.add(device)
            if members != row.members:
                row.members = members
                self._changed.add(device)
        if refusal:
            self._refuse(device, row, refusal, at)

    def _refuse(self, device: str, row: Device, reason: str, at: float, messages: int = 1) -> None:
        reason = printable(reason)[:_LONGEST_REASON]
        if reason != row.refusal or row.refused_at is None or abs(at - row.refused_at) >= _REFUSED_AGAIN_S:
            self._note(at, device, "refused", reason)
        row.refused, row.refusal, row.refused_at = row.refused + messages, reason, at
        self._changed.add(device)

    def counted_elsewhere(self, device: str, size_bytes: int) -> None:
        """Take back bytes that another process has counted."""
        row = self._rows.get(device)
        if row is not None:
            row.up_bytes -= size_bytes
            self.up_bytes -= size_bytes

    def published(self, topic: str, size_bytes: int) -> None:
        """A message was published: for one device, or for all."""
        above, _, last = topic.rpartition("/")
        self.down_bytes += size_bytes
        if above.endswith("/down"):
            row = self._rows.get(last)
            if row is not None:
                row.down_bytes += size_bytes
                self._counted.add(last)
        elif last == "round" or above.endswith("/global"):
            self._for_all_bytes += size_bytes

    def connected(self, now: float) -> None:
        """There is another connection to the broker: nobody is confirmed before it was heard on this one.

        Args:
            now: seconds of a steady clock.
        """
        self._settle_at = now + SETTLE_S
        self._retained.clear()
        self.disconnected()

    def disconnected(self) -> None:
        """There is no connection to the broker: nobody is confirmed."""
        for device, row in self._rows.items():
            if row.confirmed:
                row.confirmed = False
                self._changed.add(device)

    def forget(self, device: str) -> None:
        """Its rows were removed."""
        self._rows.pop(device, None)
        self._instances.pop(device, None)
        self._ones.pop(device, None)
        for names in (self._changed, self._counted, self._retained, self._spoke):
            names.discard(device)
        self._events = [event for event in self._events if event.device != device]

    def _row(self, device: str, at: float, *, is_refused: bool) -> Device | None:
        row = self._rows.get(device)
        if row is None and not is_refused and len(self._rows) < MAX_DEVICES:
            row = self._rows[device] = Device(at, since=at)
            self._changed.add(device)
            self._note(at, device, "first seen")
        return row

    def _note(self, at: float, device: str, what: str, detail: str = "") -> None:
        if not self._leads:
            return
        ones, ones_at = self._ones.get(device, (float(ONES_AT_ONCE), self._room_at))
        since_s = self._room_at - ones_at if self._room_at > ones_at else 0.0
        ones = min(float(ONES_AT_ONCE), ones + since_s / _ONES_EACH_S)
        if self._room < 1 or ones < 1:
            self._left_out += 1
        else:
            self._room -= 1
            self._ones[device] = (ones - 1, self._room_at)
            self._events.append(DeviceEvent(at, device, what, detail))

    # ── what becomes durable ────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, now: float, at: float, refused: Collection[str] = (), *, shared: bool = False) -> None:
        """Make durable what is due; call it after each turn.

        Args:
            now: seconds of a steady clock.
            at: seconds since the epoch.
            refused: the devices that nothing is taken of.
            shared: whether there are other processes, who send letters.

        Raises:
            StoreError: the disk refuses.
        """
        if now < self._keep_at:
            return
        self._keep_at = now + KEEP_S
        if not self._leads:
            self._send_letter()
            return
        letters = self._take_letters() if shared else []
        for letter in letters:
            self._read_letter(letter, at, refused)
        self._settle(now, at)
        self._spoke.clear()
        self._count(refused)
        self._make_room(now, at)
        if self._for_all_bytes:
            for device, row in self._rows.items():
                if row.online:
                    row.down_bytes += self._for_all_bytes
                    self._counted.add(device)
            self._for_all_bytes = 0
        counted, is_due = set[str](), now >= self._count_at
        if is_due:
            counted, self._counted = self._counted, counted
        if not (self._changed or counted or self._events):
            return
        began = time.perf_counter()
        self._write(counted)
        took_s = time.perf_counter() - began
        self._keep_at = now + max(KEEP_S, _REST * took_s)
        if counted:
            self._count_at = now + max(COUNT_S, _COUNT_REST * took_s)

    def _make_room(self, now: float, at: float) -> None:
        """For further entries of the log, as time goes by; now and then one that says how many had none."""
        if self._left_out and now >= self._left_out_at:
            self._events.append(DeviceEvent(at, "", "left out", f"{self._left_out} entries at once"))
            self._left_out, self._left_out_at = 0, now + _LEFT_OUT_S
        self._room = min(EVENTS_AT_ONCE, self._room + EVENTS_A_SECOND * max(0.0, now - self._room_at))
        self._room_at = now
        self._ones = {
            device: (room, now if at > now else at)  # none was known before the first turn
            for device, (room, at) in self._ones.items()
            if now - at < ONES_AT_ONCE * _ONES_EACH_S
        }

    def _count(self, refused: Collection[str]) -> None:
        gone = [device for device, row in self._rows.items() if not row.online]
        unconfirmed = sum(row.online and not row.confirmed for row in self._rows.values())
        away = len(gone) - sum(device in refused for device in gone)
        self.counts = {"known": len(self._rows), "gone": away, "unconfirmed": unconfirmed}

    def _write(self, counted: Collection[str]) -> None:
        events, self._events = self._events, []
        changed, self._changed = self._changed, set()
        also = changed | set(counted)
        with self._transaction() as db:
            rows = [(device, *_cells(self._rows[device], _COLUMNS)) for device in sorted(changed)]
            _put(db, "device", _COLUMNS, rows)
            counts = [(device, *_cells(self._rows[device], _COUNTS)) for device in sorted(also)]
            _put(db, "device_count", _COUNTS, counts)
            _append(db, events)

    def _settle(self, now: float, at: float) -> None:
        """Who was online on an earlier connection, and of whom this broker knows nothing, is gone."""
        if self._settle_at is None or now < self._settle_at:
            return
        self._settle_at = None
        for device, row in self._rows.items():
            if row.online and not row.confirmed and device not in self._retained:
                self._goes(device, row, at, "gone", "the broker knows nothing of it any more")

    # ── letters between processes ───────────────────────────────────────────────────────────────────────────────────

    def _send_letter(self) -> None:
        if not self._rows:
            return
        members = {device: row.members if device in self._spoke else None for device, row in self._rows.items()}
        letter = {
            device: [row.up_bytes, row.down_bytes, row.refused, row.refusal, members[device], row.heard_at is not None]
            for device, row in self._rows.items()
        }
        with self._transaction() as db:
            db.execute("INSERT INTO device_letter (letter) VALUES (?)", (json.dumps(letter),))
            db.execute(
                "DELETE FROM device_letter WHERE id NOT IN (SELECT id FROM device_letter ORDER BY id DESC LIMIT ?)",
                (_LETTERS,),
            )
        for each in (self._rows, self._changed, self._counted, self._spoke):
            each.clear()

    def _take_letters(self) -> list[dict[str, list[Any]]]:
        with self._disk():
            rows = self._db.execute("SELECT id, letter FROM device_letter ORDER BY id").fetchall()
        if not rows:
            return []
        with self._transaction() as db:
            db.executemany("DELETE FROM device_letter WHERE id = ?", [(number,) for number, _ in rows])
        return [letter for _, text in rows if isinstance(letter := json.loads(text), dict)]

    def _read_letter(self, letter: Mapping[str, list[Any]], at: float, refused: Collection[str]) -> None:
        for device, (up, down, refusals, refusal, members, is_heard) in letter.items():
            row = self._row(device, at, is_refused=device in refused)
            if row is None:
                continue
            if is_heard:
                self.decided(device, up, at, members=members)
                self.up_bytes -= up  # which that process counts
            row.down_bytes += down
            self._counted.add(device)
            if refusals:
                self._refuse(device, row, refusal, at, refusals)


def _possible(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures that a device can have."""
    return {name: value for name, value in figures.items() if abs(value) <= _LARGEST}


def _cells(row: Device, columns: Sequence[str]) -> Iterator[Any]:
    for name in columns:
        value = getattr(row, name)
        yield json.dumps(value) if name in _JSON else int(value) if isinstance(value, bool) else value


def _put(db: Connection, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Put rows in their places, many in one statement."""
    one = upsert(table, "device", *columns)
    before, places, after = one.partition(f"({', '.join('?' * (1 + len(columns)))})")
    whole = len(rows) - len(rows) % _ROWS
    many = f"{before}{', '.join([places] * _ROWS)}{after}"
    for start in range(0, whole, _ROWS):
        db.execute(many, [cell for row in rows[start : start + _ROWS] for cell in row])
    if whole < len(rows):
        db.executemany(one, rows[whole:])


def _append(db: Connection, events: Sequence[DeviceEvent]) -> None:
    """Add entries to the log, and drop what is beyond its budget."""
    if not events:
        return
    db.executemany(
        "INSERT INTO device_event (at, device, what, detail) VALUES (?, ?, ?, ?)",
        [(event.at, event.device, event.what, event.detail) for event in events],
    )
    db.executemany(
        "DELETE FROM device_event WHERE device = ? AND id < (SELECT min(id) FROM"
        " (SELECT id FROM device_event WHERE device = ? ORDER BY id DESC LIMIT ?) newest)",
        [(device, device, EVENTS_OF_ONE) for device in sorted({event.device for event in events})],
    )
    db.execute("DELETE FROM device_event WHERE id <= (SELECT max(id) FROM device_event) - ?", (EVENTS,))


# ── what a reader sees ──────────────────────────────────────────────────────────────────────────────────────────────


def known_devices(db: Connection) -> dict[str, Device]:
    """Every device of an open store, by name, in their order; rows that no aggregator wrote are left out."""
    return DeviceReader().read(db)


class DeviceReader:
    """Reads the devices again and again: one whose row has not changed is the same object as before."""

    def __init__(self) -> None:
        self._read: dict[Any, tuple[Any, Device | None]] = {}  # by name: its cells, and what they say

    def read(self, db: Connection) -> dict[str, Device]:
        """As `known_devices`."""
        columns = ", ".join(f"d.{name}" for name in _COLUMNS)
        counts = ", ".join(f"c.{name}" for name in _COUNTS)
        rows = db.execute(
            f"SELECT d.device, {columns}, {counts} FROM device d LEFT JOIN device_count c ON c.device = d.device"
            " ORDER BY d.device"
        ).fetchall()
        before, self._read = self._read, {}
        found = {}
        for row in rows:
            device, cells = row[0], row[1:]
            read = before.get(device)
            if read is None or read[0] != cells:
                read = (cells, _device(dict(zip((*_COLUMNS, *_COUNTS), cells, strict=True))))
            self._read[device] = read
            if isinstance(device, str) and read[1] is not None:
                found[device] = read[1]
        return found


def _device(cells: dict[str, Any]) -> Device | None:
    try:
        for name in _JSON:
            cells[name] = json.loads(cells[name])
        row = Device(**cells)
        row.first_seen, row.since = float(row.first_seen), float(row.since)
        row.heard_at, row.refused_at = (None if at is None else float(at) for at in (row.heard_at, row.refused_at))
        row.online, row.confirmed = bool(row.online), bool(row.confirmed)
        row.boot, row.refused, row.members = int(row.boot), int(row.refused), int(row.members)
        row.up_bytes, row.down_bytes = int(row.up_bytes or 0), int(row.down_bytes or 0)
        row.board, row.bundle, row.apart, row.refusal = map(str, (row.board, row.bundle, row.apart, row.refusal))
        row.software = {str(name): str(text) for name, text in row.software.items()}
        row.figures = _possible({str(name): float(value) for name, value in row.figures.items()})
        row.proposed = {str(name): int(photos) for name, photos in row.proposed.items()}
    except (TypeError, ValueError, AttributeError, RecursionError):
        return None
    return row


def device_events(db: Connection, device: str | None = None, limit: int = 100) -> list[DeviceEvent]:
    """The newest entries of the log, the newest first: of one device, or of all."""
    only, values = ("", ()) if device is None else (" WHERE device = ?", (device,))
    rows = db.execute(
        f"SELECT at, device, what, detail FROM device_event{only} ORDER BY id DESC LIMIT {int(limit)}", values
    ).fetchall()
    return [DeviceEvent(float(at), str(name), str(what), str(detail)) for at, name, what, detail in rows]


def accuracy_of(db: Connection, device: str, rounds: int = 20) -> list[dict[str, Any]]:
    """What a device said of its accuracy after the newest rounds, the newest first, for JSON."""
    rows = db.execute(
        "SELECT round, samples, all_classes, own_classes, among_own FROM accuracy WHERE device = ?"
        f" ORDER BY round DESC LIMIT {int(rounds)}",
        (device,),
    ).fetchall()
    names = ("round", "samples", "all_classes", "own_classes", "among_own")
    return [dict(zip(names, row, strict=True)) for row in rows]
