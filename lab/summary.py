"""`summary.json`, schema `protofleet.demo/1`: everything the report and the table say, in plain values.

Accuracies are fractions. `own_classes` are the test images of the classes that a device holds, `all_classes` all test
images; each is the mean over devices. Under `accuracy`, `federated` is FedProto's own inference (eq. 2: the nearest of
all global prototypes), or the FFC head for a method that only calibrates; `local_only` is the head of a device that
trained alone. The keys of DESIGN section 6 stand at the top level; the others are there for the report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Bundle, Manifest
from edge_client.data import LocalData
from edge_client.evaluate import Evaluation
from lab.datasets import DataSet
from lab.outcome import Beside, Evidence
from lab.prepare import Division, Prepared

__all__ = ["SCHEMA", "summarise_run"]

SCHEMA = "protofleet.demo/1"
_PARTS = ("own_classes", "all_classes")


def summarise_run(
    *,
    method: str,
    seed: int,
    data: DataSet,
    division: Division,
    prepared: Prepared,
    names: Sequence[str],
    shares: Sequence[LocalData],
    rounds: int,
    evidence: Evidence,
    beside: Beside,
) -> dict[str, Any]:
    """The summary of a run, but for `seconds`, which its caller knows."""
    manifest, histories = prepared.bundle.manifest, evidence.histories
    parts = zip(names, shares, histories, evidence.clients, beside.alone, strict=True)
    devices = [_device(*part, classes=manifest.classes) for part in parts]
    accuracy, deviation = _accuracy(devices)
    accuracy["all_classes"]["pooled_ridge"] = float((beside.pooled.answers == data.test.y).mean())
    summary = {
        "schema": SCHEMA,
        "dataset": data.name,
        "method": method,
        "clients": len(names),
        "rounds": rounds,
        "accuracy": accuracy,
        "accuracy_std": deviation,
        **_uplink(prepared.bundle, method, histories, shares),
        "device_peak_rss_bytes": max(device["peak_rss_bytes"] for device in devices),
        "contributions": {
            "sent": sum(device["sent"] for device in devices),
            "committed": evidence.aggregate["totals"]["committed"],
            "duplicates_refused": evidence.aggregate["totals"]["duplicates"],
        },
        "ffc_vs_pooled_ridge": {
            "relative_error": beside.pooled.relative_error,
            "equal_predictions": beside.pooled.equal_predictions,
            "identical_predictions": beside.pooled.equal_predictions == len(data.test),
        },
        "labels": list(data.labels),
        "test_images": len(data.test),
        "curves": _curves(devices, beside),
        "devices": devices,
        "confusion": _confusion([_last(history, method) for history in histories], evidence, beside),
        "backbone": _backbone(prepared),
        "settings": _settings(manifest, seed, division),
        "machine": _machine(evidence),
    }
    return summary | {"notes": notes(summary, prepared, division)}


def fedavg_bytes(bundle: Bundle) -> int:
    """What FedAvg would send for this backbone and a linear head, running statistics included: all float32."""
    m = bundle.manifest
    numbers = sum(array.size for name, array in bundle.params.items() if not name.startswith("head."))
    return 4 * (numbers + m.classes * m.features + m.classes)


def notes(summary: Mapping[str, Any], prepared: Prepared, division: Division) -> list[str]:
    """What a reader must know before quoting a figure."""
    m, accuracy = prepared.bundle.manifest, summary["accuracy"]
    found = [
        f"The shared backbone was {m.provenance}. No weights were downloaded.",
        "FFC and pooled ridge use that shared backbone as it was exported: Gram sums of differently trained networks "
        "cannot be added.",
    ]
    if summary["method"] == "fedproto":
        own = accuracy["own_classes"]
        among = float(np.mean([device["extra"]["own_classes"]["prototype_among_own"] for device in summary["devices"]]))
        head = float(np.mean([device["extra"]["own_classes"]["head"] for device in summary["devices"]]))
        verdict = "above" if own["federated"] > own["local_only"] else "not above"
        found += [
            f"On own classes FedProto is {verdict} local only in this run: {own['federated']:.1%} against "
            f"{own['local_only']:.1%}. It answers among all classes here; among a device's own classes only, as the "
            f"paper's public code does, it reaches {among:.1%}, and the device's own head {head:.1%}.",
            "Local only trains the same number of epochs, from the same weights, on the same batches. The "
            "bundle's head starts untrained for both, so a device alone never learns to answer with a class that it "
            "has not seen.",
        ]
    found += [
        f"{division.unused:,} training images were left unused: a device drops classes it has fewer than 10 images of, "
        "and none keeps all classes.",
        "One run, one seed, one small data set: differences of a point or two are within the spread.",
        "All processes shared one machine: memory is the peak resident set of a device's process there, no board's. "
        "Bytes are MQTT payloads, without the few bytes of topic and header around them.",
    ]
    return found


def _device(
    name: str,
    share: LocalData,
    history: Sequence[Mapping[str, Any]],
    client: Mapping[str, Any],
    alone: Evaluation,
    *,
    classes: int,
) -> dict[str, Any]:
    prototypes = [line for line in history if line["method"] == "fedproto"]
    calibrated = [line for line in history if line["method"] == "ffc"][-1]["accuracy"]
    accuracy, extra = {}, {}
    for part in _PARTS:
        ffc = calibrated[part]["linear"]
        trained = prototypes[-1]["accuracy"][part] if prototypes else {}
        accuracy[part] = {
            "local_only": getattr(alone, part)["head"],
            "federated": trained.get("prototype", ffc),
            "ffc": ffc,
        }
        extra[part] = dict(trained)
    return {
        "id": name,
        "samples": len(share),
        "samples_per_class": share.counts(classes).tolist(),
        "accuracy": accuracy,
        "extra": extra,
        "curve": [
            {"round": line["round"], "loss": line.get("loss")}
            | {part: {"federated": line["accuracy"][part]["prototype"]} for part in _PARTS}
            for line in prototypes
        ],
        "sent": client["contributions"]["sent"],
        "committed": client["contributions"]["committed"],
        "uplink_bytes": sum(line["uplink_bytes"] for line in history),
        "peak_rss_bytes": client["peak_rss_bytes"],
        "step_ms": client["step_ms"],
    }


def _accuracy(devices: Sequence[Mapping[str, Any]]) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Mean and standard deviation over devices, by part and way."""
    table = {
        part: {way: [d["accuracy"][part][way] for d in devices] for way in devices[0]["accuracy"][part]}
        for part in _PARTS
    }
    mean = {part: {way: float(np.mean(values)) for way, values in ways.items()} for part, ways in table.items()}
    deviation = {part: {way: float(np.std(values)) for way, values in ways.items()} for part, ways in table.items()}
    return mean, deviation


