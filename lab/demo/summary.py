"""`summary.json`, schema `protofleet.demo/4`: everything the report and the table say, in plain values.

Accuracies are fractions, means over devices. Of the test images, `own_classes` are those of the classes that a device
holds, `new_classes` those of the classes that the public images do not show, or, where there are none, that the device
does not hold, `all_classes` all. By way of answering:

- `public_alone`: what the public images teach, without any device; null where there are none;
- `bundle_as_shipped`: what each device says of itself before anything was learned (docs/accuracy.md);
- `local_only`: what a device that was alone answers (`Method.alone_way`);
- `federated`: the method's own inference (FedProto's is eq. 2: the nearest of all global prototypes), after the last of
  its own rounds;
- `closing`: after the closing round, FFC's; of a method that closes runs itself the same as `federated`; null where
  devices have different backbones, or the method has no such round;
- `pooled_ridge`: all devices' images in one place; null as above.

`other_ways` has what the same photos give for more and for fewer bytes, by ways that train nothing.

docs/methods.md lists the keys that a program may read; the others are for the report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.methods import Method, closing_method
from protofleet.contract.methods import method as method_row
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.evaluation import Evaluation
from protofleet.lab.demo.baselines import Beside, Comparison, Evidence
from protofleet.lab.demo.shown_images import held_images, shown_images
from protofleet.lab.demo.story import Images, Prepared

__all__ = ["SCHEMA", "summarise_run"]

SCHEMA = "protofleet.demo/4"
_PARTS = ("own_classes", "new_classes", "all_classes")
_TOLD = ("own_classes", "all_classes")  # by the devices themselves
_WAYS = ("public_alone", "bundle_as_shipped", "local_only", "federated", "closing")


def summarise_run(
    *,
    method: str,
    seed: int,
    images: Images,
    prepared: Sequence[Prepared],
    names: Sequence[str],
    shares: Sequence[LocalData],
    rows: Sequence[NDArray[np.int64]],
    rounds: int,
    evidence: Evidence,
    beside: Beside,
) -> dict[str, Any]:
    """The summary of a run, but for `seconds`, which its caller knows.

    Args:
        prepared: what each device started from.
        rows: of the dealt images, for each device.
    """
    manifest, histories = prepared[0].bundle.manifest, evidence.histories
    row, pooled = method_row(method), beside.pooled
    public = [None] * len(names) if beside.public is None else beside.public
    parts = zip(names, shares, histories, evidence.clients, beside.alone, public, strict=True)
    devices = [_device(*part, row=row, manifest=manifest, images=images) for part in parts]
    accuracy, deviation = _accuracy(devices)
    for part in ("new_classes", "all_classes"):
        accuracy[part]["pooled_ridge"] = None if pooled is None else _pooled_right(images, pooled, shares, part)
    summary = {
        "schema": SCHEMA,
        "dataset": images.name,
        "method": method,
        "clients": len(names),
        "rounds": rounds,
        "accuracy": accuracy,
        "accuracy_std": deviation,
        "other_answers": _other_answers(devices),
        **_uplink([ready.bundle for ready in prepared], row, histories, shares),
        "device_peak_rss_bytes": max(device["peak_rss_bytes"] for device in devices),
        "contributions": {
            "sent": sum(device["sent"] for device in devices),
            "committed": evidence.aggregate["totals"]["committed"],
            "duplicates_refused": evidence.aggregate["totals"]["duplicates"],
        },
        "calibration": evidence.aggregate["calibration"],
        "closing_vs_pooled_ridge": None
        if pooled is None
        else {
            "relative_error": pooled.relative_error,
            "equal_predictions": pooled.equal_predictions,
            "identical_predictions": pooled.equal_predictions == len(images.test),
        },
        "head_columns": closing_method().row_width(closing_method().resolved_in(manifest.hyper), manifest.features),
        "labels": list(images.labels),
        "new_labels": [] if images.public is None else [images.labels[number] for number in np.flatnonzero(images.new)],
        "public_images": 0 if images.public is None else len(images.public),
        "test_images": len(images.test),
        "photos": images.files is not None,
        "shown": shown_images(images, beside.shown, _new_to(images, shares[0])),
        "held": held_images(images, rows),
        "other_ways": [{"way": o.name, "right": o.right, "uplink_bytes": o.uplink_bytes} for o in beside.others],
        "curves": _curves(devices, beside, row.alone_way(manifest.head)),
        "devices": devices,
        "confusion": _confusion(row, row.alone_way(manifest.head), evidence, beside),
        "backbones": [_backbone(ready, prepared.count(ready)) for ready in dict.fromkeys(prepared)],
        "settings": _settings(manifest, seed, images),
        "machine": _machine(evidence),
    }
    return summary | {"notes": notes(summary, row, list(dict.fromkeys(prepared)), images)}


def fedavg_bytes(bundle: Bundle) -> int:
    """What FedAvg would send for this backbone and a linear head, running statistics included: all float32."""
    m = bundle.manifest
    numbers = sum(array.size for name, array in bundle.params.items() if name.startswith("backbone."))
    return 4 * (numbers + m.classes * m.features + m.classes)


def notes(summary: Mapping[str, Any], row: Method, prepared: Sequence[Prepared], images: Images) -> list[str]:
    """What a reader must know before quoting a figure."""
    several = len(prepared) > 1
    lines = [
        f"The {ready.bundle.manifest.backbone if several else 'shared'} backbone was "
        f"{ready.bundle.manifest.provenance}. No weights were downloaded."
        for ready in prepared
    ]
    if several:
        lines.append(
            "Devices have different backbones, so there is no FFC round: sums of features only add up over one "
            "extractor. FedAvg could not run here at all; its bytes are the mean over the devices' networks."
        )
    else:
        lines.append(
            "FFC and pooled ridge use the shared backbone as it was exported: Gram sums of differently trained "
            "networks cannot be added."
        )
    lines += _comparison(summary, row, prepared[0].bundle.manifest) if row.trains else []
    return [
        *lines,
        *_exposed(row, prepared[0].bundle.manifest, summary["devices"]),
        _made(images),
        "One run, one seed, one small data set: differences of a point or two are within the spread.",
        "All processes shared one machine: memory is the peak resident set of a device's process there, no board's. "
        "Bytes are MQTT payloads, without the few bytes of topic and header around them.",
    ]


def _exposed(row: Method, manifest: Manifest, devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a matrix of fewer samples than columns shows."""
    closing = row if row.closes_runs else closing_method()
    columns = closing.row_width(closing.resolved_in(manifest.hyper), manifest.features)
    fewest = min(device["samples"] for device in devices)
    if (
        not (row.closes_runs or row.trains)
        or fewest >= columns
        or closing.mechanism(closing.resolved_in(manifest.hyper))
    ):
        return []
    return [
        f"A device of {fewest} images sent a matrix of {columns:,} columns. Of so few images it can show which are in "
        "it: docs/security.md measures that, and says how to send noised or blinded sums."
    ]


