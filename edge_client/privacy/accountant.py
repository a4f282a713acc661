"""The accountant: the ε that the releases of a device come to, by the ledger (`edge_client/privacy/ledger.py`).

A mechanism says what one release costs (`contract/privacy/mechanism.py`), as two Gaussian noise multipliers: one for
data sets of which one has a sample more, and one for data sets that differ in one replaced sample.

Releases with multipliers m₁, m₂, … are together exactly one release with multiplier (Σ m⁻²)^(−1/2). This holds for any
releases, also if one follows from those before. The ledger keeps Σ m⁻². ε at δ is that of the analytic Gaussian
mechanism (Balle and Wang, ICML 2018).

FedHKD trains its network on the same samples that its rounds sum. docs/decisions/095 has the cost of its rounds: a
multiplier of σ/√(2 Σ n²) for one sample that is replaced by another of its class, and none for one sample more or
fewer.

`dp-accounting` computes ε. It loads 80 MB of libraries, so it runs in a process of its own, for the releases so far and
two hundred further ones at a time. This module is that process when it is run as `python -m
protofleet.edge_client.privacy.accountant`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.privacy.mechanism import Mechanism
from protofleet.edge_client.privacy.ledger import Cost

__all__ = ["Accountant", "cost_of"]

_AHEAD = 200  # releases; 4 ms each
_TIMEOUT_S = 300.0
_LEAST = 1e-6  # of multipliers; ε is above 10¹¹ there
_ROUNDED_UP = 1.0 + 1e-6  # so that sums that differ in their last bits are one, and never one that is too small


class Accountant:
    """ε at one δ."""

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self._known: dict[str, float] = {_name(0.0): 0.0}

    def epsilon(self, cost: float) -> float:
        """ε of releases of this cost Σ m⁻² together, rounded up in its sixth digit.

        Raises:
            UsageError: `dp-accounting` is not installed, or failed.
        """
        if _name(cost) not in self._known:
            self._compute([cost])
        return self._known[_name(cost)]

    def look_ahead(self, sums: Iterable[tuple[float, float]]) -> None:
        """Compute the ε of these sums, and of further releases, all at once, unless the next one is known.

        Args:
            sums: pairs of Σ m⁻² so far, and what a release adds to it.

        Raises:
            UsageError: as `epsilon`.
        """
        wanted = []
        for cost, added in sums:
            if _name(cost) not in self._known or _name(cost + added) not in self._known:
                wanted += [cost + further * added for further in range(_AHEAD if added else 1)]
        if wanted:
            self._compute(wanted)

    def _compute(self, costs: list[float]) -> None:
        self._known |= zip(map(_name, costs), _epsilons(self.delta, costs), strict=True)


def cost_of(mechanism: Mechanism | None, counts: NDArray[np.integer]) -> Cost:
    """What one release costs a device with `counts` (C,) samples of each class.

    No ε holds without noise, or where a part of the release goes out without noise.
    """
    release = None if mechanism is None else mechanism.release(counts)
    if release is None or not release.covers_all:
        return Cost()
    return Cost(_squared(release.add_remove), _squared(release.replace))


def _squared(multiplier: float | None) -> float | None:
    """The squared inverse of a multiplier; None where nothing holds, or as good as nothing."""
    if multiplier is None or not multiplier >= _LEAST:
        return None
    return float(multiplier) ** -2


def _name(cost: float) -> str:
    return f"{cost:.8e}"


def _epsilons(delta: float, costs: Sequence[float]) -> list[float]:
    """What this module's own process answers."""
    command = [sys.executable, "-m", "protofleet.edge_client.privacy.accountant", json.dumps([delta, *costs])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return [float(value) for value in json.loads(done.stdout)]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise UsageError(
            "the privacy accountant", expected="dp-accounting", got=last, hint=install_command("privacy")
        ) from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError("the privacy accountant", expected="a table of ε", got=error) from None


def _main(arguments: list[str]) -> int:
    from dp_accounting import get_epsilon_gaussian

    delta, *costs = json.loads(arguments[0])
    print(json.dumps([get_epsilon_gaussian((cost * _ROUNDED_UP) ** -0.5, delta) if cost else 0.0 for cost in costs]))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
