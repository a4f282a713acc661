"""Answers inside a program: what `protofleet predict` does, on arrays in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from contract.bundle import Bundle, read_bundle
from contract.errors import UsageError
from contract.state import GlobalState
from edge_client import predictor
from edge_client.data.learned import LearnedFile, Outcome, example_of
from edge_client.knowledge import Following, Knowledge, follow_state
from edge_client.provider_trials import settle_providers

if TYPE_CHECKING:
    from aggregator.solve_again import SolvedAgain

__all__ = ["Predictor"]

Source = str | os.PathLike[str]
Image = str | os.PathLike[str] | bytes | NDArray[Any]


class Predictor(predictor.Predictor):
    """Answers about images: `predictor(images)` takes uint8 (N, H, W, c) and gives labels, scores, and what is unknown.

    Args:
        source: a device's state directory, or a bundle.
        bundle: where a state directory's bundle lies, if not where the device had it.
        store: an aggregator's store, a file or `postgresql://…`, whose newest global state is taken.
        way: the way of answering by name; None for the method's own, or the best there is.
        solve: make the head of the store's sums again, by other hyper-parameters: `{"ridge": 0.3}`, say, or
            `{"form": "discriminant"}`. `solved` then says what came of it.
        threads: within an operator.
        threshold: an image whose novelty is larger is unknown; None for what the fleet's statistics say.
        provider: where the graph runs: auto, cpu, xnnpack, cuda or tensorrt. `auto` takes the fastest of those that
            were tried with this bundle; what came of it is remembered in the state directory.
        follow: take up what the client of the state directory, or the aggregator of the store, comes to know while this
            runs, before each batch of answers.
        log: takes a line when something new is taken up or cannot be, and when another provider than the CPU fails.

    Attributes:
        runs_on: which provider, and why, in one line.

    Raises:
        ProtofleetError: no state, another bundle, nothing to answer with; one line says what to do.
    """

    def __init__(
        self,
        source: Source,
        *,
        bundle: Source | None = None,
        store: Source | None = None,
        way: str | None = None,
        solve: Mapping[str, object] | None = None,
        threads: int = 1,
        threshold: float | None = None,
        provider: str = "auto",
        follow: bool = True,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        found, known, path = _read(Path(source), None if bundle is None else Path(bundle))
        self.solved: SolvedAgain | None = None
        if solve:
            self.solved = _solved(store, found, solve, way)
            known, way = replace(known, state=self.solved.state, alone=None), self.solved.method.way
        elif store is not None:
            known = replace(known, state=_state_of(store, found), alone=None, own=None)
        state = Path(source) if Path(source).is_dir() else None
        providers = settle_providers(found, path, wanted=provider, threads=threads, state=state, log=log)
        self.runs_on = providers.choice.words
        newer = _newer(state, store, found, known) if follow and not solve else None
        options: dict[str, Any] = {"way": way, "threads": threads, "threshold": threshold, "providers": providers}
        super().__init__(found, known, newer=newer, log=log, **options)
        self._state = state

    def learn(self, image: Image, label: str) -> Outcome:
        """Add an example to this device's own data: its next contribution holds it. It is on the disk on return.

        Args:
            image: a file by its path or bytes, or an array (H, W, c) uint8 of the bundle's shape.
            label: a class of the bundle's.

        Returns:
            `learned`; `known`, where it was learned before; `corrected`, where it was, with another label.

        Raises:
            ProtofleetError: this is no predictor of a state directory, no such class, an image that cannot be read, or
                a disk that refuses.
        """
        return self._learned_file().learn(example_of(image, self.bundle.manifest), label)

    def unlearn(self, image: Image) -> str:
        """Take an example out of this device's data again; gives the label that it had.

        Raises:
            ProtofleetError: as `learn`, and where it was not learned.
        """
        return self._learned_file().unlearn(example_of(image, self.bundle.manifest))

    def _learned_file(self) -> LearnedFile:
        if self._state is None:
            raise UsageError(
                "learning", expected="a predictor of a device's state directory", got="one of a bundle alone",
                hint='Predictor("state/")',
            )  # fmt: skip
        return LearnedFile(self._state, self.labels)


def _read(source: Path, bundle: Path | None) -> tuple[Bundle, Knowledge, Path]:
    """The bundle, what is known beside it, and where the bundle lies."""
    if source.is_dir():
        return Knowledge.of_state(source, bundle)
    if bundle is not None:
        raise UsageError(str(source), expected="a state directory, beside a bundle", got="no directory")
    return read_bundle(source), Knowledge(), source


def _newer(
    state: Path | None, store: Source | None, bundle: Bundle, known: Knowledge
) -> Callable[[], Knowledge | None] | None:
    """What comes to be known while answers are given: the global state of a store where there is one, else all that a
    device keeps."""
    if store is not None:
        from aggregator.database import watch

        return Following(watch(store), lambda: replace(known, state=_state_of(store, bundle)), known)
    return None if state is None else follow_state(state, bundle, known)


def _state_of(store: Source, bundle: Bundle) -> GlobalState:
    """The newest global state of a store.

    Raises:
        UsageError: it is of another bundle.
        StoreError: it cannot be read.
    """
    from aggregator.stored import read_state

    identity, state = read_state(store)
    _check_identity(identity, store, bundle)
    return state


def _solved(store: Source | None, bundle: Bundle, given: Mapping[str, object], way: str | None) -> SolvedAgain:
    """The head of a store's sums, made again.

    Raises:
        UsageError: there is no store, it has no sums, is of another bundle, or another way of answering is asked for.
    """
    from aggregator.solve_again import solve_again
    from aggregator.stored import read_state

    names = ", ".join(f"--{name}" for name in given)
    if store is None:
        raise UsageError(
            names, expected="--store, whose sums are solved again", got="none: devices keep no sums",
            hint="the aggregator's --store",
        )  # fmt: skip
    _check_identity(read_state(store)[0], store, bundle)
    solved = solve_again(store, bundle.manifest, given)
    if way not in (None, solved.method.way):
        raise UsageError(
            f"{names} with --way {way}", expected=f"the way that is solved for, {solved.method.way}", got=way
        )
    return solved


def _check_identity(identity: bytes, store: Source, bundle: Bundle) -> None:
    if identity not in (bundle.sha256, *bundle.manifest.extended):
        from aggregator.database import place_of

        raise UsageError(
            f"--store {place_of(store)} is of another bundle, or of several",
            expected=f"sha256 {bundle.sha256.hex()[:12]}…",
            got=f"{identity.hex()[:12]}…",
            hint="the bundle it was made for, or a device's --state",
        )