def _made(images: Images) -> str:
    """What the story is not."""
    told = "The story is made: " + ("" if images.public is None else "every other class is public, and ")
    left = f" {images.unused:,} training images were left unused, so that this takes seconds." if images.unused else ""
    return f"{told}each device is dealt a few classes, evenly.{left}"


def _new_to(images: Images, share: LocalData) -> NDArray[np.bool_]:
    """(C,) the classes that the public images do not show; without public images those that the device does not
    hold."""
    return share.counts(images.classes) == 0 if images.public is None else images.new


def _pooled_right(images: Images, pooled: Comparison, shares: Sequence[LocalData], part: str) -> float | None:
    """The share of right answers of the pooled solution, mean over devices: what is new may differ between them."""
    counts = _counted(images, pooled.answers)
    found = [_right(counts, s.counts(images.classes) > 0, _new_to(images, s)).get(part) for s in shares]
    return None if None in found else float(np.mean([one for one in found if one is not None]))


def _comparison(summary: Mapping[str, Any], row: Method, manifest: Manifest) -> list[str]:
    """How the method did against local only, and what its numbers are not."""
    own, others = summary["accuracy"]["own_classes"], summary["other_answers"]
    federated, alone = own["federated"], own["local_only"]
    verdict = "equal to" if federated == alone else "above" if federated > alone else "below"
    first = f"On own classes {row.title} is {verdict} local only in this run: {federated:.1%} against {alone:.1%}."
    if row.way == "prototype":
        first += (
            " It answers among all classes here; among a device's own classes only, as FedProto's public code does, "
        )
        first += f"it reaches {others['prototype_among_own']['own_classes']:.1%}"
        first += f", and the device's own head {others['head']['own_classes']:.1%}." if "head" in others else "."
    lines = [first, "Local only trains the same number of epochs, from the same weights, on the same batches."]
    if manifest.head == "local":
        lines[-1] += (
            " The bundle's head starts untrained for both, so a device alone never learns to answer with a class that "
            "it has not seen."
        )
    if not row.shares:
        lines.append(
            f"In a round of {row.title} a device sends only that it took part, so until FFC it is local only. The "
            "paper averages weights in those rounds; here no weights travel, and the lab has the averaged method."
        )
    if "noise" in manifest.hyper:
        noise = float(manifest.hyper["noise"])
        lines.append(
            f"The Gaussian mechanism has noise multiplier {noise:g}."
            if noise
            else "The Gaussian mechanism is off (noise = 0): what was sent is not differentially private."
        )
    if "noise_multiplier" in manifest.hyper:
        multiplier = float(manifest.hyper["noise_multiplier"])
        lines.append(f"What a device sends carries Gaussian noise of multiplier {multiplier:g}.")
    return lines


