"""`protofleet inspect FILE`: what a bundle, a message from the wire, or the ledger of a device holds.

1. The first bytes tell which kind the file is. A state directory means the ledger in it (`inspect_ledger.py`).
2. The file is read with the same checks as on a device, so that the output can be trusted.
3. The facts are gathered as plain values (`describe_bundle`, `describe_message`).
4. They are shown as tables for a person, or as JSON.

It needs neither torch nor onnx: the graphs are named and hashed, not opened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protofleet.commands.inspect_ledger import describe_ledger, is_ledger, show_ledger
from protofleet.contract.bundle.bundle_file import Manifest, read_bundle
from protofleet.contract.bundle.uplink_bytes import rungs, uplink_bytes
from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.methods import LOAD_HELP, METHODS, load_method
from protofleet.contract.printable import printable
from protofleet.contract.wire.codec import MAX_MESSAGE_BYTES, decode
from protofleet.contract.wire.fields import Part
from protofleet.contract.wire.messages import ClassRows, Message, Signed
from protofleet.edge_client.privacy.accountant import Accountant, cost_of

__all__ = ["describe_bundle", "describe_message", "inspect_command"]

SCHEMA = "protofleet.inspect/1"
_ZIP = b"PK\x03\x04"
_SHOWN_LABELS = 12


def inspect_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .bundle file, one message's payload, saved as it came, or a device's state directory or ledger."
        ),
    ],
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the facts"))] = None,
) -> None:
    """Show what a bundle or a message holds, after checking it as a device would, or what has left a device."""
    if method is not None:
        load_method(method)
    facts = _facts(file)
    write_json(json, facts)  # before it is shown: whoever reads along may leave (`| head`)
    console = beside(json, highlight=False)
    {"ledger": show_ledger, "bundle": _show_bundle}.get(facts["kind"], _show_message)(facts, console)


def _facts(file: Path) -> dict[str, Any]:
    if is_ledger(file):
        return {"schema": SCHEMA, **describe_ledger(file)}
    if _looks_like_a_bundle(file):
        return describe_bundle(file)
    try:
        payload = file.read_bytes() if file.stat().st_size <= MAX_MESSAGE_BYTES else b""
        return describe_message(decode(payload), payload)
    except (OSError, WireError) as error:
        raise UsageError(
            str(file), expected="a bundle (a zip archive) or one wire message", got=f"neither ({error})"
        ) from None


def _looks_like_a_bundle(file: Path) -> bool:
    """By its name or its first bytes. True also for a file that cannot be opened: the bundle reader says why."""
    try:
        with file.open("rb") if file.is_file() else io.BytesIO(_ZIP) as stream:
            return file.suffix == ".bundle" or stream.read(len(_ZIP)) == _ZIP
    except OSError:
        return True


# ── the facts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def describe_bundle(file: Path) -> dict[str, Any]:
    """The facts about a bundle as values for JSON, after every hash in it has been checked.

    Raises:
        BundleError: as `read_bundle` does.
    """
    bundle = read_bundle(file)
    m = bundle.manifest
    row = METHODS[m.method]
    return {
        "schema": SCHEMA,
        "kind": "bundle",
        "sha256": bundle.sha256.hex(),
        "bytes": file.stat().st_size,
        "signed": bundle.signed,
        "version": m.version,
        "protofleet": m.protofleet,
        "backbone": m.backbone,
        "provenance": m.provenance,
        "method": m.method,
        "source": row.source,
        "head": m.head,
        "inference": row.inference,
        "hyper": {name: _hyper(m, name) for name in m.hyper},
        "release": _release(m),
        "labels": list(m.labels),
        "extends": [{"sha256": older.sha256, "classes": older.classes} for older in m.extends],
        "features": m.features,
        "input_shape": list(m.input_shape),
        "mean": list(m.mean),
        "std": list(m.std),
        "batch": m.batch,
        "micro_batch": m.micro_batch,
        "parts_note": m.parts_note,
        "opset": m.opset,
        "parameters": {role: _numbers(m, role) for role in ("param", "buffer", "frozen", "trunk", "optimizer")},
        "cut": [{"name": tensor.name, "shape": list(tensor.shape)} for tensor in m.cut],
        "members": _members(file, m),
        "uplink_bytes_per_round": uplink_bytes(m),
        "uplink_without_training": [rung.as_json() for rung in rungs(m)],
    }


def _batch_in_words(facts: dict[str, Any]) -> str:
    return f"B = {facts['batch']}" + (f", or {facts['micro_batch']} at a time" if facts["micro_batch"] else "")


def _hyper(m: Manifest, name: str) -> dict[str, Any]:
    known = METHODS[m.method].hyper[name]
    changed = m.hyper[name] != known.default
    return {"value": m.hyper[name], "default": known.default, "changed": changed, "source": known.source}


def _release(m: Manifest) -> dict[str, Any] | None:
    """ε of one release by neighbouring relation, where noise gives one that is the same whatever a device holds."""
    mechanism, delta = METHODS[m.method].mechanism(m.hyper), m.hyper.get("delta")
    if mechanism is None or delta is None:
        return None
    one, two = (np.full(len(m.labels), samples) for samples in (1, 2))
    release, cost = mechanism.release(one), cost_of(mechanism, one)
    if release != mechanism.release(two) or not release.covers_all:
        return None
    accountant = Accountant(float(delta))
    costs = {"add-remove": cost.add_remove, "replace": cost.replace}
    try:
        return {"delta": delta} | {name: None if c is None else accountant.epsilon(c) for name, c in costs.items()}
    except UsageError as error:  # without the extra `privacy`
        return {"delta": delta, **dict.fromkeys(costs), "why": str(error)}


def _release_in_words(release: dict[str, Any]) -> str:
    if "why" in release:
        return f"with noise; {release['why']}"
    told = {"add-remove": "for one photo more or fewer", "replace": "for one replaced"}
    known = [f"ε = {release[name]:.3g} {words}" for name, words in told.items() if release[name] is not None]
    return f"{', '.join(known) or 'no ε'} at δ = {release['delta']:g}"


def _numbers(m: Manifest, role: str) -> int:
    return sum(int(np.prod(tensor.shape)) for tensor in m.state if tensor.role == role)


def _members(file: Path, m: Manifest) -> list[dict[str, Any]]:
    with zipfile.ZipFile(file) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    return [{"name": name, "sha256": sha256, "bytes": sizes[name]} for name, sha256 in sorted(m.members.items())]


def describe_message(message: Message, payload: bytes) -> dict[str, Any]:
    """The content of a message as values for JSON. Arrays are described by shape, type and range.

    Of a signed message: the message inside, and the name of the key. The signature itself is not checked.
    """
    fields: dict[str, Any] = {}
    if isinstance(message, Signed):
        fields["signed_with"] = message.key_id.hex()
        message = decode(message.payload)
    for name, value in _fields(message).items():
        if isinstance(value, ClassRows):
            fields["classes"], fields["rows"] = _array(value.classes), _array(value.rows)
        else:
            fields[name] = _plain_value(value)
    return {
        "schema": SCHEMA,
        "kind": "message",
        "type": type(message).__name__,
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "fields": fields,
    }


def _fields(part: Part) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}  # type: ignore[arg-type]


def _plain_value(value: Any) -> Any:
    """Bytes become hexadecimal and arrays their shape and range, also inside tuples and dictionaries."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, Part):
        value = _fields(value)
    if isinstance(value, dict):
        return {name: _plain_value(item) for name, item in value.items()}
    return value.hex() if isinstance(value, bytes) else value


