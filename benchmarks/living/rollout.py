"""The roll-out of a simulated month: signed bundles, an operator who looks at it each evening, and a bad board.

The board's self-test of any bundle that is rolled out ends with SIGSEGV, as a graph may crash ONNX Runtime: a file
`sitecustomize.py`, which Python imports at its start, sees to it in that device's processes alone.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.living.books import Book
from benchmarks.living.parts import ENVIRONMENT, StalledError, command
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.identity.signatures import Signer
from protofleet.edge_client.rollout.rollout_file import read_rollouts

SHIPPED = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
NEW_CLASSES = "mirrored", "upside-down"
PATIENCE_DAYS, STARTS_S = 4, 90.0
_BAD_BOARD = """import os, signal, sys
if "protofleet.edge_client.trials.bundle_trial" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSEGV)
"""


class Signed:
    """The bundle that all begin with, the one with a class more, and the key that signs them and what is published."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        private = Ed25519PrivateKey.from_private_bytes(os.urandom(32))
        self.secret, self.trust = folder / "fleet.key", folder / "fleet.pub"
        self.secret.write_bytes(private.private_bytes_raw())
        self.trust.write_bytes(private.public_key().public_bytes_raw())
        paths = [SHIPPED, folder / "first.bundle", folder / "longer.bundle"]
        for before, after, label in zip(paths, paths[1:], NEW_CLASSES, strict=False):
            told = ("--classes", f"+{label}", "--sign", self.secret, "--out", after, "--quiet")
            command("export", "--extend", before, *told)
        self._keys = folder / "keys"
        self._keys.mkdir()
        self.old, self.new = paths[1:]
        self.bundles = read_bundle(self.old), read_bundle(self.new)

    def key_of(self, device: str) -> Path:
        """The file of a device's own private key, made when it is first asked for."""
        path = self._keys / f"{device}.key"
        if not path.exists():
            path.write_bytes(os.urandom(32))
        return path

    def public_of(self, device: str) -> str:
        """The key that goes with it, in hex."""
        return Signer(self.key_of(device).read_bytes()).public_key.hex()

    def runs_new(self, book: Book) -> bool:
        """Whether a device has the bundle with a class more, for good."""
        known = read_rollouts(book.state)
        return known.active is not None and known.probation is None and self._is_new(known.active.sha256)

    def refused_new(self, book: Book) -> str:
        """Why a device does not take it; empty where it did not say so."""
        found = [each.reason for sha256, each in read_rollouts(book.state).failed.items() if self._is_new(sha256)]
        return found[0] if found else ""

    def _is_new(self, sha256: str) -> bool:
        return sha256 == self.bundles[1].sha256.hex()


def bad_board(folder: Path) -> dict[str, str]:
    """The environment of a device whose self-tests crash."""
    (folder / "board").mkdir()
    (folder / "board" / "sitecustomize.py").write_text(_BAD_BOARD)
    path = [os.fspath(folder / "board"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}


class Operator:
    """Rolls a bundle out, and looks at it each evening.

    Args:
        soak_s: how long a stage lasts at least.
        small: whether one device is more than the share that may fail.
    """

    def __init__(self, store: Path, bundle: Path, soak_s: float, small: bool) -> None:
        self._store, self._bundle, self._soak_s, self._small = store, bundle, soak_s, small
        self._stage = 0.0
        self._since_day = 0
        self.began = False
        self.did: list[str] = []

    def begin(self, day: int) -> None:
        stages = ("50%", "100%") if self._small else ("10%", "50%", "100%")
        options = [word for stage in stages for word in ("--stage", stage)]
        options += ["--soak", f"{self._soak_s:g}s", "--healthy", "50%" if self._small else "90%"]
        until = time.monotonic() + STARTS_S
        while True:
            try:
                self._ask(self._bundle, *options)
                break
            except StalledError as error:  # the aggregator has just been started with it
                if "try the aggregator first" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.5)
        self.began, self._since_day = True, day

    def look(self) -> dict[str, Any]:
        """How far it is, as `--json` tells it."""
        return dict(json.loads(command("rollout", "--store", self._store, "--json", "-", streams=1))["rollout"])

    def evening(self, day: int) -> str:
        """What a careful person does: resumes what halted by itself, and widens by hand what waits for those who do
        not come; how far it is, in words."""
        if not self.began:
            return ""
        found = self.look()
        if found["fraction"] != self._stage:
            self._stage, self._since_day = found["fraction"], day
        if found["state"] == "halted":
            self._ask("--resume")
        elif found["stages"] and day - self._since_day >= PATIENCE_DAYS:
            self._ask("--stage", f"{100 * found['stages'][0]:g}%")
        return f"{found['state']} at {found['fraction']:.0%}, {found['counts']['healthy']} healthy"

    def finish(self) -> None:
        """Offer it to all."""
        found = self.look()
        if found["state"] == "halted":
            self._ask("--resume")
        if found["fraction"] < 1.0:
            self._ask("--stage", "100%")

    def _ask(self, *words: object) -> None:
        command("rollout", *words, "--store", self._store, "--wait", "60")
        self.did.append(" ".join("BUNDLE" if isinstance(word, Path) else str(word) for word in words))
