"""`protofleet export`: the bundle, and with `--target DEVICE` also the graph that suits that device.

    a board with a CPU only   int8, static, calibrated on --data      F.int8.onnx
    a board with a GPU        fp16                                    F.fp16.onnx
    a systolic array          the table of matrix products            F.gemm.csv (SCALE-Sim's format)

The bundle itself stays fp32, since devices train in fp32. The command also prints what to expect on the target: the
predicted latency in fp32 and in the chosen precision, and the loss of accuracy on the given data, by the nearest class
mean of the features.

`export` knows graphs, `hw_profiles` knows devices, and `edge_client` knows data. This command needs all three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DataError, StoreError, UsageError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.names import known
from protofleet.export.cli import export_command as plain_export
from protofleet.hw_profiles.devices.schema import Device, find_device, load_devices
from protofleet.hw_profiles.latency.precisions import ON_PROCESSORS, PRECISIONS

__all__ = ["Fit", "choose_precision", "export_command", "write_for"]

_CALIBRATION_IMAGES = 256


@dataclass(frozen=True)
class Fit:
    """The graph or table for a device, and what to expect of it there.

    Attributes:
        path: the graph or table beside the bundle; None for fp32, which is in the bundle.
        lines: text for a person, one figure each, marked as measured, simulated or predicted.
        accuracy, accuracy_fp32: fractions by nearest class mean on the given data; None without data.
    """

    precision: str
    path: Path | None
    lines: tuple[str, ...]
    accuracy: float | None = None
    accuracy_fp32: float | None = None


def choose_precision(device: Device, wanted: str | None) -> str:
    """The precision that was asked for; otherwise fp16 with a GPU, int8 with a CPU only, fp32 on an array.

    Raises:
        UsageError: an unknown precision.
    """
    if wanted is not None:
        return known(ON_PROCESSORS, wanted, "--precision")
    if device.systolic is not None:
        return "fp32"
    return "fp16" if device.gpu is not None else "int8"


def write_for(bundle_path: Path, device: Device, precision: str, data: Path | None) -> Fit:
    """Write the graph or table for a device beside the bundle, and return what to expect.

    Args:
        data: an image folder, `.npz` or `.parquet` of the bundle's classes. int8 requires it.

    Raises:
        DataError: int8 without data, or data that does not fit the bundle.
    """
    bundle = read_bundle(bundle_path)
    if device.systolic is not None:
        return _table_for(bundle, bundle_path, device, precision)
    images, labels = _images(bundle, data)
    lines = _expectations(bundle, device, precision)
    if precision == "fp32":
        return Fit(precision, None, tuple(lines))
    graph = _converted(bundle, precision, images)
    path = bundle_path.with_suffix(f".{precision}.onnx")
    _write(path, graph)
    if images is None or labels is None:
        return Fit(precision, path, tuple(lines))
    from protofleet.export.graphs.precision import features_fp32

    whole = _accuracy(features_fp32(bundle).SerializeToString(), images, labels)
    reduced = _accuracy(graph, images, labels)
    lines.append(
        f"accuracy by nearest class mean on {len(labels) - len(labels) // 2} held-out images: {100 * reduced:.2f} % in "
        f"{precision}, {100 * whole:.2f} % in fp32 ({100 * (reduced - whole):+.2f} points, measured)"
    )
    return Fit(precision, path, tuple(lines), reduced, whole)


def _converted(bundle: Bundle, precision: str, images: NDArray[np.uint8] | None) -> bytes:
    from protofleet.export.graphs.precision import features_fp16, features_int8

    if precision == "fp16":
        return features_fp16(bundle).SerializeToString()
    if images is None:
        raise DataError("int8", expected="--data to calibrate on", got="none", hint="--data DIR, or --precision fp16")
    return features_int8(bundle, images[:_CALIBRATION_IMAGES]).SerializeToString()


def _images(bundle: Bundle, data: Path | None) -> tuple[NDArray[np.uint8] | None, NDArray[np.int64] | None]:
    if data is None:
        return None, None
    from protofleet.edge_client.data.load import load_data

    loaded = load_data(data, bundle.manifest, purpose="test")
    order = np.random.default_rng(0).permutation(len(loaded))
    return loaded.x[order], loaded.y[order]


def _accuracy(graph: bytes, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """The accuracy of the nearest class mean: means of the first half of the images, answers to the rest."""
    from protofleet.edge_client.training.onnx_session import open_session

    session, _ = open_session(graph, "features graph")
    z = np.concatenate([session.run(["z"], {"x": images[i : i + 64]})[0] for i in range(0, len(images), 64)])  # (N, D)
    half = len(z) // 2
    present = np.unique(labels[:half])
    if half < 1 or not len(present):
        raise DataError("--data", expected="at least two images", got=len(z))
    means = np.stack([z[:half][labels[:half] == label].mean(axis=0) for label in present])  # (C', D)
    distance = ((z[half:, None, :] - means[None]) ** 2).sum(axis=2)  # (N', C')
    return float((present[distance.argmin(axis=1)] == labels[half:]).mean())


def _expectations(bundle: Bundle, device: Device, precision: str) -> list[str]:
    """Predicted latency in fp32 and in the chosen precision, on the device's main runtime for each."""
    from protofleet.hw_profiles.latency.predict import default_runtime, predict, settings_of
    from protofleet.hw_profiles.workload.constant_folding import fold_weights
    from protofleet.hw_profiles.workload.from_onnx import bundle_workloads

    forward, step = bundle_workloads(bundle)
    inference = fold_weights(forward)
    known = settings_of(device)
    lines = []
    for candidate in dict.fromkeys(("fp32", precision)):
        wanted = "tensorrt" if device.gpu is not None and candidate == "fp16" else None
        if wanted is None and device.cpu is None:
            wanted = "tensorrt"
        options = [r for r, p, _ in known if p == candidate and (wanted is None or r == wanted)]
        preferred = [r for r in (default_runtime(device), "ncnn") if r in options]  # ours first
        runtime = next(iter(preferred or options), None)
        if runtime is None:
            lines.append(f"{candidate}: no runtime of {device.name} can be predicted at it")
            continue
        estimate = predict(inference, device, runtime=runtime, precision=candidate)  # type: ignore[arg-type]
        lines.append(
            f"inference {candidate} on {runtime}: {estimate.ms:.3g} ms, "
            f"{estimate.interval_text()} (predicted, {estimate.support.status}: {estimate.basis}; the model was "
            f"{estimate.error.as_text()})"
        )
    if step is not None and device.cpu is not None:
        estimate = predict(step, device, forward=inference)
        lines.append(
            f"training step, fp32, batch {bundle.manifest.batch}: {estimate.ms:.3g} ms, "
            f"{estimate.interval_text()} (predicted, {estimate.support.status}; the model was "
            f"{estimate.error.as_text()})"
        )
    return lines


