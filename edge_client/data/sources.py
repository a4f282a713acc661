"""What a path is: a folder of photos, a CSV of paths, parquet or a `.npz`; whichever it is, a `Listing` comes of it.

A further kind is a module beside `csv_paths.py`, and its line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from protofleet.contract.errors import DataError, near_names
from protofleet.contract.names import listed
from protofleet.edge_client.data.folder import list_folder, parquet_files
from protofleet.edge_client.data.listing import Listing

__all__ = ["SOURCES", "Source", "list_source", "source_of"]


@dataclass(frozen=True)
class Source:
    """One kind of source.

    Attributes:
        words: what it is, for an error.
        listing: lists what is at a path, given whether each sample stands alone (see `list_source`).
        files: the files at a path that hold many images each, so that listing them reads them.
    """

    words: str
    listing: Callable[[Path, bool], Listing]
    files: Callable[[Path], list[Path]] = lambda path: []


def _csv(path: Path, each_alone: bool) -> Listing:
    from protofleet.edge_client.data.csv_paths import list_csv

    return list_csv(path, each_alone=each_alone)


def _npz(path: Path, each_alone: bool) -> Listing:
    from protofleet.edge_client.data.npz import list_npz

    return list_npz(path)


def _parquet(path: Path, each_alone: bool) -> Listing:
    from protofleet.edge_client.data.parquet import list_parquet

    return list_parquet(path, _parquets(path), each_alone=each_alone)


def _parquets(path: Path) -> list[Path]:
    return parquet_files(path) if path.is_dir() else [path]


SOURCES: Mapping[str, Source] = MappingProxyType(  # by the ending of a file; what reads it is imported when it is used
    {
        "folder": Source("a folder of images", lambda path, each_alone: list_folder(path)),
        ".csv": Source("a .csv of paths", _csv),
        ".npz": Source("a .npz", _npz, lambda path: [path]),
        ".parquet": Source("a .parquet", _parquet, _parquets),
    }
)
_KINDS = listed(source.words for source in SOURCES.values())


def source_of(path: Path) -> Source:
    """The kind of source that is at a path.

    Raises:
        DataError: nothing is there, or it is of no kind that is known.
    """
    if not path.exists():
        raise DataError(f"no data at {path}", expected=_KINDS, got="nothing there", hint=f"ls {path.parent}")
    if path.is_dir():
        return SOURCES[".parquet" if parquet_files(path) else "folder"]
    ending = path.suffix.lower()
    if ending not in SOURCES:
        hint = near_names(ending, SOURCES)
        raise DataError(f"cannot tell what {path} is", expected=_KINDS, got=path.suffix or "a file", hint=hint)
    return SOURCES[ending]


def list_source(path: str | Path, *, each_alone: bool = False) -> Listing:
    """List the samples at `path`, whatever it is.

    Args:
        path: see docs/data.md for each kind.
        each_alone: a line or row with an error is `UNUSABLE` by itself, or its image is empty, instead of an error.

    Raises:
        DataError: nothing there, of no kind that is known, not whole, or not to be read by this user.
    """
    source = Path(path)
    try:
        return source_of(source).listing(source, each_alone)
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else source
        raise DataError(
            f"cannot read {named}", expected="data that this user may read", got=error.strerror, hint=f"ls -ld {named}"
        ) from None