def _last(history: Sequence[dict[str, Any]], method: str) -> dict[str, Any]:
    own = [line for line in history if line["method"] == method]
    return (own or list(history))[-1]


def _curves(devices: Sequence[Mapping[str, Any]], beside: Beside) -> list[dict[str, Any]]:
    """By round: the mean over devices of local only and federated."""
    return [
        {"round": record.round}
        | {
            part: {
                "local_only": getattr(record, part)["head"],
                "federated": float(np.mean([device["curve"][index][part]["federated"] for device in devices])),
            }
            for part in _PARTS
        }
        for index, record in enumerate(beside.records)
    ]


def _confusion(last: Sequence[Mapping[str, Any]], evidence: Evidence, beside: Beside) -> dict[str, Any]:
    """(C, C) counts summed over devices; FFC's once, since it answers the same on every device."""
    calibrated = [line for line in evidence.histories[0] if line["method"] == "ffc"][-1]
    alone: NDArray[np.int64] = np.sum([evaluation.confusion["head"] for evaluation in beside.alone], axis=0)
    found = {"local_only": alone.tolist(), "ffc": calibrated["confusion"]["linear"]}
    if all("prototype" in line["confusion"] for line in last):
        found["federated"] = np.sum([line["confusion"]["prototype"] for line in last], axis=0).tolist()
    else:
        found["federated"] = found["ffc"]
    return found


def _uplink(
    bundle: Bundle, method: str, histories: Sequence[list[dict[str, Any]]], shares: Sequence[LocalData]
) -> dict[str, Any]:
    """Payload bytes from one device: in a round of the method, in an FFC round, and what FedAvg's would be."""
    lines = [line for history in histories for line in history]
    ffc = float(np.mean([line["uplink_bytes"] for line in lines if line["method"] == "ffc"]))
    own = [line["uplink_bytes"] for line in lines if line["method"] == method]
    up, fedavg = float(np.mean(own)) if own else ffc, fedavg_bytes(bundle)
    return {
        "uplink_bytes_per_device_round": up,
        "fedavg_bytes_per_device_round": fedavg,
        "uplink_share": up / fedavg,
        "ffc_uplink_bytes_per_device": ffc,
        "message_overhead_bytes": _overhead(histories, shares, bundle.manifest),
    }


def _overhead(histories: Sequence[list[dict[str, Any]]], shares: Sequence[LocalData], manifest: Manifest) -> int | None:
    """The largest prototype message's bytes beyond its raw tensors: float32 means, counts in the narrowest integer."""
    overheads = []
    for history, share in zip(histories, shares, strict=True):
        held = share.counts(manifest.classes)
        width = next(size for size in (1, 2, 4, 8) if int(held.max()) < 2 ** (8 * size))
        raw = int((held > 0).sum()) * (4 * manifest.features + width)
        overheads += [line["uplink_bytes"] - raw for line in history if line["method"] == "fedproto"]
    return max(overheads, default=None)


def _backbone(prepared: Prepared) -> dict[str, Any]:
    m = prepared.bundle.manifest
    return {
        "name": m.backbone,
        "parameters": fedavg_bytes(prepared.bundle) // 4,
        "features": m.features,
        "provenance": m.provenance,
        "public_accuracy": prepared.public_accuracy,
        "bundle": prepared.bundle.sha256.hex(),
    }


def _machine(evidence: Evidence) -> dict[str, Any]:
    client = evidence.clients[0]
    return {"board": client["board"], "cores": os.cpu_count(), "versions": dict(client["versions"])}


def _settings(manifest: Manifest, seed: int, division: Division) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": f"{manifest.method}, head {manifest.head}", "batch": manifest.batch}
    settings |= dict(manifest.hyper)
    return settings | {"public images": len(division.public), "seed": seed}
