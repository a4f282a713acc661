"""Which bundle a start runs with, and in which directory: the file that the command names, or a roll-out's.

The record of roll-outs decides (`rollout.py`): what it says runs takes the place of the file, lies in
`bundles/`, and may be of another fleet than the command's, with a directory of its own. Where it is lost there, the
file that the command names will do if it is the same. Another file than those that a roll-out replaced, of a version
that is not older, is a person's decision and runs as it always did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from contract.bundle import Bundle, read_bundle
from contract.errors import BundleError
from edge_client import rollout
from edge_client.config import ClientConfig
from edge_client.journal import Journal
from edge_client.rollout import Rollouts, Seat
from edge_client.rollout_file import RolloutFile, bundle_file
from edge_client.rollout_work import RolloutTerms

__all__ = ["Seated", "settle"]


@dataclass(frozen=True)
class Seated:
    """A bundle that is to run.

    Attributes:
        settings: the command's, with the fleet that the bundle is of.
        path: where its file lies.
        directory: of the journal.
        known: what is remembered once it runs.
        extends: sha256 of bundles whose state it goes on with.
    """

    settings: ClientConfig
    seat: Seat
    bundle: Bundle
    path: Path
    directory: Path
    terms: RolloutTerms
    known: Rollouts
    extends: tuple[bytes, ...]

    def journal(self) -> Journal:
        """The journal, opened for it.

        Raises:
            StoreError: as `Journal`.
        """
        return Journal(
            self.directory,
            fleet=self.settings.fleet,
            device=self.settings.id,
            bundle=self.bundle.sha256,
            extends=self.extends,
            lies_at=self.path.resolve(),
        )

    def runs(self, file: RolloutFile) -> None:
        """Remember that it does: its files are read, and the journal is its own.

        Raises:
            StoreError: the disk refused.
        """
        known = self.known
        if known.probation is None and self.terms.public_keys:
            known = rollout.proved(known, self.seat)
        file.put(known)


def settle(
    settings: ClientConfig,
    file: RolloutFile,
    keys: tuple[bytes, ...],
    log: Callable[[str], None],
    *,
    starts: bool = True,
    budget: bool = False,
) -> Seated:
    """Choose, and read the bundle. A start on probation is counted, and one too many brings back what was before.

    Args:
        keys: that are trusted; none where the signature is not looked at.
        starts: whether a client starts.
        budget: whether the owner's policy has an ε.

    Raises:
        BundleError: it cannot be read, or is signed by none of these keys.
        UsageError: a key is trusted, and the named file is older than what has run here.
        StoreError: the disk refuses.
    """
    path = Path(settings.bundle)
    sha256 = "" if file.known.active is None else _sha256(path)
    if starts and rollout.instead(file.known, sha256, settings.fleet) is not None:
        _count_start(file, log)
        file.tidy(file.known.fetching)
    known = file.known
    seat = rollout.instead(known, sha256, settings.fleet)
    if seat is None:
        bundle = read_bundle(path, public_key=keys or None)
        named = Seat(bundle.sha256.hex(), bundle.manifest.version, settings.fleet)
        known, seat = rollout.given(known, named, trusts=bool(keys), where=str(path))
    else:
        kept = bundle_file(file.state, seat.sha256)
        path = path if sha256 == seat.sha256 and not kept.is_file() else kept
        try:
            bundle = read_bundle(path, public_key=keys or None)
        except BundleError as error:
            if known.probation is None:
                raise
            log(str(error))
            file.change(rollout.rolled_back, "its file cannot be read")
            return settle(settings, file, keys, log, starts=starts, budget=budget)
        if path == kept:
            log(f"bundle {rollout.tag(seat)} of a roll-out runs in place of {settings.bundle}")
    left = [bytes.fromhex(sha256) for sha256, failure in known.failed.items() if failure.back_to == seat.sha256]
    return Seated(
        settings=msgspec.structs.replace(settings, fleet=seat.fleet),
        seat=seat,
        bundle=bundle,
        path=path,
        directory=file.state / seat.directory,
        terms=RolloutTerms(
            keys,
            settings.rollout,
            budget,
            settings.threads,
            settings.method or "",
            in_parts=settings.memory_limit is not None or settings.micro_batch is not None,
        ),
        known=known,
        extends=(*bundle.manifest.extended, *left),
    )


def _count_start(file: RolloutFile, log: Callable[[str], None]) -> None:
    before, known = file.known.active, file.change(rollout.started)
    if before is not None and before != known.active:
        log(f"bundle {rollout.tag(before)} is rolled back: {known.failed[before.sha256].reason}")


def _sha256(path: Path) -> str:
    """Of the file that the command names, in hex; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
