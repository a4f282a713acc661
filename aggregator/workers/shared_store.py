"""A store that several processes work on: one leads, the others validate, commit and answer beside it.

Any of them may commit contributions at any time, exactly once each: the key (round, method, device) is unique. The
process that comes second learns that, and answers `duplicate`. Every commit depends on the number `based_on`. If the
leader or an operator has changed anything since that number, nothing is written and everything is decided again
(`aggregator/database/postgres_members.py`).

Chunks of one contribution may come to different processes. Each process puts its chunks into a table of the server, and
the process that finds all of them there takes the whole contribution. See docs/decisions/185.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from protofleet.aggregator.database import AnyPlace, Database, engine_of, place_of, upsert
from protofleet.aggregator.database.postgres_members import Leader, Member
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.records import Accepted, Key, Tally
from protofleet.aggregator.store.schema import COUNT, KIND
from protofleet.aggregator.workers.shared_standing_tables import SharedStandingTables
from protofleet.contract.errors import StoreLostError, UsageError
from protofleet.contract.wire.messages import Chunk

__all__ = ["SharedStore"]


class SharedStore(DurableStore):
    """The store of one process among several.

    Args:
        path: a server's URL.
        leads: whether this is the process that opens and closes rounds.
        settings: a digest of the settings that decide which contributions are taken. A commit is written only if the
            leader's digest is the same.
        anew: whether a leader may have other settings than those in force.

    Attributes:
        standing_beside: the standing sums, for several processes.
        based_on: the number that goes up with everything that decisions depend on, as last read.

    Raises:
        InUseError: `leads`, and another process leads already.
        StoreError, UsageError: as `DurableStore`; also when the place is a file, or of another release's version, or
            when other settings are in force. A member checks the settings in every transaction.
    """

    shared = True

    def __init__(
        self,
        path: AnyPlace,
        bundle: bytes,
        fleet: str,
        *,
        extends: Collection[bytes] = (),
        leads: bool,
        settings: str = "",
        anew: bool = True,
    ) -> None:
        self._claims, self._bundle, self._settings, self._anew = leads, bundle, settings, anew
        super().__init__(path, bundle, fleet, extends=extends)
        self.standing = self.standing_beside = SharedStandingTables(self._members)
        self.based_on = self.changes()

    def _open(self, path: AnyPlace) -> Database:
        place = place_of(path)
        engine = engine_of(place)
        if engine.leader is None or engine.member is None:
            raise UsageError("--worker", expected="--store postgresql://…, which several can work on", got=place)
        self._members: Leader | Member = (
            engine.leader(place, KIND, self._settings, anew=self._anew)
            if self._claims
            else engine.member(place, KIND, self._settings)
        )
        return self._members

    def _check_claims(self) -> None:
        if not self._claims:
            raise StoreLostError(f"store {self._file.path}", expected="a run", got="none yet", hint="again in a moment")

    @property
    def leads(self) -> bool:
        """Whether this process leads, or did."""
        return self._claims

    def alone(self) -> AbstractContextManager[None]:
        """In the block, no other process changes what is read and written: the block is one transaction."""
        return self._members.alone()

    def changes(self) -> int:
        """The number that goes up with everything that decisions depend on, whichever process changes it."""
        return self._members.changes()

    def may_lead(self) -> bool:
        """Whether no process leads; for members."""
        assert isinstance(self._members, Member)
        return self._members.may_lead()

    def check_version(self) -> None:
        """Check that the leader has this release and bundle, and shares its store.

        A member calls this after each change.
        """
        assert isinstance(self._members, Member)
        self._members.check_version()
        self._members.check_company()
        with self._disk():
            (bundle,) = self._db.execute("SELECT value FROM meta WHERE name = 'bundle'").fetchone()
        if bytes(bundle) != self._bundle:
            expected, got = (f"the bundle of sha256 {sha256.hex()[:12]}…" for sha256 in (bytes(bundle), self._bundle))
            hint = "the --bundle of the process that leads, for all of them"
            raise UsageError("--worker", expected=f"{expected}, which the leader has", got=got, hint=hint)

    def beat(self) -> None:
        """Record that the leader is alive."""
        self._members.beat()

    def commit(
        self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()
    ) -> Collection[Key]:
        """As `DurableStore.commit`, beside other processes.

        Raises:
            StaleError: the decisions depend on something that has changed since; nothing was written.
        """
        if self._members.is_alone:  # a part of what the leader does
            return super().commit(accepted, tally, refusals)
        ordered = sorted(accepted, key=lambda a: (a.round, a.method, a.device))  # so that two never wait for each other
        with self._members.beside_others(self.based_on) as db:
            ids = self._file.fresh_ids("payload", len(ordered))
            numbered = list(zip(ids, ordered, strict=True))
            db.executemany(
                "INSERT INTO contribution VALUES (?, ?, ?, ?, ?) ON CONFLICT (round, method, device) DO NOTHING",
                [(a.round, a.method, a.device, a.received_bytes, n) for n, a in numbered],
            )
            ours = self._ours(ids)
            db.executemany(
                "INSERT INTO payload VALUES (?, ?, ?)", [(n, a.round, a.payload) for n, a in numbered if n in ours]
            )
            self.blinded.keep_seeds(
                (a.round, a.device, a.message.seed)
                for n, a in numbered
                if n in ours and a.message is not None and a.message.seed
            )
            counts = sorted((round, outcome, messages) for (round, outcome), messages in tally.items())
            db.executemany(COUNT, counts)
            db.executemany(upsert("refusal", "round, device"), sorted(refusals))
        return {(a.round, a.method, a.device) for n, a in numbered if n not in ours}

    def _ours(self, ids: Sequence[int]) -> set[int]:
        if not ids:
            return set()
        marks = ", ".join("?" for _ in ids)
        rows = self._db.execute(f"SELECT payload FROM contribution WHERE payload IN ({marks})", ids).fetchall()
        return {number for (number,) in rows}

    # ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put_chunks(self, chunks: Iterable[tuple[str, Chunk, bytes]]) -> None:
        """Make chunks durable: device, chunk, and the message that it came in.

        A chunk that begins another contribution replaces the chunks of the one before.
        """
        rows = sorted((d, c.method, c.round, c.digest, c.index, payload) for d, c, payload in chunks)
        with self._members.beside_others(None) as db:
            for device, method, digest in sorted({(row[0], row[1], row[3]) for row in rows}):
                db.execute(
                    "DELETE FROM protofleet_chunk WHERE device = ? AND method = ? AND digest <> ?",
                    (device, method, digest),
                )
            columns = "device, method, round, digest, number, payload"
            db.executemany(
                f"INSERT INTO protofleet_chunk ({columns}) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (device, method, digest, number) DO NOTHING",
                rows,
            )

    def other_chunks(self, device: str, chunk: Chunk, known: Collection[int]) -> list[bytes]:
        """The messages with the other chunks of a contribution, whichever process took them."""
        with self._disk():
            rows = self._db.execute(
                "SELECT number, payload FROM protofleet_chunk WHERE device = ? AND method = ? AND digest = ?"
                " ORDER BY number",
                (device, chunk.method, chunk.digest),
            ).fetchall()
        return [payload for number, payload in rows if number not in known]

    def drop_chunks(self, devices: Iterable[str], method: str, before: int) -> None:
        """Delete the chunks of assembled contributions, and those of rounds before `before`."""
        with self._members.beside_others(None) as db:
            for device in sorted(devices):
                db.execute("DELETE FROM protofleet_chunk WHERE device = ? AND method = ?", (device, method))
            db.execute("DELETE FROM protofleet_chunk WHERE round < ?", (before,))