def _array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    low, high = (value.min().item(), value.max().item()) if value.size else (None, None)
    return {"shape": list(value.shape), "dtype": str(value.dtype), "min": low, "max": high}


# ── shown to a person ───────────────────────────────────────────────────────────────────────────────────────────────


def _cut_in_words(cut: list[dict[str, Any]]) -> str:
    shapes = " and ".join(" x ".join(map(str, tensor["shape"])) for tensor in cut)
    size = 4 * sum(int(np.prod(tensor["shape"])) for tensor in cut)
    return f"the tail alone, from activations of {shapes}: {size / 1e3:,.1f} kB a photo, computed once"


def _parameters_in_words(counts: dict[str, int], trains: bool) -> str:
    fixed = counts["frozen"] + counts["trunk"]
    line = f"{counts['param']:,} trained, {fixed:,} frozen" if trains else f"{counts['param'] + fixed:,}, none trained"
    line += f", {counts['buffer']:,} running statistics"
    line += f", {counts['optimizer']:,} optimizer state" if trains else ""
    return f"{line}; {4 * sum(counts.values()):,} bytes as float32"


def _show_bundle(facts: dict[str, Any], console: Console) -> None:
    height, width, channels = facts["input_shape"]
    trains = any(member["name"] == "train_step.onnx" for member in facts["members"])
    signed = "yes (the signature is checked where a key is trusted)" if facts["signed"] else "no"
    _show_facts(
        console,
        f"bundle of {facts['backbone']} for {facts['method']}",
        {
            "sha256": facts["sha256"],
            "size": f"{facts['bytes']:,} bytes",
            "version": f"{facts['version']}, written by protofleet {facts['protofleet']}",
            "signed": signed,
            "method": f"{facts['method']}: {facts['source']}",
            "head": f"{facts['head']}; a device answers by {facts['inference']}",
            "weights": facts["provenance"],
            "images": f"{height} x {width} x {channels}, uint8, normalised inside by mean {facts['mean']} "
            f"and std {facts['std']}",
            "features": f"D = {facts['features']}",
            "labels": f"C = {len(facts['labels'])}: {_some(facts['labels'])}",
            "training batch" if trains else "batch": f"{_batch_in_words(facts)}, ONNX opset {facts['opset']}",
            **({"one release": _release_in_words(facts["release"])} if facts["release"] else {}),
            **({"note": facts["parts_note"]} if facts["parts_note"] else {}),
            **({"trained": _cut_in_words(facts["cut"])} if facts["cut"] else {}),
            "parameters": _parameters_in_words(facts["parameters"], trains),
        },
    )
    _show_table(
        console,
        "hyper-parameters",
        ("name", "value", "", "source of the default"),
        [
            (name, f"{h['value']}", f"changed from {h['default']}" if h["changed"] else "default", h["source"])
            for name, h in facts["hyper"].items()
        ],
    )
    _show_table(
        console,
        "members, each as its hash says",
        ("name", "bytes", "sha256"),
        [(m["name"], f"{m['bytes']:,}", m["sha256"][:16] + "…") for m in facts["members"]],
    )
    _show_uplink(facts, console)


