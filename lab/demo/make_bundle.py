"""Make what the demo ships, from the shipped Fashion-MNIST subset: needs torch, onnx and pyarrow.

    python -m protofleet.lab.demo.make_bundle --out DIR

The same code as `protofleet demo --from-scratch` pretrains `small_cnn` on the public images and exports it, with
seed 0. What it prints belongs into `lab/demo/shipped/README.md`.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from protofleet.contract.errors import ProtofleetError
from protofleet.lab.data.datasets import load_dataset
from protofleet.lab.demo.from_scratch import divided, export_shared, pretrain, recipe
from protofleet.lab.demo.shipped import BACKBONE, BUNDLE, DATA, IMAGES, METHOD, write_images

__all__ = ["make_bundle"]


def make_bundle(out: Path) -> list[Path]:
    """Write the bundle and the images into `out`, an existing directory; returns both paths.

    Raises:
        ExportError: when the bundle cannot be made here.
    """
    torch.set_num_threads(1)  # sums in one order, so that the same machine makes the same bytes
    images = divided(load_dataset(DATA), seed=0)
    bundle, archive = out / BUNDLE.name, out / IMAGES.name
    write_images(images, archive)
    plan = recipe(METHOD)
    model, accuracy = pretrain(images.public, images.classes, plan, BACKBONE, seed=0, on_epoch=lambda epoch, loss: None)
    weights = out / "backbone.safetensors"
    by = "by python -m lab.demo.make_bundle"  # what it was called when the bundle that ships was made, byte for byte
    export_shared(model, plan, METHOD, BACKBONE, images, accuracy, out=bundle, weights=weights, seed=0, by=by)
    weights.unlink()
    return [bundle, archive]


def main(out: Annotated[Path, typer.Option("--out", help="an existing directory")]) -> None:
    """Make the demo's bundle and images."""
    try:
        paths = make_bundle(out)
    except ProtofleetError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    for path in paths:
        content = path.read_bytes()
        print(f"| `{path.name}` | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |")


if __name__ == "__main__":
    typer.run(main)
