"""How much a command says while it works, the same in every command that logs: `--quiet` and `--verbose`.

Between them is what a person wants to follow. `--quiet` leaves the errors; `--verbose` adds what one looks for when
something goes wrong: single messages, refusals with their keys, counts at the end.
"""

from __future__ import annotations

from protofleet.contract.errors import UsageError

__all__ = ["QUIET_HELP", "VERBOSE_HELP", "check_loudness"]

QUIET_HELP = "Print errors only."
VERBOSE_HELP = "Print {}, too."


def check_loudness(quiet: bool, verbose: bool) -> None:
    """Refuse both at once.

    Raises:
        UsageError: both were given.
    """
    if quiet and verbose:
        raise UsageError("--quiet and --verbose", expected="one of them", got="both")
