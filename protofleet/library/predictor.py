"""Answers inside a program: what `protofleet predict` does, on arrays in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.names import known as known_name
from protofleet.edge_client.answers import predictor
from protofleet.edge_client.answers.int8_answers import PRECISIONS, Int8Features
from protofleet.edge_client.answers.knowledge import Following, Knowledge, follow_state
from protofleet.edge_client.data.learned import LearnedFile, Outcome, example_of
from protofleet.edge_client.trials.provider_trials import choose_providers

if TYPE_CHECKING:
    from protofleet.aggregator.commands.solve_again import SolvedAgain

__all__ = ["Predictor"]

Source = str | os.PathLike[str]
Image = str | os.PathLike[str] | bytes | NDArray[Any]


class Predictor(predictor.Predictor):
    """Answers about images: `predictor(images)` takes uint8 (N, H, W, c) and gives labels, scores, and what is unknown.

    Args:
        source: a device's state directory, or a bundle.
        bundle: the path of the state directory's bundle, if it was moved.
        store: an aggregator's store, a file or `postgresql://…`. Its newest global state is used.
        way: the name of the way of answering. None: the method's own, or the best one available.
        solve: solve the head again from the store's sums, with other hyper-parameters, for example `{"ridge": 0.3}` or
            `{"form": "discriminant"}`. `solved` then holds the result.
        threads: number of threads within an operator.
        threshold: an image with a larger novelty is unknown. None: the limit that the fleet's statistics give.
        provider: where the graph runs: auto, cpu, xnnpack, cuda or tensorrt. `auto` takes the fastest of
            those that were tried with this bundle. The state directory keeps the result.
        answers: how much this device's own class shares count: `auto` as much as held-out photos of the fleet said,
            `own` fully, `fleet` not at all.
        coverage: the share of images whose set of classes is to hold the right one (`Answers.set_of`). None: no sets.
        precision: fp32, or int8: the form beside the bundle that `export --precision int8` wrote. It is tried on the
            first photos, and used where answers stay the same and come faster.
        follow: before each batch of answers, load what the client of the state directory or the aggregator of the
            store has learned since.

    Attributes:
        runs_on: one line: which provider runs the graph, and why.

    Raises:
        ProtofleetError: no state, another bundle, or nothing to answer with. One line says what to do.
    """

    # arguments: a program's `predict`: by name, with the defaults of the command
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
        answers: str = "auto",
        coverage: float | None = None,
        precision: str = "fp32",
        follow: bool = True,
    ) -> None:
        loaded, known, path = _read(Path(source), None if bundle is None else Path(bundle))
        self.solved: SolvedAgain | None = None
        if solve:
            self.solved = _solved(store, loaded, solve, way)
            known, way = replace(known, state=self.solved.state, alone=None), self.solved.method.way
        elif store is not None:
            known = _with_store(known, store, loaded)
        state = Path(source) if Path(source).is_dir() else None
        providers = choose_providers(loaded, path, wanted=provider, threads=threads, state=state)
        self.runs_on = providers.choice.line
        newer = _newer(state, store, loaded, known) if follow and not solve else None
        options: dict[str, Any] = {"way": way, "threads": threads, "threshold": threshold, "providers": providers}
        int8 = (
            Int8Features(path, loaded, threads) if known_name(PRECISIONS, precision, "--precision") == "int8" else None
        )
        options |= {"answers": answers, "coverage": coverage, "int8": int8}
        super().__init__(loaded, known, newer=newer, **options)
        self._state = state

    @property
    def int8_line(self) -> str:
        """Whether answers come in int8, and why, in one line. Empty where that was not asked for."""
        return "" if self._int8 is None else self._int8.line

    def learn(self, image: Image, label: str) -> Outcome:
        """Add an example to this device's own data. The next contribution includes it. It is on the disk on return.

        Args:
            image: a file by its path or bytes, or an array (H, W, c) uint8 of the bundle's shape.
            label: a class of the bundle's.

        Returns:
            `learned`; `known` where it was learned before; `corrected` where it was learned before with another label.

        Raises:
            ProtofleetError: this predictor has no state directory, there is no such class, the image cannot be read, or
                the disk refuses.
        """
        return self._learned_file().learn(example_of(image, self.bundle.manifest), label)

    def unlearn(self, image: Image) -> str:
        """Remove a learned example from this device's data; returns the label that it had.

        Raises:
            ProtofleetError: as `learn`, or the example was not learned.
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
    """The bundle, the knowledge beside it, and the path of the bundle."""
    if source.is_dir():
        return Knowledge.of_state(source, bundle)
    if bundle is not None:
        raise UsageError(str(source), expected="a state directory, beside a bundle", got="no directory")
    return read_bundle(source), Knowledge(), source


def _newer(
    state: Path | None, store: Source | None, bundle: Bundle, known: Knowledge
) -> Callable[[], Knowledge | None] | None:
    """A function that gives new knowledge while answers are given, or None where there is none.

    The knowledge is the global state of the store where there is one, else everything that the device keeps.
    """
    if store is not None:
        from protofleet.aggregator.database import watch

        return Following(watch(store), lambda: _with_store(known, store, bundle), known)
    return None if state is None else follow_state(state, bundle, known)


def _with_store(known: Knowledge, store: Source, bundle: Bundle) -> Knowledge:
    """What is known, with the newest global state of a store, and the calibration that its devices' reports give.

    Raises:
        UsageError: it is of another bundle.
        StoreError: it cannot be read.
    """
    from protofleet.aggregator.store.stored_run import stored_run

    with stored_run(store) as run:
        _check_identity(run.bundle, store, bundle)
        calibration = replace(known.calibration, fleet=run.calibration())
        return replace(known, state=run.state(), alone=None, own=None, calibration=calibration)


def _solved(store: Source | None, bundle: Bundle, given: Mapping[str, object], way: str | None) -> SolvedAgain:
    """The head, solved again from a store's sums.

    Raises:
        UsageError: there is no store, it has no sums, it is of another bundle, or `way` is not what is solved for.
    """
    from protofleet.aggregator.commands.solve_again import solve_again
    from protofleet.aggregator.store.stored_run import read_state

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
        from protofleet.aggregator.database import place_of

        raise UsageError(
            f"--store {place_of(store)} is of another bundle, or of several",
            expected=f"sha256 {bundle.sha256.hex()[:12]}…",
            got=f"{identity.hex()[:12]}…",
            hint="the bundle it was made for, or a device's --state",
        )
