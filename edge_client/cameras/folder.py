"""`folder:DIRECTORY`: photos that another program puts into a folder, each once it is whole (`photo_watch.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from protofleet.contract.errors import DataError
from protofleet.edge_client.cameras.camera import Picture
from protofleet.edge_client.cameras.photo_watch import new_files

__all__ = ["Folder"]


class Folder:
    """A folder that is looked into every so many seconds. A photo was taken when its file was last written."""

    ends = False

    def __init__(self, text: str) -> None:
        self._folder, self.shown = Path(text.partition(":")[2]), "a folder"
        if not self._folder.is_dir():
            got = "a file" if self._folder.exists() else "nothing there"
            raise DataError(f"no folder at {self._folder}", expected="folder:DIRECTORY", got=got)

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`."""
        for name, path in new_files([self._folder], every_s):
            try:
                written_s = os.stat(path).st_mtime
            except OSError:  # gone since it was seen
                continue
            yield Picture(path, written_s, name)
