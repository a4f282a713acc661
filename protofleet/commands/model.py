"""`protofleet model`: the classifier of a device or of its fleet, as one plain ONNX file.

1. The predictor (`edge_client`) gives the weights and the way of answering.
2. With another ridge or form, the head is solved again from the store's sums (`aggregator/commands/solve_again.py`).
3. `export/bundles/classifier.py` makes a graph of them.
4. ONNX Runtime runs the graph on images of noise. The scores must equal the predictor's.
5. Only then the file is written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from protofleet.commands.solving import FORM_HELP, RIDGE_HELP, asked, source_of, tell
from protofleet.contract.console import logs
from protofleet.contract.errors import ExportError, StoreError, UsageError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.methods import LOAD_HELP, load_method
from protofleet.contract.printable import counted
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.library.predictor import Predictor

__all__ = ["model_bytes", "model_command"]

_ASKED = 32  # images of noise
_TOLERANCE = 1e-3  # of the scores' range: the file computes its head in float32


def model_command(
    out: Annotated[Path, typer.Argument(help="The ONNX file to write.")],
    state: Annotated[Path | None, typer.Option(help="A device's state directory.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle; with --state where the device's own lies now.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="FILE|URL", help="An aggregator's store: what the fleet learned last.")
    ] = None,
    way: Annotated[str | None, typer.Option(help="The way of answering.  [default: the method's own]")] = None,
    ridge: Annotated[str | None, typer.Option(help=RIDGE_HELP)] = None,
    form: Annotated[str | None, typer.Option(help=FORM_HELP)] = None,
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
) -> None:
    """Write one plain ONNX classifier: uint8 images in; scores and class out; labels in its metadata."""
    if method is not None:
        load_method(method)
    logs.set_up("text")
    source = source_of("protofleet model", state, bundle)
    read = [path for path in (bundle, None if store is None else Path(store)) if path is not None]
    if any(out.is_file() and path.exists() and out.samefile(path) for path in read):
        raise UsageError(f"{out} would be written over", expected="a file of its own", got="what is read from")
    predictor = Predictor(
        source, bundle=bundle if state else None, store=store, way=way, solve=asked(ridge, form), provider="cpu"
    )
    tell(predictor)
    blob = model_bytes(predictor)
    try:
        with whole_file(out) as file:
            file.write(blob)
    except OSError as error:
        raise StoreError(f"cannot write {out}", expected="a file that can be written", got=error.strerror) from None
    m = predictor.bundle.manifest
    shape = "x".join(map(str, m.input_shape))
    answers = f"answers by {predictor.way_in_words}, on {predictor.basis}"
    typer.echo(f"{out}: {len(blob):,} bytes, {counted(m.classes, 'class', 'classes')}, {answers}")
    typer.echo(f"x uint8 (N, {shape.replace('x', ', ')}) → scores (N, {m.classes}), class (N,)")


def model_bytes(predictor: Predictor) -> bytes:
    """The bytes of the ONNX file. Its answers are equal to the predictor's.

    Raises:
        ExportError: the way of answering is not linear, or the graph gives other answers.
    """
    from protofleet.export.bundles.classifier import classifier

    bundle, answer = predictor.bundle, predictor.answering.answer
    about = {"bundle": bundle.sha256.hex(), "way": predictor.way, "basis": predictor.basis}
    blob = classifier(replace(bundle, params=predictor.params), answer, about)
    _check(blob, predictor)
    return blob


def _check(blob: bytes, predictor: Predictor) -> None:
    x = np.random.default_rng(0).integers(0, 256, (_ASKED, *predictor.bundle.manifest.input_shape), dtype=np.uint8)
    session, _ = open_session(blob, "the classifier")
    (scores,) = session.run(["scores"], {"x": x})
    wanted = predictor(x).scores
    named = np.isfinite(wanted)
    apart = float(np.abs(scores[named] - wanted[named]).max())
    if apart > _TOLERANCE * max(float(np.ptp(wanted[named])), 1e-6):
        raise ExportError("the classifier", expected="the predictor's scores", got=f"others, by {apart:.2g}")
