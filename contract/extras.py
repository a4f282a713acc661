"""The command that adds an extra to the running installation: the hint of every error about a missing package.

What to install depends on where Protofleet came from:

- its code lies in a checkout: the checkout, with the versions that it was tested with (`constraints.txt`);
- pip has kept the address that it was installed from (`direct_url.json`, PEP 610): that address;
- it came by its name from a package index: that name.
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
    requirements = _requirements(f"[{extra}]" if extra else "")
    return shlex.join([_shown(Path(sys.executable)), "-m", "pip", "install", *options, *requirements])


def _requirements(extra: str) -> list[str]:
    """The arguments of `pip install`: constraints, and what to install. `extra` has its brackets."""
    checkout = Path(__file__).absolute().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return [*_constraints(checkout, extra), "-e", f"{_as_a_path(checkout)}{extra}"]
    origin = _origin()
    url = str(origin.get("url", ""))
    if not url:
        return [f"{_NAME}{extra}"]
    if url.startswith("file:") and "vcs_info" not in origin:
        path = Path(unquote(urlsplit(url).path))  # a folder, or a wheel
        return [*_constraints(path, extra), f"{_as_a_path(path)}{extra}"]
    vcs = origin.get("vcs_info", {})
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
    """The path with a slash or a dot in it: pip takes a word without both for a name of the package index."""
    shown = _shown(path)
    return shown if shown.startswith((".", "/")) else f"./{shown}"


def _origin() -> dict[str, Any]:
    """Pip's record of where Protofleet was installed from; empty where that is an index, or not known."""
    import json  # here and not above: a device needs neither while all is well
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        record = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
