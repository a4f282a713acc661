"""The prerequisites of every demo: its packages, and an output directory without files of an earlier demo."""

from __future__ import annotations

import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command

__all__ = ["check_there", "fresh_directory"]

_OURS = ("logs", "devices")
_OURS_LIKE = ("fleet*.bundle", "backbone*.safetensors", "aggregate*.json", "aggregate.sqlite*")


def check_there(package: str, what: str, extra: str) -> None:
    """Refuse to start without a package.

    Raises:
        UsageError: the package is not installed. The line names the extra that has it.
    """
    with suppress(ModuleNotFoundError):
        if find_spec(package) is not None:
            return
    raise UsageError(what, expected=f"the package {package}", got="none installed", hint=install_command(extra))


def fresh_directory(out: Path) -> Path:
    """Make the output directory, and delete an earlier demo's files in it. Other files stay.

    Raises:
        UsageError: the directory cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (*_OURS, "summary.json", "report.html"):
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for extra in (path for pattern in _OURS_LIKE for path in out.glob(pattern)):
            extra.unlink()
        probe = out / "summary.json"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--out {out}", expected="a directory that can be written", got=error.strerror, hint="another --out"
        ) from None
    return out
