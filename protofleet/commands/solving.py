"""Shared by the commands that answer: their source, and `--ridge` and `--form`, which solve the head again."""

from __future__ import annotations

import logging
from pathlib import Path

from protofleet.contract.errors import UsageError
from protofleet.library.predictor import Predictor

__all__ = ["FORM_HELP", "RIDGE_HELP", "asked", "source_of", "tell"]

logger = logging.getLogger(__name__)

RIDGE_HELP = "Make the head of --store's sums again: with this ridge, or auto."
FORM_HELP = "The same with FFC's sums as a ridge head, an even one, or a discriminant."


def source_of(command: str, state: Path | None, bundle: Path | None) -> Path:
    """The source of a predictor: the state directory where one is given, else the bundle.

    Raises:
        UsageError: neither is given, or the state is no directory.
    """
    if state is not None and not state.is_dir():
        got = "a file" if state.exists() else "nothing there"
        raise UsageError(f"--state {state}", expected="a device's state directory", got=got, hint=f"ls {state.parent}")
    source = state or bundle
    if source is None:
        raise UsageError(command, expected="--state or --bundle", got="neither", hint="--help")
    return source


def asked(ridge: str | float | None, form: str | None) -> dict[str, object]:
    """The options that were given; empty where the fleet's own head answers."""
    given = {"ridge": ridge, "form": form}
    return {name: value for name, value in given.items() if value is not None}


def tell(predictor: Predictor) -> None:
    """Log the result of solving again, and any doubt about it."""
    solved = predictor.solved
    if solved is None:
        return
    logger.info(f"round {solved.round} of {solved.method.name} solved again: {solved.told}")
    if solved.doubt:
        logger.warning(f"warning: {solved.doubt}")