def _table_for(bundle: Bundle, bundle_path: Path, device: Device, precision: str) -> Fit:
    from protofleet.hw_profiles.accelerator.scalesim_files import topology_rows, topology_text
    from protofleet.hw_profiles.accelerator.simulate import array_of, simulate
    from protofleet.hw_profiles.reports.subject import bundle_subject

    array = array_of(device, precision=PRECISIONS[precision].on_arrays)
    subject = bundle_subject(bundle, batch=1)
    trains = subject.step is not None and PRECISIONS[precision].trains
    works = [subject.inference, *([subject.derived_step(bundle.manifest.batch)] if trains else [])]
    costs = [simulate(work, array) for work in works]
    path = bundle_path.with_suffix(".gemm.csv")
    rows = topology_rows([layer for cost in costs for layer in cost.layers])
    _write(path, topology_text(rows).encode())
    names = ("inference", f"training step, batch {bundle.manifest.batch}")
    lines = [
        f"{name}: {cost.latency_ms:.3g} ms, {100 * cost.utilisation:.1f} % of the cells used (simulated)"
        for name, cost in zip(names, costs, strict=False)
    ]
    return Fit(precision, path, (f"{len(rows)} matrix products", *lines))


def _write(path: Path, payload: bytes) -> None:
    try:
        with whole_file(path) as file:
            file.write(payload)
    except OSError as error:
        raise StoreError(f"cannot write {path}", expected="a writable path", got=error.strerror) from None


def _with_target(plain: Callable[..., None]) -> Callable[..., None]:
    """The plain export command, with the options of `_options` after its own."""

    def command(**options: Any) -> None:
        target, precision = options.pop("target"), options.pop("precision")
        data, files = options.pop("data"), options.pop("devices_file")
        if target is None and (precision is not None or data is not None):
            raise UsageError(
                "--precision and --data", expected="--target DEVICE", got="none", hint="protofleet profile --list"
            )
        device = None if target is None else find_device(target, load_devices(files or ()))
        chosen = None if device is None else choose_precision(device, precision)
        if chosen == "int8" and data is None and device is not None and device.systolic is None:
            raise UsageError(
                f"--target {target} takes int8", expected="--data to calibrate on", got="none", hint="--precision fp32"
            )
        if data is not None and not data.exists():  # now, not after the export
            raise UsageError(f"--data {data}", expected="images of the classes", got="nothing there")
        plain(**options)
        if device is not None and chosen is not None:
            fit = write_for(Path(options["out"]), device, chosen, data)
            console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=options["quiet"])
            console.print(f"[bold]{device.title}[/bold]: {fit.precision}" + (f", {fit.path}" if fit.path else ""))
            for line in fit.lines:
                console.print(f"  {line}", markup=False)

    own = inspect.signature(plain, eval_str=True).parameters
    extra = inspect.signature(_options, eval_str=True).parameters
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own.values(), *extra.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = plain.__doc__
    return command


def _options(
    target: Annotated[str | None, typer.Option(help="Device to make a graph for: profile --list names them.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, fp16 or int8.  [default: what suits the target]")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Images of the classes, to calibrate int8 and to tell the accuracy's change.")
    ] = None,
    devices_file: Annotated[list[Path] | None, typer.Option(help="Device files of your own (TOML).")] = None,
) -> None:
    """The options that `--target` brings."""


export_command = _with_target(plain_export)