def _show_uplink(facts: dict[str, Any], console: Console) -> None:
    """Show the bundle's own method, every way without training, and FedAvg, fewest bytes first."""
    once = {rung["way"]: rung["bytes"] for rung in facts["uplink_without_training"]}
    rounds = {name: size for name, size in facts["uplink_bytes_per_round"].items() if name not in once}
    fedavg = rounds["fedavg"]
    _show_table(
        console,
        "up per device and round, with every class present",
        ("round", "payload bytes", "of FedAvg"),
        [
            (name, "more than a message holds", "")
            if size is None
            else (name, f"{size:,}", f"{size / fedavg:.2%}" if fedavg else "")
            for name, size in sorted((rounds | once).items(), key=lambda item: item[1] or math.inf)
        ],
    )
    names = ", ".join(dict.fromkeys(rung["method"] for rung in facts["uplink_without_training"]))
    line = f"{names}: one round, without training, on any bundle; protofleet advise measures them on your photos"
    console.print(printable(line), style="dim", markup=False)


def _show_message(facts: dict[str, Any], console: Console) -> None:
    shown = {"sha256": facts["sha256"], "size": f"{facts['bytes']:,} bytes"}
    for name, value in facts["fields"].items():
        shown[name] = _array_line(value) if isinstance(value, dict) and "dtype" in value else str(value)
    _show_facts(console, f"message: {facts['type']}", shown)


def _array_line(array: dict[str, Any]) -> str:
    shape = " x ".join(str(size) for size in array["shape"])
    return f"{array['dtype']} [{shape}] from {array['min']} to {array['max']}"


def _some(labels: list[str]) -> str:
    more = len(labels) - _SHOWN_LABELS
    return ", ".join(labels[:_SHOWN_LABELS]) + (f", and {more} more" if more > 0 else "")


def _show_facts(console: Console, title: str, facts: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _plain(value))
    console.print(Text(printable(title), style="bold"), table, sep="\n")


def _show_table(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if "bytes" in column or column == "of FedAvg" else "left")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    if rows:
        console.print(f"\n[bold]{title}[/bold]", table, sep="\n")


def _plain(text: str) -> Text:
    """Text from a file, without control characters that could style or move the terminal."""
    return Text(printable(text))
