"""Which bundle a start runs with, and in which directory: the file that the command names, or a roll-out's.

The record of roll-outs decides (`rollout_decisions.py`):

- The bundle that the record names runs instead of the command's file. It lies in `bundles/`. It may be of another fleet
  than the command's; then it has a directory of its own.
- If the recorded bundle is missing there, the command's file is used if it is the same bundle.
- If the command names another file, one that no roll-out replaced and whose version is not older, a person decided
  that. It runs as it would without roll-outs.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import BundleError
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle, Rollouts
from protofleet.edge_client.rollout.rollout_file import RolloutFile, bundle_file
from protofleet.edge_client.rollout.rollout_work import RolloutTerms
from protofleet.edge_client.settings import ClientSettings

__all__ = ["ActiveBundle", "find_active_bundle"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActiveBundle:
    """A bundle that is to run.

    Attributes:
        settings: the command's, with the fleet that the bundle is of.
        path: where its file lies.
        directory: of the journal.
        known: what is remembered once it runs.
        extends: sha256 of bundles whose state it goes on with.
    """

    settings: ClientSettings
    installed: InstalledBundle
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
            bundle_path=self.path.resolve(),
        )

    def runs(self, file: RolloutFile) -> None:
        """Remember that this bundle runs: its files are read, and the journal is its own.

        Raises:
            StoreError: the disk refused.
        """
        known = self.known
        if known.probation is None and self.terms.public_keys:
            known = rollout_decisions.proved(known, self.installed)
        file.put(known)


def find_active_bundle(
    settings: ClientSettings,
    file: RolloutFile,
    keys: tuple[bytes, ...],
    *,
    starts: bool = True,
    budget: bool = False,
) -> ActiveBundle:
    """Choose the bundle, and read it.

    A start on probation is counted. One too many brings back the bundle of before.

    Args:
        keys: that are trusted; none where the signature is not checked.
        starts: whether a client starts.
        budget: whether the owner's policy has an ε.

    Raises:
        BundleError: it cannot be read, or is signed by none of these keys.
        UsageError: a key is trusted, and the named file is older than what has run here.
        StoreError: the disk refuses.
    """
    path = Path(settings.bundle)
    sha256 = "" if file.known.active is None else _sha256(path)
    if starts and rollout_decisions.instead(file.known, sha256, settings.fleet) is not None:
        _count_start(file)
        file.tidy(file.known.fetching)
    known = file.known
    installed = rollout_decisions.instead(known, sha256, settings.fleet)
    if installed is None:
        bundle = read_bundle(path, public_key=keys or None)
        named = InstalledBundle(bundle.sha256.hex(), bundle.manifest.version, settings.fleet)
        known, installed = rollout_decisions.given(known, named, trusts=bool(keys), where=str(path))
    else:
        kept = bundle_file(file.state, installed.sha256)
        path = path if sha256 == installed.sha256 and not kept.is_file() else kept
        try:
            bundle = read_bundle(path, public_key=keys or None)
        except BundleError as error:
            if known.probation is None:
                raise
            logger.warning(str(error))
            file.change(rollout_decisions.rolled_back, "its file cannot be read")
            return find_active_bundle(settings, file, keys, starts=starts, budget=budget)
        if path == kept:
            logger.info(f"bundle {rollout_decisions.tag(installed)} of a roll-out runs in place of {settings.bundle}")
    left = [bytes.fromhex(sha256) for sha256, failure in known.failed.items() if failure.back_to == installed.sha256]
    return ActiveBundle(
        settings=replace(settings, fleet=installed.fleet),
        installed=installed,
        bundle=bundle,
        path=path,
        directory=file.state / installed.directory,
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


def _count_start(file: RolloutFile) -> None:
    before, known = file.known.active, file.change(rollout_decisions.started)
    if before is not None and before != known.active:
        logger.warning(f"bundle {rollout_decisions.tag(before)} is rolled back: {known.failed[before.sha256].reason}")


def _sha256(path: Path) -> str:
    """Of the file that the command names, in hex; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
