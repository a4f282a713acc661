"""Makes the head of a finished round again from its store, with another ridge or in another form.

A store keeps the contributions of the last closed round of each method (docs/decisions/085). Sums do not depend on the
head that is made of them. So the aggregator's part can be repeated: the same devices are left out or count for less,
the same sums are merged, and the method makes its rows with the requested hyper-parameters.

The store is only read: its aggregator may be running, and the fleet's state is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from protofleet.aggregator.database import AnyPlace, place_of
from protofleet.aggregator.merging.merge_round import merge_round, traits_of
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.store.stored_run import StoredRun, stored_run
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHODS, Method, Value, closing_method
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["SolvedAgain", "solve_again"]


@dataclass(frozen=True, eq=False)
class SolvedAgain:
    """What came of it.

    Attributes:
        state: the store's newest global state, with the round's rows made again.
        method: of the round.
        round: its number.
        told: what was chosen, in words.
        doubt: why it may be bad; empty where nothing speaks against it.
    """

    state: GlobalState
    method: Method
    round: int
    told: str
    doubt: str


def solve_again(path: AnyPlace, manifest: Manifest, wanted: Mapping[str, object]) -> SolvedAgain:
    """Make the head of the newest round that has one again.

    Args:
        path: an aggregator's store.
        manifest: of the fleet's bundle.
        wanted: hyper-parameters of `Method.solved_with` that are taken instead of the bundle's.

    Raises:
        MethodError: a value is out of range.
        StoreError, UsageError: the store cannot be read, or holds nothing that this can be made of.
    """
    able = {name: method for name, method in METHODS.items() if wanted and set(wanted) <= set(method.solved_with)}
    with stored_run(path) as run:
        number, method = _round(run, able, str(place_of(path)))
        settled = {name: method.hyper[name].check(f"--{name}", value) for name, value in wanted.items()}
        hyper: dict[str, Value] = method.resolved_in({**manifest.hyper, **settled})

        messages = lambda: run.contributions(number, method.name)  # noqa: E731
        width, screening = method.row_width(hyper, manifest.features), run.screening(method.name)
        traits = traits_of(method, messages, hyper)
        result = merge_round(
            method,
            messages,
            traits,
            hyper,
            classes=manifest.classes,
            width=width,
            how=screening,
        )
        before = run.state()
        state = next_global(before, method, result.merged, round=before.round, hyper=hyper)
    return SolvedAgain(replace(state, version=before.version), method, number, result.told, result.doubt)


def _round(run: StoredRun, able: Mapping[str, Method], path: str) -> tuple[int, Method]:
    """The newest closed round of one of these methods whose contributions are kept."""
    closed = run.closed_rounds()
    for number, name, kept in reversed(closed):
        if name in able and kept:
            return number, able[name]
    names = {name for _, name, _ in closed}
    got = f"rounds of {', '.join(sorted(names))}" if names else "no closed round"
    raise UsageError(
        f"--store {path}",
        expected=f"the sums of a closed round of {' or '.join(able) or 'a method that solves with these'}",
        got=f"{got} whose contributions were dropped" if names & set(able) else got,
        hint=f"aggregate --method {[closing_method().name, *able][-1]}",
    )