def _device(
    name: str,
    share: LocalData,
    history: Sequence[Mapping[str, Any]],
    client: Mapping[str, Any],
    alone: Evaluation,
    public: NDArray[np.int64] | None,
    *,
    row: Method,
    manifest: Manifest,
    images: Images,
) -> dict[str, Any]:
    own = [line for line in history if line["method"] == row.name]
    closed = [line for line in history if line["method"] == closing_method().name]
    way, trained = row.way, own if row.trains else []
    own_classes, new = share.counts(manifest.classes) > 0, _new_to(images, share)
    counts = {
        "public_alone": None if public is None else _counted(images, public),
        "local_only": alone.confusion[row.alone_way(manifest.head)],
        "federated": own[-1]["confusion"][way],
        "closing": closed[-1]["confusion"]["linear"] if closed else None,
    }
    right = {name: _right(table, own_classes, new) for name, table in counts.items()}
    right["bundle_as_shipped"] = {"all_classes": (history[-1]["right"] or {}).get("shipped")}
    return {
        "id": name,
        "samples": len(share),
        "samples_per_class": share.counts(manifest.classes).tolist(),
        "accuracy": {part: {way: right[way].get(part) for way in _WAYS} for part in _PARTS},
        "extra": {part: dict(trained[-1]["accuracy"][part]) if trained else {} for part in _TOLD},
        "curve": [
            {"round": line["round"], "loss": line.get("loss")}
            | {part: {"federated": _right(line["confusion"][way], own_classes, new).get(part)} for part in _PARTS}
            for line in trained
        ],
        "sent": client["contributions"]["sent"],
        "committed": client["contributions"]["committed"],
        "uplink_bytes": sum(line["uplink_bytes"] for line in history),
        "peak_rss_bytes": client["peak_rss_bytes"],
        "step_ms": client["step_ms"],
    }


