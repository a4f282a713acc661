"""The accountant: what the noise that a method adds to its contributions (`contract/mechanism.py`) has cost so far.

Features are clipped to norm ζ, and a class mean over n samples has noise of deviation 2ζσ/n. Through a network that has
never seen the samples, a replaced one would move one class mean by at most 2ζ/n: so the paper counts. But the network
was trained on them, and one sample moves every feature of every class. All that then holds is that a mean has norm ζ at
most: each of the class means moves by 2ζ at most, n/σ deviations. A round is a Gaussian release of noise multiplier
σ/√(Σ n²) for the features, the sum over classes, and another for the soft predictions; k of them compose exactly to one
of σ over the root of all their Σ n² together, each round with the samples that it had. Which class a sample is of, and
how many each has, is not hidden. See docs/decisions/095. Source: FedHKD (Chen, Wang, Vikalo, ICLR 2023), section 3,
which noises the features alone; Balle and Wang, ICML 2018, for ε(δ).

The noise comes from a secret that never leaves the device (`edge_client/local.py`): a round that is repeated after a
crash gives the same bytes, and who knows the device's name and the round cannot subtract it.

ε holds only for what was noised. With a budget, a round that adds no noise (FFC's sums, above all) is refused, and so
is a state directory that ever released anything without; without a budget such a round takes place, and from then on
no ε is stated.

The accountant is `dp-accounting`. It draws in 80 MB of libraries, so it runs in a process of its own, once at the
start. Run as `python -m edge_client.privacy`, this module is that process.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from contract.errors import PrivacyError, UsageError
from contract.mechanism import Mechanism
from contract.terminal import counted

__all__ = ["Accountant", "cost_of"]

_ROUNDS_AT_ONCE = 200  # 2 ms each
_TIMEOUT_S = 300.0
_HINT = "pip install 'protofleet[privacy]'"


class Accountant:
    """What k rounds cost, and whether there may be another.

    Args:
        mechanism: with noise.
        delta: δ.
        budget: the largest ε the device may come to, or None.
        rounds: done before, with noise.
        method: the one whose rounds add noise.
        counts: (C,) samples of each class.
        earlier: what the noised rounds before cost, all together; None where they had these samples, too.
        bare: rounds done before without noise.

    Attributes:
        cost: of a round with these samples, for the journal; costs of rounds add up.

    Raises:
        UsageError: `dp-accounting` is not installed, or there is a budget and the mechanism does not noise everything.
        PrivacyError: there is a budget, and something was released without noise before.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        delta: float,
        budget: float | None,
        rounds: int,
        *,
        method: str,
        counts: NDArray[np.integer],
        earlier: float | None = None,
        bare: int = 0,
    ) -> None:
        open_part = mechanism.release(counts).bare
        if budget is not None and open_part:
            raise UsageError(
                f"--epsilon {budget:g}",
                expected="a bundle that adds noise to all that it sends",
                got=f"one whose {' and '.join(open_part)} go out as they are",
            )
        if budget is not None and bare:  # perhaps still in the outbox, to be sent before any round
            raise PrivacyError(
                f"--epsilon {budget:g} cannot hold",
                expected="a state directory from which nothing was released without noise",
                got=f"{bare} such rounds",
                hint="a new --state, which counts from now on, or no --epsilon",
            )
        self._mechanism, self._delta, self._budget = mechanism, delta, budget
        self._rounds, self._method, self._bare = rounds, method, bare
        self._noised_all, self.cost = not open_part, cost_of(mechanism, counts)
        self._done = rounds * self.cost if earlier is None else earlier
        self._first, self._table = rounds, self._epsilons()

    def hold(self, counts: NDArray[np.integer]) -> None:
        """From now on the device has these many samples of each class (C,)."""
        found = cost_of(self._mechanism, counts)
        if found != self.cost:
            self.cost = found
            self._first, self._table = self._rounds, self._epsilons()

    def epsilon(self, more: int = 0) -> float:
        """ε at δ of the noised rounds done so far and `more`; 0 before the first. Holds only where `holds` says so."""
        index = self._rounds + more - self._first
        if index >= len(self._table):
            self._first, self._table = self._rounds, self._epsilons()
            index = more
        return self._table[index]

    @property
    def holds(self) -> bool:
        """Whether ε covers all that was released: nothing went out without noise."""
        return self._noised_all and not self._bare

    def check(self, method: str) -> None:
        """Refuse a round that the budget does not allow: without noise, or one too many.

        Raises:
            PrivacyError: one line; the device's contributions so far stand.
        """
        if self._budget is None:
            return
        if method != self._method:
            raise PrivacyError(
                f"--epsilon {self._budget:g}: nothing is released without noise",
                expected=f"a round of {self._method}, which adds it",
                got=f"a round of {method}, which adds none",
                hint="aggregate --no-calibrate, or this client without --epsilon",
            )
        if self.epsilon(1) > self._budget:
            raise PrivacyError(
                f"the privacy budget is spent: ε = {self.epsilon():.3g}, δ = {self._delta:g}, "
                + counted(self._rounds, "round"),
                expected=f"at most ε = {self._budget:g}",
                got=f"{self.epsilon(1):.3g} with another round",
                hint="more noise in a new bundle, or a larger --epsilon",
            )

    def facts(self) -> dict[str, float | int | None]:
        """What `--json` says of it; `epsilon` is null where none holds."""
        return {
            "epsilon": self.epsilon() if self.holds else None,
            "delta": self._delta,
            "budget": self._budget,
            "rounds": self._rounds,
            "rounds_without_noise": self._bare,
        }

    def check_standing(self) -> None:
        """Refuse sums that stand, which are sent anew without an end and carry no noise.

        Raises:
            PrivacyError: always; nothing was sent.
        """
        raise PrivacyError(
            "the fleet's sums stand",
            expected=f"rounds of {self._method}, each of which costs its ε",
            got="sums without noise, sent anew whenever photos change",
            hint="a fleet with rounds, or a bundle without noise",
        )

    def count(self, method: str) -> None:
        """A round of `method` was done."""
        if method == self._method:
            self._rounds += 1
            self._done += self.cost
        else:
            self._bare += 1

    def told(self) -> str:
        """What all rounds so far have cost, for a person."""
        if self._bare:
            return f"no ε holds: without noise went out {counted(self._bare, 'round')}"
        if not self.holds:
            return "no ε holds: some of what is sent has no noise"
        of = "" if self._budget is None else f" of {self._budget:g}"
        return f"ε = {self.epsilon():.3g}{of} at δ = {self._delta:g} after {counted(self._rounds, 'round')}"

    def _epsilons(self) -> list[float]:
        """ε after the rounds so far, and after each further one."""
        return _table([self._delta, self._done, self.cost])


def cost_of(mechanism: Mechanism, counts: NDArray[np.integer]) -> float:
    """What a release over these samples of each class (C,) weighs in ε: 1/m² of its noise multiplier m."""
    return mechanism.release(counts).multiplier ** -2.0


def _table(numbers: list[float]) -> list[float]:
    """What this module's own process answers to: δ, the cost of all releases so far, and of each further one."""
    command = [sys.executable, "-m", "edge_client.privacy", json.dumps(numbers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return [float(value) for value in json.loads(done.stdout)]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise UsageError("the privacy accountant", expected="dp-accounting", got=last, hint=_HINT) from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError("the privacy accountant", expected="a table of ε", got=error) from None


def _main(arguments: list[str]) -> int:
    from dp_accounting import get_epsilon_gaussian

    delta, done, each = json.loads(arguments[0])
    sums = [done + further * each for further in range(_ROUNDS_AT_ONCE)]
    table = [get_epsilon_gaussian(1.0 / math.sqrt(cost), delta) if cost else 0.0 for cost in sums]
    print(json.dumps(table))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
