"""What is known beside a bundle, and what is new of it: read from a device's state directory while its client runs.

`Knowledge.of_state` reads all of it in one look, so that weights, class means and global state belong together.
`Following` looks again, cheaply, whether there is something newer, and reads it only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from protofleet.contract.bundle.bundle_file import Bundle, Manifest, read_bundle
from protofleet.contract.errors import BundleError, UsageError
from protofleet.contract.files.sqlite import Watch
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.device.calibration import Known
from protofleet.edge_client.device.left_out import LeftOut
from protofleet.edge_client.journal.journal import FILE, Kept, read_kept
from protofleet.edge_client.rollout.rollout_file import FILE as RECORD
from protofleet.edge_client.rollout.rollout_file import answering, read_rollouts
from protofleet.edge_client.training.local_samples import OwnMeans
from protofleet.edge_client.training.trainer import Weights, check_weights

__all__ = ["Following", "Knowledge", "follow_state"]

Mark = tuple[bytes, int, int, bytes, LeftOut | None, Known]
"""Run and version of the global state, rounds done, a bundle that came, why the device answers by itself, and what
probabilities follow from."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What is known beside the bundle.

    Attributes:
        weights: what training has changed, by name; empty where nothing was trained.
        means: of the device's own classes under these weights.
        state: the newest global state.
        rounds: how many this device has done.
        bundle: the bundle that replaces the one before, where the device has changed to one that extends it.
        alone: set where a round left the device out, and its own head or the joint head is the better one on its own
            photos.
        own: the global state of that head, where the device answers by it.
        calibration: what probabilities follow from.
    """

    weights: Weights = field(default_factory=dict)
    means: OwnMeans | None = None
    state: GlobalState | None = None
    rounds: int = 0
    bundle: Bundle | None = None
    alone: LeftOut | None = None
    own: GlobalState | None = None
    calibration: Known = field(default_factory=Known)

    @property
    def mark(self) -> Mark:
        """What differs where anything does."""
        bundle = b"" if self.bundle is None else self.bundle.sha256
        run, version = (b"", 0) if self.state is None else (self.state.run, self.state.version)
        return run, version, self.rounds, bundle, self.alone, self.calibration

    @classmethod
    def of_state(cls, directory: Path, bundle: Path | None = None) -> tuple[Bundle, Knowledge, Path]:
        """What a device of this state directory knows, its bundle, and where that lies; its client may be running.

        Args:
            bundle: where the bundle lies; None for where it lay when the device last started.

        Raises:
            StoreError: there is no state that can be read.
            UsageError: the bundle is not known, or another one.
            BundleError: it cannot be read.
        """
        directory = answering(directory)
        kept = read_kept(directory)
        path = bundle or kept.bundle_path
        if path is None or not path.is_file():
            raise UsageError(
                f"the bundle of {directory}", expected="its file", got=path or "none", hint="--bundle FILE"
            )
        loaded = read_bundle(path)
        return loaded, cls.of_kept(kept, loaded, f"{directory} is of another bundle than {path}"), path

    @classmethod
    def of_kept(cls, kept: Kept, bundle: Bundle, otherwise: str) -> Knowledge:
        """The knowledge in what was read from a state directory before.

        Raises:
            UsageError: it is of another bundle; `otherwise` is the error's text.
            BundleError: it says that it is of this bundle, and does not fit.
        """
        if kept.bundle not in (bundle.sha256, *bundle.manifest.extended):
            raise UsageError(
                otherwise,
                expected=f"sha256 {kept.bundle.hex()[:12]}…",
                got=f"{bundle.sha256.hex()[:12]}…",
                hint="the bundle that the device has",
            )
        _check_kept(kept, bundle.manifest)
        left_out = kept.left_out
        alone = left_out if left_out is not None and left_out.leaves_fleet else None
        return cls(
            kept.weights, kept.means, kept.state, kept.rounds, alone=alone, own=kept.own, calibration=kept.calibration
        )


class Watches(Protocol):
    """See `protofleet.contract.files.sqlite.Watch`."""

    def changed(self) -> bool: ...


class Following:
    """Finds out what is newer than what is known.

    Args:
        watch: says whether anything was written to the source since the last look.
        read: reads the source. If it raises one of our errors, the next change is looked at again.
        known: what was read before.
    """

    def __init__(self, watch: Watches, read: Callable[[], Knowledge], known: Knowledge) -> None:
        self._watch, self._read, self._mark = watch, read, known.mark

    def __call__(self) -> Knowledge | None:
        """Something newer, if there is any: a look takes microseconds where nothing was written.

        Raises:
            ProtofleetError: something was written, and cannot be used.
        """
        if not self._watch.changed():
            return None
        newer = self._read()
        if newer.mark == self._mark:
            return None
        self._mark = newer.mark
        return newer


def follow_state(directory: Path, bundle: Bundle, known: Knowledge) -> Callable[[], Knowledge | None]:
    """What the client of this state directory learns from now on.

    It is followed to a bundle that extends this one. It is also followed to another fleet that a roll-out took the
    client to, once it has a global state there.
    """
    return _FollowingState(directory, bundle, known)


class _FollowingState:
    """One directory after another, as a roll-out changes them."""

    def __init__(self, directory: Path, bundle: Bundle, known: Knowledge) -> None:
        self._directory, self._now = directory, bundle
        self._where = answering(directory)
        self._following = self._followed(self._where, bundle, known)
        self._record = Watch(directory / RECORD)
        self._next: Watch | None = None  # of the journal that is to answer once it has a global state
        self._look_ahead()

    def __call__(self) -> Knowledge | None:
        """Something newer, if there is any.

        Raises:
            ProtofleetError: something was written, and cannot be used.
        """
        if self._record.changed() or (self._next is not None and self._next.changed()):
            self._look_ahead()
            where = answering(self._directory)
            if where != self._where:
                return self._switched_to(where)
        return self._following()

    def _switched_to(self, where: Path) -> Knowledge:
        bundle, known, _ = Knowledge.of_state(self._directory)
        self._where, self._following = where, self._followed(where, bundle, known)
        return replace(known, bundle=bundle)

    def _look_ahead(self) -> None:
        active = read_rollouts(self._directory).active
        path = self._where if active is None else self._directory / active.directory
        if self._next is not None:
            self._next.close()
        self._next = None if path == self._where else Watch(path / FILE)

    def _followed(self, where: Path, bundle: Bundle, known: Knowledge) -> Following:
        otherwise, first, now = f"{where} is of another bundle now", self._now, bundle

        def read() -> Knowledge:
            nonlocal now
            kept = read_kept(where)
            now = _successor(kept, now)
            knowledge = Knowledge.of_kept(kept, now, otherwise)
            return knowledge if now is first else replace(knowledge, bundle=now)

        return Following(Watch(where / FILE), read, known)


def _successor(kept: Kept, bundle: Bundle) -> Bundle:
    """The bundle that the device has now, where that extends this one; else this one."""
    if kept.bundle == bundle.sha256 or kept.bundle_path is None or not kept.bundle_path.is_file():
        return bundle
    successor = read_bundle(kept.bundle_path)
    return successor if successor.sha256 == kept.bundle and bundle.sha256 in successor.manifest.extended else bundle


def _check_kept(kept: Kept, m: Manifest) -> None:
    """That what a state directory says it keeps is of its bundle."""
    check_weights(kept.weights, m)
    means = kept.means
    if means is not None and (means.classes.sums.shape, means.spread.shape) != ((m.classes, m.features), (m.classes,)):
        raise BundleError(
            "device state", expected="the bundle's classes and width", got="others", hint="another --state"
        )
