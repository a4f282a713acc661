"""Puts the parts of each kind of coordinator together, and checks that settings, bundle and store fit the kind.

rounds_of        contributions are merged when a round closes, or a helper opens their sum
standing_sums    no rounds
coordinator_of   the one that the settings ask for
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from protofleet.aggregator.blinded.blinded_rounds import BlindedRounds
from protofleet.aggregator.closing.late_contributions import LateContributions
from protofleet.aggregator.closing.open_rounds import OpenRounds
from protofleet.aggregator.closing.round_books import RoundBooks
from protofleet.aggregator.closing.round_results import MergedResults
from protofleet.aggregator.coordinators.coordinator import AtOnce, Coordinator
from protofleet.aggregator.coordinators.round_coordinator import SETTLE_S, RoundCoordinator
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.rounds.round_machine import Rounds, plan
from protofleet.aggregator.settings import (
    Settings,
    check_gateways,
    check_heads,
    check_limit,
    own_method,
    standing_method,
)
from protofleet.aggregator.standing.standing_heads import SolvedHeads
from protofleet.aggregator.standing.standing_notices import StandingNotices
from protofleet.aggregator.standing.standing_sums import Keeper, OneKeeper, StandingSums
from protofleet.aggregator.store.blinded_tables import check_open_round
from protofleet.aggregator.store.durable_store import Store, as_written
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import check_rule

__all__ = [
    "MAX_SAMPLES",
    "Keep",
    "coordinator_of",
    "planned",
    "round_books",
    "rounds_of",
    "standing_sums",
    "sums_of",
]

MAX_SAMPLES = 10_000_000  # of one device: its sums stay far below `protofleet.contract.sums.fixed_point.LARGEST`

Keep = Callable[[StandingSums, Callable[[], float]], Keeper]
"""Makes who commits, of sums and of a clock of seconds since the epoch."""


def coordinator_of(
    store: Store, manifest: Manifest, bundle: bytes, settings: Settings, *, keep: Keep = OneKeeper, **about: Any
) -> Coordinator:
    """The coordinator that the settings ask for.

    Args:
        keep: of standing sums, where several processes take contributions.
        about: `now`, `others` and `shorter`, as of `Parts.of`.

    Raises:
        UsageError: settings, bundle and store do not fit each other.
    """
    if not settings.standing:
        return rounds_of(store, manifest, bundle, settings, wall=time.time(), **about)
    others = about.pop("others", ())
    if others:
        got = f"{1 + len(others)}"
        raise UsageError("--standing", expected="one extractor", got=got, hint="one fleet for each")
    return standing_sums(store, manifest, bundle, settings, keep=keep, **about)


def rounds_of(
    store: Store,
    manifest: Manifest,
    bundle: bytes,
    settings: Settings,
    *,
    now: float,
    others: tuple[bytes, ...] = (),
    shorter: Mapping[bytes, int] | None = None,
    wall: float | None = None,
) -> RoundCoordinator:
    """Rounds whose contributions are merged, or whose sums a helper opens if the settings name one.

    Args:
        manifest, bundle, others, shorter, now: as of `Parts.of`.
        wall: seconds since the epoch, to know how long ago a round was opened; None as if it was opened just now.

    Raises:
        UsageError: settings, bundle and store do not fit each other.
    """
    methods = planned(store, manifest, settings, others, shorter)
    parts = Parts.of(store, manifest, bundle, settings, now=now, others=others, shorter=shorter)
    machine, key = Rounds(methods, settings.policy, always=settings.gateway), settings.helper
    late = None if key is None else LateContributions(0)  # a share is of its round
    books = round_books(parts, machine, late, now=now, wall=wall)
    results, blinded = MergedResults(books), None if key is None else BlindedRounds(books, key)
    return RoundCoordinator(books, blinded or OpenRounds(books, results), results, AtOnce(), blinded)


def standing_sums(
    store: Store,
    manifest: Manifest,
    bundle: bytes,
    settings: Settings,
    *,
    now: float,
    shorter: Mapping[bytes, int] | None = None,
    wall: Callable[[], float] = time.time,
    keep: Keep = OneKeeper,
) -> StandingCoordinator:
    """Sums that stand.

    Args:
        settings: with `standing`.
        manifest, bundle, shorter, now: as of `Parts.of`.
        wall: gives seconds since the epoch, to record when something came.
        keep: makes who commits.

    Raises:
        UsageError: the settings do not fit the bundle, or the store is of rounds or of another method.
        StoreError: the store holds rows that no aggregator wrote.
    """
    sums = sums_of(store, manifest, bundle, settings, now=now, shorter=shorter)
    keeper = keep(sums, wall)
    keeper.begin(now)
    notices = StandingNotices(sums.parts, sums.method.name, keeper.mark_of)
    return StandingCoordinator(sums, keeper, SolvedHeads(sums), notices, AtOnce())


def planned(
    store: Store,
    manifest: Manifest,
    settings: Settings,
    others: tuple[bytes, ...] = (),
    shorter: Mapping[bytes, int] | None = None,
) -> tuple[str, ...]:
    """The methods of the rounds that are asked for, in order.

    Raises:
        UsageError: settings, bundle and store do not fit them.
    """
    mode = store.meta.get("standing")
    if mode is not None:
        raise UsageError(
            "this store", expected="one of rounds, or a new one", got=f"standing sums of {mode}", hint="--standing"
        )
    first = method_of(own_method(manifest, settings))
    rounds = first.rounds if settings.rounds is None else settings.rounds
    calibrates = not (others or shorter) if settings.calibrate is None else settings.calibrate
    methods = plan(first.name, rounds, calibrates)
    shared = next((m for m in map(method_of, methods) if m.extractor == "bundle"), None)
    if others and shared is not None:
        raise UsageError(
            f"a round of {shared.title}",
            expected="one backbone",
            got=f"{1 + len(others)} bundles",
            hint="--no-calibrate",
        )
    check_heads(settings, methods)
    check_rule(settings.rule, method_of(methods[0]).statistic)
    check_limit(manifest, settings)
    check_gateways(settings, manifest, methods)
    return methods


def round_books(
    parts: Parts, rounds: Rounds, late: LateContributions | None = None, *, now: float, wall: float | None
) -> RoundBooks:
    """The books of a machine that has not begun, as the store was left.

    Args:
        now, wall: as of `rounds_of`.

    Raises:
        UsageError: the store's open round is blinded and these are not, or the other way round.
        StoreError: the store holds what no aggregator wrote.
    """
    store, books = parts.store, RoundBooks(parts, rounds, late)
    for last in books.newest_round():
        rounds.resume(
            last.number,
            last.method,
            last.seed,
            contributions=None if last.closed else list(last.uplink_bytes),
            refused=store.refusals(last.number),
            now=now,
            settle_s=SETTLE_S,
            age_s=0.0 if wall is None else wall - last.opened_at,
        )
        if store.closing() == last.number and not last.closed:
            rounds.hold()
    with as_written(store.standing.path):
        check_open_round(store.blinded, rounds, blinded=parts.terms.settings.helper is not None)
    return books


def sums_of(
    store: Store,
    manifest: Manifest,
    bundle: bytes,
    settings: Settings,
    *,
    now: float,
    shorter: Mapping[bytes, int] | None = None,
) -> StandingSums:
    """What stands, before it is added up; arguments and errors as of `standing_sums`."""
    method = standing_method(manifest, settings)
    check_heads(settings, (method.name,))
    check_limit(manifest, settings)
    if settings.max_samples > MAX_SAMPLES:
        raise UsageError("--max-samples", expected=f"at most {MAX_SAMPLES:,} with --standing", got=settings.max_samples)
    parts = Parts.of(store, manifest, bundle, settings, now=now, shorter=shorter)
    _claim(store, method.name)
    return StandingSums(parts, method, settings.standing_every_s)


def _claim(store: Store, method: str) -> None:
    """A store has rounds or standing sums, of one method, and never both."""
    stored, rounds = store.meta.get("standing"), store.last_round()
    if stored != method and (stored is not None or rounds):
        raise UsageError(
            "--standing",
            expected=f"a store of standing sums of {method}, or a new one",
            got=f"one of {stored}" if stored else f"one with {rounds} rounds",
            hint="another --store",
        )
    if stored is None:
        store.meta.put("standing", method)
