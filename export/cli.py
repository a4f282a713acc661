"""The command `protofleet export`: options in, one bundle out.

1. It turns the texts of the options into values.
2. It calls `build_bundle`, with a line of progress for each stage on standard error.
3. It prints a summary: size, feature width, parameters, how far the graphs are from torch, and the time it took.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofleet.contract.bundle.bundle_file import Manifest, read_bundle
from protofleet.contract.bundle.class_names import check_names, check_typed
from protofleet.contract.bundle.shipped_extractor import PHOTOS, photos_bundle
from protofleet.contract.console.interrupt import interruptible
from protofleet.contract.console.verbosity import QUIET_HELP, VERBOSE_HELP, check_loudness
from protofleet.contract.errors import UsageError
from protofleet.contract.identity.signing_keys import read_private_key
from protofleet.contract.methods import METHOD_HELP, Head
from protofleet.contract.methods import method as known_method
from protofleet.contract.names import known
from protofleet.export.backbones.backbone_names import check_backbone_name, check_weights_name
from protofleet.export.bundles.extend import Extension, extend_bundle
from protofleet.export.bundles.fleet_bundle import FleetBundle, fleet_bundle

__all__ = ["export_command", "read_shape"]

BACKBONE_HELP = (
    "A known backbone, timm:NAME, torchvision:NAME, hub:ORG/NAME, onnx:FILE, or your own module:callable; "
    "without torch: photos, the shipped extractor, or that of a FILE.bundle."
)
TRAIN_FROM_HELP = "Train this layer and what comes after it; what lies before it is frozen.  [default: all is trained]"
EXTEND_HELP = "Add --classes +NAME,… to this bundle, whose extractor and method stay as they are."
BLOCKS_HELP = "Train the last K blocks of the network; what lies before them is frozen."
FOR_X86_HELP = "Add forms of the training step for x86 devices, which take one where it is faster."
FOR_KERNELS_HELP = "Add the form of the training step that devices with protofleet-kernels try."
MICRO_HELP = "Also graphs that train a batch in parts of N, for devices with little memory.  [default: none]"
HALF_HELP = "Store the weights as float16, which halves the bundle; for methods that train nothing."
WEIGHTS_HELP = "pretrained, for those that the library publishes; or safetensors or a torch state dict."


# arguments: each is an option, as typer reads them
def export_command(
    classes: Annotated[str, typer.Option(help="How many, or their names: cat,dog,…; with --extend: +hamster,…")],
    out: Annotated[str, typer.Option(help="The bundle to write.")],
    backbone: Annotated[str | None, typer.Option(help=BACKBONE_HELP)] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    extend: Annotated[str | None, typer.Option(metavar="BUNDLE", help=EXTEND_HELP)] = None,
    input: Annotated[
        str | None,
        typer.Option(help="Size of the uint8 images: HxWxc.  [default: what a library's network is used to]"),
    ] = None,
    weights: Annotated[str | None, typer.Option(help=WEIGHTS_HELP)] = None,
    head: Annotated[str | None, typer.Option(help="local, frozen or none.  [default: the method's]")] = None,
    norm: Annotated[str | None, typer.Option(help="batch or group.  [default: the backbone's]")] = None,
    train_from: Annotated[str | None, typer.Option(metavar="LAYER", help=TRAIN_FROM_HELP)] = None,
    trainable_blocks: Annotated[int | None, typer.Option(metavar="K", help=BLOCKS_HELP)] = None,
    batch: Annotated[int | None, typer.Option(help="Batch of the training step.  [default: 16]")] = None,
    for_x86: Annotated[bool | None, typer.Option("--for-x86", help=FOR_X86_HELP)] = None,
    for_kernels: Annotated[bool | None, typer.Option("--for-kernels", help=FOR_KERNELS_HELP)] = None,
    micro_batch: Annotated[int | None, typer.Option(metavar="N", help=MICRO_HELP)] = None,
    half_weights: Annotated[bool | None, typer.Option("--half-weights", help=HALF_HELP)] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A hyper-parameter; may be repeated.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Of x/255, per channel: m or m,m,m.  [default: the backbone's]")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Of x/255, per channel.  [default: the backbone's]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and of a frozen head.  [default: 0]")] = None,
    provenance: Annotated[str | None, typer.Option(help="How the weights were obtained, in words.")] = None,
    bundle_version: Annotated[
        int | None,
        typer.Option(help="Must grow with each export for one fleet.  [default: 1; with --extend one more]"),
    ] = None,
    sign: Annotated[str | None, typer.Option(help="Ed25519 private key to sign with: PEM, hex or 32 bytes.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("each step's seconds, and all that is ignored"))
    ] = False,
) -> None:
    """Turn a backbone and a method into one bundle file, or add classes to one."""
    given = dict(locals())
    check_loudness(quiet, verbose)
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    if extend is not None:
        _refuse_beside_extend(given)
        versioned = {
            "provenance": provenance,
            "bundle_version": bundle_version,
            "private_key": None if sign is None else read_private_key(sign),
        }
        with interruptible():
            extension = extend_bundle(extend, _added(classes), _writable(out), **versioned)  # type: ignore[arg-type]
        _tell_extension(extension, extend, console)
        return
    if backbone is None or method is None:
        missing = "--backbone" if backbone is None else "--method"
        raise UsageError(missing, expected="a value", got="none", hint="protofleet export --help")
    known_method(method)  # before torch, which takes seconds, as all that follows
    if is_bundle(backbone):
        _refuse_beside_bundle(given)
        source = read_bundle(photos_bundle() if backbone == PHOTOS else backbone)
        written = fleet_bundle(
            source,
            _labels(classes),
            _writable(out),
            method_name=method,
            hyper=_pairs(set or []),
            provenance=provenance,
            bundle_version=1 if bundle_version is None else bundle_version,
            private_key=None if sign is None else read_private_key(sign),
        )
        _tell_fleet_bundle(written, backbone, console)
        return
    check_backbone_name(backbone)
    if weights is not None:
        check_weights_name(weights, backbone)
    arguments = {
        "backbone": backbone,
        "method_name": method,
        "labels": _labels(classes),
        "input_shape": None if input is None else read_shape(input),
        "out": _writable(out),
        "weights": weights,
        "head": _one_of("--head", head, get_args(Head)),
        "norm": _one_of("--norm", norm, ("batch", "group")),
        "hyper": _pairs(set or []),
        "batch": 16 if batch is None else batch,
        "seed": _seed(seed or 0),
        "provenance": provenance,
        "bundle_version": 1 if bundle_version is None else bundle_version,
        "private_key": None if sign is None else read_private_key(sign),
        "train_from": train_from,
        "trainable_blocks": trainable_blocks,
        "for_x86": bool(for_x86),
        "for_kernels": bool(for_kernels),
        "micro_batch": micro_batch or 0,
        "half_weights": bool(half_weights),
    }
    arguments |= {"mean": _numbers("--mean", mean), "std": _numbers("--std", std)}
    console.print("loading torch", style="dim")
    from protofleet.export.bundles.build import (
        build_bundle,  # torch takes seconds; wrong options are answered before it loads
    )

    with interruptible():  # a half-written bundle is removed
        exported = build_bundle(**arguments, progress=lambda line: console.print(line, style="dim", markup=False))
    _summarise(exported, console, verbose)
    if exported.manifest.parts_note:
        console.print(f"[yellow]note[/yellow]: {_parts_note(exported.manifest, weights)}")


def _parts_note(manifest: Manifest, weights: str | None) -> str:
    """What parts of a batch change, and the option that avoids it, which given weights do not have."""
    return manifest.parts_note + ("; --norm group has none of it" if weights is None else "")


def _refuse_beside_extend(given: dict[str, object]) -> None:
    """All but the classes comes from the bundle that is extended."""
    own = ("extend", "classes", "out", "provenance", "bundle_version", "sign", "quiet", "verbose")
    for name in (name for name, value in given.items() if name not in own and value is not None):
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option} with --extend", expected="one of them", got="both: all but classes stays as it is")


def is_bundle(backbone: str) -> bool:
    """Whether `--backbone` names a bundle whose extractor is taken."""
    return backbone == PHOTOS or backbone.endswith(".bundle")


def _refuse_beside_bundle(given: dict[str, object]) -> None:
    """The extractor is there already: nothing of it can be chosen."""
    own = ("backbone", "method", "classes", "out", "set", "provenance", "bundle_version", "sign", "quiet", "verbose")
    for name in (name for name, value in given.items() if name not in own and value is not None):
        option, backbone = f"--{name.replace('_', '-')}", given["backbone"]
        raise UsageError(option, expected=f"none with --backbone {backbone}", got="one: the extractor stays as it is")


def _tell_fleet_bundle(written: FleetBundle, backbone: str, console: Console) -> None:
    m, path = written.manifest, written.path
    table = Table.grid(padding=(0, 2))
    rows = {
        "bundle": f"{path}  {path.stat().st_size / 1e6:.2f} MB  sha256 {written.sha256.hex()[:12]}…",
        "extractor": f"{m.extractor[:12]}… of {backbone}",
        "method": f"{m.method}, C = {m.classes}, D = {m.features}",
        "weights": m.provenance,
        "images": "{}x{}x{}".format(*m.input_shape),
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)


def _added(text: str) -> list[str]:
    """`+hamster,+mouse` → these."""
    names = [name.strip() for name in text.split(",")]
    if not all(name.startswith("+") and name[1:].strip() for name in names):
        raise UsageError(
            "--classes with --extend", expected="+ before each new name", got=text, hint="--classes +hamster,+mouse"
        )
    added = [name[1:].strip() for name in names]
    check_typed(added, "--classes with --extend, after the first +")
    return added


def _tell_extension(extension: Extension, old: str, console: Console) -> None:
    m = extension.manifest
    table = Table.grid(padding=(0, 2))
    first = m.extended[extension.extended]
    path = extension.path
    rows = {
        "bundle": f"{path}  {path.stat().st_size / 1e6:.2f} MB  sha256 {extension.sha256.hex()[:12]}…",
        "extends": f"{old}  sha256 {extension.extended.hex()[:12]}…",
        "extractor": f"{m.extractor[:12]}… of both",
        "classes": f"{m.classes}: the first {first} as they were, then {', '.join(m.labels[first:])}",
        "version": f"{m.version}",
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)
    if extension.unsigned:
        console.print(f"[yellow]note[/yellow]: {escape(old)} is signed and this one is not: --sign KEY signs it")


def _summarise(exported, console: Console, verbose: bool) -> None:  # type: ignore[no-untyped-def]
    manifest, agreement = exported.manifest, exported.agreement
    if exported.ignored:
        shown = exported.ignored if verbose else exported.ignored[:4]
        names = ", ".join(shown) + (", …" if len(exported.ignored) > len(shown) else "")
        console.print(f"ignored in the weights file: {names}", markup=False)
    table = Table.grid(padding=(0, 2))
    rows = {
        "bundle": f"{exported.path}  {exported.bundle_bytes / 1e6:.2f} MB  sha256 {exported.sha256.hex()[:12]}…",
        "method": f"{manifest.method}, {manifest.head} head, C = {manifest.classes}, D = {manifest.features}",
        "weights": manifest.provenance.partition("; off while")[0],
        "images": "{}x{}x{}".format(*manifest.input_shape),
        "parameters": f"{manifest.parameter_count:,}",
        "training step": _step_in_words(manifest) if "train_step" in exported.seconds else "none: nothing is trained",
        **({"switched off": ", ".join(exported.switched_off)} if exported.switched_off else {}),
        "against torch": f"worst relative difference {agreement.error:.1e} ({agreement.tensor}; torch's own rounding "
        f"{agreement.torch_error:.1e})",
        "seconds": f"{sum(exported.seconds.values()):.1f}",
        **({f"  {step}": f"{seconds:.2f}" for step, seconds in exported.seconds.items()} if verbose else {}),
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)


def _step_in_words(manifest: Manifest) -> str:
    parts = f", or {manifest.micro_batch} at a time" if manifest.micro_batch else ""
    if not manifest.cut:
        return f"batch {manifest.batch}{parts}"
    activations = f"activations of a photo {manifest.activation_bytes / 1e3:,.1f} kB"
    return f"batch {manifest.batch}{parts}, the tail alone; {activations}, computed once"


def _labels(text: str) -> list[str]:
    """`10` → 0 … 9; `cat,dog` → these."""
    if text.isdigit():
        count = int(text)
        if not 2 <= count <= 65_535:
            raise UsageError("--classes", expected="2 to 65535 classes", got=text)
        return [str(i) for i in range(count)]
    names = [name.strip() for name in text.split(",")]
    if len(names) < 2 or not all(names):
        raise UsageError("--classes", expected="a number, or names separated by commas", got=text, hint="cat,dog")
    check_names(names)
    check_typed(names, hint="--extend BUNDLE, to which +NAME adds a class")
    return names


def read_shape(text: str) -> tuple[int, int, int]:
    """`28x28x1` → (28, 28, 1): height, width, channels.

    Raises:
        UsageError: when it is none.
    """
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdigit() and 1 <= int(p) <= 4096 for p in parts):
        raise UsageError("--input", expected="HxWxc", got=text, hint="28x28x1 or 224x224x3")
    height, width, channels = (int(p) for p in parts)
    return height, width, channels


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise UsageError("--set", expected="key=value", got=text, hint="--set lr=0.05")
        pairs[key.strip()] = value.strip()
    return pairs


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """One number for every channel, or one per channel."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(option, expected="numbers separated by commas", got=text, hint=f"{option} 0.5") from None


def _one_of(option: str, value: str | None, names: tuple[str, ...]) -> str | None:
    return None if value is None else known(names, value, option)


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise UsageError("--seed", expected="0 or more", got=seed)
    return seed


def _writable(out: str) -> str:
    """Refuse an impossible --out before the minutes of work, not after."""
    path = Path(out)
    if path.is_dir():
        raise UsageError("--out", expected="a file", got=f"the directory {out}", hint=f"{path / 'fleet.bundle'}")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            "--out", expected="an existing directory", got=str(path.parent), hint=f"mkdir -p {path.parent}"
        )
    return out