def _counted(images: Images, answers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Confusion counts (C, C) of answers (N,) about the test images."""
    counts = np.zeros((images.classes, images.classes), np.int64)
    np.add.at(counts, (images.test.y, answers), 1)
    return counts


def _right(counts: Any, own_classes: NDArray[np.bool_], new: NDArray[np.bool_]) -> dict[str, float]:
    """Which share of the test images is answered right, by part; nothing for a part without test images.

    Args:
        counts: (C, C), rows true; None for a way that there is not.
    """
    if counts is None:
        return {}
    table = np.asarray(counts)
    parts = {"own_classes": own_classes, "new_classes": new, "all_classes": np.ones(len(table), bool)}
    asked = {part: int(table[rows].sum()) for part, rows in parts.items()}
    return {part: float(np.diag(table)[parts[part]].sum() / asked[part]) for part in parts if asked[part]}


def _accuracy(devices: Sequence[Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Mean and standard deviation over devices, by part and way; None for a way that the run does not have."""
    mean: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    deviation: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for part in _PARTS:
        for way in devices[0]["accuracy"][part]:
            values = [device["accuracy"][part][way] for device in devices]
            absent = None in values
            mean[part][way] = None if absent else float(np.mean(values))
            deviation[part][way] = None if absent else float(np.std(values))
    return mean, deviation


def _other_answers(devices: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By every way that was measured in the method's last own round: the mean over devices, by part."""
    return {
        way: {part: float(np.mean([device["extra"][part][way] for device in devices])) for part in devices[0]["extra"]}
        for way in devices[0]["extra"]["all_classes"]
    }


def _curves(devices: Sequence[Mapping[str, Any]], beside: Beside, alone: str) -> list[dict[str, Any]]:
    """By round: the mean over devices of local only and federated."""
    return [
        {"round": record.round}
        | {
            part: {
                "local_only": getattr(record, part)[alone],
                "federated": float(np.mean([device["curve"][index][part]["federated"] for device in devices])),
            }
            for part in _TOLD
        }
        for index, record in enumerate(beside.records)
    ]


def _confusion(row: Method, alone: str, evidence: Evidence, beside: Beside) -> dict[str, Any]:
    """(C, C) counts summed over devices; the closing round's once, since it answers the same on every device."""
    closed = [line for line in evidence.histories[0] if line["method"] == closing_method().name]
    counts: NDArray[np.int64] = np.sum([evaluation.confusion[alone] for evaluation in beside.alone], axis=0)
    tables = {"local_only": counts.tolist()}
    if closed:
        tables["closing"] = closed[-1]["confusion"]["linear"]
    last = [[line for line in history if line["method"] == row.name][-1] for history in evidence.histories]
    answers: NDArray[np.int64] = np.sum([line["confusion"][row.way] for line in last], axis=0)
    tables["federated"] = answers.tolist()
    return tables


def _uplink(
    bundles: Sequence[Bundle], row: Method, histories: Sequence[list[dict[str, Any]]], shares: Sequence[LocalData]
) -> dict[str, Any]:
    """Payload bytes from one device: in a round of the method, in the closing round, and what FedAvg's would be."""
    lines = [line for history in histories for line in history]
    closing = [line["uplink_bytes"] for line in lines if line["method"] == closing_method().name]
    up = float(np.mean([line["uplink_bytes"] for line in lines if line["method"] == row.name]))
    fedavg = float(np.mean([fedavg_bytes(bundle) for bundle in bundles]))
    return {
        "uplink_bytes_per_device_round": up,
        "fedavg_bytes_per_device_round": fedavg,
        "uplink_share": up / fedavg,
        "closing_uplink_bytes_per_device": float(np.mean(closing)) if closing else None,
        "message_overhead_bytes": _overhead(histories, shares, bundles[0].manifest),
    }


def _overhead(histories: Sequence[list[dict[str, Any]]], shares: Sequence[LocalData], manifest: Manifest) -> int | None:
    """The largest message's bytes beyond its raw tensors, in rounds that send class rows: float32 rows, counts in the
    narrowest integer."""
    row = method_row(manifest.method)
    if row.statistic.has_triangle() or not row.statistic.row_fields():
        return None
    width = row.row_width(row.resolved_in(manifest.hyper), manifest.features)
    numbers = row.statistic.numbers(manifest.classes, width) // manifest.classes
    overheads = []
    for history, share in zip(histories, shares, strict=True):
        class_counts = share.counts(manifest.classes)
        count = next(size for size in (1, 2, 4, 8) if int(class_counts.max()) < 2 ** (8 * size))
        raw = int((class_counts > 0).sum()) * (4 * numbers + count)
        overheads += [line["uplink_bytes"] - raw for line in history if line["method"] == row.name]
    return max(overheads, default=None)


def _backbone(prepared: Prepared, devices: int) -> dict[str, Any]:
    m = prepared.bundle.manifest
    return {
        "name": m.backbone,
        "devices": devices,
        "parameters": fedavg_bytes(prepared.bundle) // 4,
        "features": m.features,
        "provenance": m.provenance,
        "bundle": prepared.bundle.sha256.hex(),
    }


def _machine(evidence: Evidence) -> dict[str, Any]:
    client = evidence.clients[0]
    return {"board": client["board"], "cores": os.cpu_count(), "versions": dict(client["versions"])}


def _settings(manifest: Manifest, seed: int, images: Images) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": f"{manifest.method}, head {manifest.head}", "batch": manifest.batch}
    settings |= dict(manifest.hyper)
    known = {} if images.public is None else {"public images": len(images.public)}
    return settings | known | {"seed": seed}
