"""Draw the small Fashion-MNIST that the package ships, from the whole data set in the Hub's parquet layout.

    python -m protofleet.lab.data.make_subset --from DIR --out DIR

`DIR` holds `train.parquet` and `test.parquet` with the columns `image` (struct of PNG `bytes` and `path`) and `label`
(int64), class names in the schema's `huggingface` metadata. What is drawn keeps that layout, those very PNG bytes and
that metadata, so it loads wherever the whole set does. The draw is balanced: the same number of images of each class,
chosen without replacement by `numpy.random.default_rng(seed)` class by class in label order, then kept in the order of
the source. The same source and seed give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from protofleet.contract.errors import DataError, ProtofleetError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["SEED", "TEST_PER_CLASS", "TRAIN_PER_CLASS", "draw_balanced", "draw_subset"]

SEED = 20_170_825  # the day Fashion-MNIST's paper appeared
TRAIN_PER_CLASS = 600
TEST_PER_CLASS = 100


def draw_balanced(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Indices (C·per_class,) into `labels` (N,), rising, with `per_class` of each class.

    Raises:
        DataError: when a class has too few.
    """
    chosen = []
    for number in np.unique(labels):
        where = np.flatnonzero(labels == number)
        if len(where) < per_class:
            raise DataError(f"class {number}", expected=f"at least {per_class} images", got=len(where))
        chosen.append(rng.choice(where, per_class, replace=False))
    return np.sort(np.concatenate(chosen))


def draw_subset(source: Path, out: Path, *, seed: int = SEED) -> dict[str, int]:
    """Write `out/train.parquet` and `out/test.parquet`; returns the bytes of each.

    Raises:
        DataError: when the source is missing, or a class has too few images.
    """
    import pyarrow.parquet as pq

    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    sizes = {}
    for split, per_class in (("train", TRAIN_PER_CLASS), ("test", TEST_PER_CLASS)):
        path = source / f"{split}.parquet"
        if not path.is_file():
            raise DataError(
                f"no {path}", expected="the whole set as parquet", got="no such file", hint="another --from"
            )
        table: pyarrow.Table = pq.read_table(path)
        drawn = table.take(draw_balanced(table["label"].to_numpy(), per_class, rng))
        target = out / f"{split}.parquet"
        # PNG does not compress again: stored as it is, one row group, no statistics over image bytes.
        pq.write_table(drawn, target, compression="none", use_dictionary=["label"], write_statistics=["label"])
        sizes[split] = target.stat().st_size
    return sizes


def main(
    source: Annotated[Path, typer.Option("--from", help="directory with the whole train.parquet and test.parquet")],
    out: Annotated[Path, typer.Option("--out", help="where the subset is written")],
    seed: Annotated[int, typer.Option("--seed", help="of the draw")] = SEED,
) -> None:
    """Draw a balanced subset: 600 training and 100 test images of each class."""
    try:
        sizes = draw_subset(source, out, seed=seed)
    except ProtofleetError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    for split, size_bytes in sizes.items():
        print(f"{out / split}.parquet  {size_bytes} bytes")


if __name__ == "__main__":
    typer.run(main)
