"""The command that adds an extra to the installation that runs: the one hint of whatever misses a package.

Where Protofleet came from decides what to install: its code lies in a checkout, or pip has kept the address that it
was installed from (`direct_url.json`, PEP 610), or it came by its name from a package index. In a checkout the versions
are named that it was tested with, `constraints.txt`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["install_command"]

_NAME = "protofleet"
_OTHER_VERSIONS = "[flower]"  # flwr wants older ones than constraints.txt names, hence an environment of its own


def install_command(extra: str, *options: str) -> str:
    """The shell command, with the Python that runs, from the present folder.

    Args:
        extra: of `pyproject.toml`; empty for the base install.
        options: of `pip install`.
    """
    words = [_shown(Path(sys.executable)), "-m", "pip", "install", *options, *_what(f"[{extra}]" if extra else "")]
    return shlex.join(words)


def _what(extra: str) -> list[str]:
    """What pip is to install; `extra` in its brackets."""
    checkout = Path(__file__).absolute().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return [*_constraints(checkout, extra), "-e", f"{_as_a_path(checkout)}{extra}"]
    came = _came_from()
    url = str(came.get("url", ""))
    if not url:
        return [f"{_NAME}{extra}"]
    if url.startswith("file:") and "vcs_info" not in came:
        path = Path(unquote(urlsplit(url).path))  # a folder, or a wheel
        return [*_constraints(path, extra), f"{_as_a_path(path)}{extra}"]
    vcs = came.get("vcs_info", {})
    address = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
    return [f"{_NAME}{extra} @ {address}"]


def _constraints(folder: Path, extra: str) -> list[str]:
    path = folder / "constraints.txt"
    return ["-c", _shown(path)] if path.is_file() and extra != _OTHER_VERSIONS else []


def _shown(path: Path) -> str:
    """A path as it is typed in the present folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere; or the present folder is gone
        return str(path)


def _as_a_path(path: Path) -> str:
    """The same, told from a name of the package index: pip takes a word without a slash or a dot for one."""
    shown = _shown(path)
    return shown if shown.startswith((".", "/")) else f"./{shown}"


def _came_from() -> dict[str, Any]:
    """What pip has kept of where it installed Protofleet from; empty where it came from an index, or is not known."""
    import json  # here and not above: a device needs neither while all is well
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
