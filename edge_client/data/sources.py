"""What a path is: a folder of photos, a CSV of paths, parquet or a `.npz`; whichever it is, a `Listing` comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from protofleet.contract.errors import DataError
from protofleet.edge_client.data.listing import Listing

__all__ = ["list_source"]

_KINDS = "a folder of images, a .csv of paths, a .npz or a .parquet"


def list_source(
    path: str | Path, log: Callable[[str], None] = lambda line: None, *, each_alone: bool = False
) -> Listing:
    """List the samples at `path`, whatever it is.

    Args:
        path: see docs/data.md for each kind.
        log: takes a line about what is left out.
        each_alone: a line or row with an error is `UNUSABLE` by itself, or its image is empty, instead of an error.

    Raises:
        DataError: nothing there, of no kind that is known, not whole, or not to be read by this user.
    """
    source = Path(path)
    try:
        return _listed(source, log, each_alone)
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else source
        raise DataError(
            f"cannot read {named}", expected="data that this user may read", got=error.strerror, hint=f"ls -ld {named}"
        ) from None


def _listed(source: Path, log: Callable[[str], None], each_alone: bool) -> Listing:
    if not source.exists():
        raise DataError(f"no data at {source}", expected=_KINDS, got="nothing there", hint=f"ls {source.parent}")
    if source.is_dir():
        from protofleet.edge_client.data.folder import list_folder, parquet_files

        if files := parquet_files(source):
            from protofleet.edge_client.data.parquet import list_parquet

            return list_parquet(source, files, each_alone=each_alone)
        return list_folder(source, log)
    kind = source.suffix.lower()
    if kind == ".parquet":
        from protofleet.edge_client.data.parquet import list_parquet

        return list_parquet(source, [source], each_alone=each_alone)
    if kind == ".csv":
        from protofleet.edge_client.data.csv_paths import list_csv

        return list_csv(source, each_alone=each_alone)
    if kind == ".npz":
        from protofleet.edge_client.data.npz import list_npz

        return list_npz(source)
    raise DataError(f"cannot tell what {source} is", expected=_KINDS, got=source.suffix or "a file")
