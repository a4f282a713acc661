"""`--ridge` and `--form` of the commands that answer: the head is made again of a store's sums."""

from __future__ import annotations

import typer

from protofleet.predictor import Predictor

__all__ = ["FORM_HELP", "RIDGE_HELP", "asked", "tell"]

RIDGE_HELP = "Make the head of --store's sums again: with this ridge, or auto."
FORM_HELP = "The same with FFC's sums as a ridge head, or as a discriminant."


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
