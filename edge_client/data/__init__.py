"""The device's own samples: found where they lie, split, decoded once, kept on disk.

The way of the data, a file for each step; the lab goes the same way:

1. `sources.py` looks what a path is, and `folder.py`, `csv_paths.py`, `parquet.py` or `npz.py` lists it
   (`listing.py`): for each sample where it is, which class, which split. No image is opened yet.
2. `splits.py` says which of them are wanted: the declared split, or a stratified hold-out; under noise each photo by
   itself (`draws.py`).
3. `decode.py` makes pixels of them, in parallel: upright, of the bundle's channels and size, uint8.
4. `cache.py` keeps the pixels in a memory-mapped file, so that 100,000 photos are neither held in memory nor decoded
   at every start.
5. `learned.py` has what a person has taught the device beside them.
6. `load.py` puts these together into `LocalData` (`samples.py`).
7. `activations.py` keeps what the frozen part of a network makes of each photo.
"""

from protofleet.edge_client.data.samples import UNLABELLED, LocalData, Purpose

__all__ = ["UNLABELLED", "LocalData", "Purpose"]
