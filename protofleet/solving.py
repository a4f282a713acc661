"""What the commands that answer share: what they are given, and `--ridge` and `--form`, a head made again of sums."""

from __future__ import annotations

from pathlib import Path

import typer

from contract.errors import UsageError
from protofleet.predictor import Predictor

__all__ = ["FORM_HELP", "RIDGE_HELP", "asked", "source_of", "tell"]

RIDGE_HELP = "Make the head of --store's sums again: with this ridge, or auto."
FORM_HELP = "The same with FFC's sums as a ridge head, or as a discriminant."


def source_of(command: str, state: Path | None, bundle: Path | None) -> Path:
    """What a predictor is made of: the state directory where one is given, else the bundle.

    Raises:
        UsageError: neither is given, or the state directory is none.
    """
    if state is not None and not state.is_dir():
        got = "a file" if state.exists() else "nothing there"
        raise UsageError(f"--state {state}", expected="a device's state directory", got=got, hint=f"ls {state.parent}")
    source = state or bundle
    if source is None:
        raise UsageError(command, expected="--state or --bundle", got="neither", hint="--help")
    return source


def asked(ridge: str | None, form: str | None) -> dict[str, object]:
    """What was asked for; nothing where the head that the fleet has is to answer."""
    given = {"ridge": ridge, "form": form}
    return {name: value for name, value in given.items() if value is not None}


def tell(predictor: Predictor) -> None:
    """Say what came of it, and what speaks against it, beside what the command gives out."""
    found = predictor.solved
    if found is None:
        return
    typer.echo(f"round {found.round} of {found.method.name} solved again: {found.told}", err=True)
    if found.doubt:
        typer.echo(f"warning: {found.doubt}", err=True)
