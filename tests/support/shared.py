"""What is made once a run of the tests, by whichever of its workers asks first, and only read by all who come after."""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

_folder: Path | None = None
_has_exported = False


def keep_in(folder: Path) -> None:
    """Where this run keeps it: the same folder for every worker (`conftest.py`)."""
    global _folder
    folder.mkdir(exist_ok=True)
    _folder = folder


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The path of that name, file or folder, as `make(path)` left it; another worker that asks meanwhile waits."""
    assert _folder is not None
    path = _folder / name
    with FileLock(f"{path}.lock"):
        done = _folder / f"{name}.done"
        if not done.exists():
            if path.is_dir():  # a test that was making it was ended
                shutil.rmtree(path)
            make(path)
            done.touch()
    return path


def settle() -> None:
    """What this process holds by now stays: the garbage collector need not look at it again.

    A device in this process asks for a collection after each round, and that of ten thousand tests and torch takes
    longer than the round.
    """
    gc.collect()
    gc.freeze()


def exported(**options: Any) -> Path:
    """The file of a bundle, by the options of `protofleet.export.bundles.build.build_bundle` but `out`: for the same
    options the same."""
    told = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:12]

    def make(path: Path) -> None:
        from protofleet.export.bundles.build import build_bundle

        build_bundle(**options, out=path)
        global _has_exported
        if not _has_exported:  # torch has just been loaded
            _has_exported = True
            settle()

    return once(f"{options['method_name']}-{told}.bundle", make)


def export_to(*, out: Path, **options: Any) -> None:
    """`build_bundle` for who wants the file at `out`: a copy of what this run has exported with the same options.

    What a test has written itself, weights or a module with a network or a method, is exported anew: another test's may
    have the same name.
    """
    if options.get("weights") or ":" in str(options["backbone"]) or ":" in options["method_name"]:
        from protofleet.export.bundles.build import build_bundle

        build_bundle(**options, out=out)
        return
    shutil.copyfile(exported(**options), out)
