"""Training cost by method on fpga-vc707-32x64, over SphereFed's backbones: its figure 5, as tables and as bar charts.

    python -m benchmarks.hardware.training_cost [--json F] [--markdown F] [--html F]

ConvNet, MobileNetV2, ResNet18 and VGG13; 10 and 100 classes at 32x32 (CIFAR), 200 at 64x64 (TinyImageNet, 10,000 local
samples) and, because the claims are said to grow with the classes, 200 at 32x32 too; batch 1 and 64; both depthwise
mappings. FedAvg, SphereFed (frozen head) and prototypes (no head), as published; FFC against CCVR. Everything is
`simulated` but memory, which is `predicted`; the paper's claims stand beside it with the assumptions under which each
would follow.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from protofleet.hw_profiles.accelerator.paper_claims import CLAIMS, readings
from protofleet.hw_profiles.accelerator.round_cost import Setting, calibration_cost, round_cost
from protofleet.hw_profiles.accelerator.simulate import Array, assumptions
from protofleet.hw_profiles.charts.bars import Bar, bars
from protofleet.hw_profiles.reports.page import Table, render_page
from protofleet.hw_profiles.units import size, time_text
from protofleet.hw_profiles.workload.baselines import (
    ccvr,
    features_width,
    fedavg,
    published_ffc,
    published_spherefed,
    without_classifier,
)
from protofleet.hw_profiles.workload.from_onnx import read_workload
from protofleet.hw_profiles.workload.model import Workload
from protofleet.hw_profiles.workload.paper_networks import NETWORKS, build_network

AS_PUBLISHED = (fedavg, published_spherefed, without_classifier)
TASKS = ((10, 32, 5_000), (100, 32, 5_000), (200, 32, 5_000), (200, 64, 10_000))  # classes, side, local samples
MAPPINGS = ("per-channel", "packed")


@lru_cache(maxsize=64)
def forward(name: str, side: int, batch: int) -> Workload:
    """The named backbone's features graph."""
    return read_workload(build_network(name, side=side), batch=batch, name=name)


def main() -> int:
    """Compute, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in ("json", "markdown", "html"):
        parser.add_argument(f"--{kind}", type=Path)
    options = parser.parse_args()
    report = {
        "schema": 1,
        "device": "fpga-vc707-32x64",
        "assumptions": list(assumptions(Array())),
        "training": [row for mapping in MAPPINGS for row in _training(mapping)],
        "calibration": [row for mapping in MAPPINGS for row in _calibration(mapping)],
        "claims": _claims(),
    }
    text = _markdown(report)
    print(text)
    for path, content in (
        (options.json, json.dumps(report, indent=1) + "\n"),
        (options.markdown, text),
        (options.html, _html(report)),
    ):
        if path:
            path.write_text(content, encoding="utf-8")
    return 0


def _training(mapping: str) -> list[dict[str, Any]]:
    rows = []
    for name in NETWORKS:
        for classes, side, samples in TASKS:
            for batch in (1, 64):
                setting = Setting(samples, 10, batch)
                array = Array(depthwise=mapping)
                work = forward(name, side, batch)
                costs = [round_cost(work, as_in(work, classes), array, setting) for as_in in AS_PUBLISHED]
                base = costs[0]
                rows += [
                    {
                        "kind": "simulated", "backbone": name, "classes": classes, "side": side, "batch": batch,
                        "depthwise": mapping, "method": cost.method, "step_ms": cost.step_ms, "round_s": cost.round_s,
                        "phases_ms": cost.phase_ms(), "memory_bytes": cost.memory.peak_bytes,
                        "latency_saved_percent": 100 * (1 - cost.step_ms / base.step_ms),
                        "memory_saved_percent": 100 * (1 - cost.memory.peak_bytes / base.memory.peak_bytes),
                    }
                    for cost in costs
                ]  # fmt: skip
    return rows


def _calibration(mapping: str) -> list[dict[str, Any]]:
    rows = []
    for name in NETWORKS:
        for classes, side, samples in TASKS:
            work, array = forward(name, side, 64), Array(depthwise=mapping)
            each = (samples, classes, features_width(work))
            ffc, drawn = (calibration_cost(work, c, array, samples) for c in (published_ffc(*each), ccvr(*each)))
            rows.append(
                {
                    "kind": "simulated", "backbone": name, "classes": classes, "side": side, "depthwise": mapping,
                    "ffc_client_ms": ffc.client_ms, "ffc_server_ms": ffc.server_ms, "ccvr_client_ms": drawn.client_ms,
                    "ccvr_server_ms": drawn.server_ms, "saved_percent": 100 * (1 - ffc.total_ms / drawn.total_ms),
                    "ffc_bytes": ffc.uplink_bytes, "ccvr_bytes": drawn.uplink_bytes,
                }
            )  # fmt: skip
    return rows


def _claims() -> list[dict[str, Any]]:
    """For each claim and reading: the largest percentage over the backbones and tasks, and where."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for name in NETWORKS:
        for classes, side, samples in TASKS:
            for found in readings(lambda b, n=name, s=side: forward(n, s, b), classes, Array(), samples):
                text = found.assumption.replace(f"{samples:,} local samples, ", "")
                where = f"{name.removeprefix('spherefed_')}, {classes} classes, {side}x{side}"
                here = {"claim": found.claim, "assumption": text, "percent": found.percent, "where": where}
                mobile = best.get((found.claim, text), {}).get("mobilenetv2_percent")
                if name == "spherefed_mobilenetv2":
                    mobile = max(found.percent, mobile if mobile is not None else found.percent)
                known = best.get((found.claim, text))
                if known is None or found.percent > known["percent"]:
                    best[found.claim, text] = here | {"kind": found.kind, "paper_percent": CLAIMS[found.claim][0]}
                best[found.claim, text]["mobilenetv2_percent"] = mobile
    return list(best.values())


def _markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Training cost by method on fpga-vc707-32x64",
        "",
        "Made by `python -m benchmarks.hardware.training_cost`.",
        "",
    ]
    for mapping in MAPPINGS:
        lines += [f"## One training step, depthwise {mapping}", ""]
        lines += [
            "| backbone | classes | input | batch | FedAvg | SphereFed | saved | prototypes | saved | memory FedAvg | "
            "SphereFed saves | prototypes save |"
        ]
        lines += ["| --- " * 12 + "|"]
        rows = [row for row in report["training"] if row["depthwise"] == mapping]
        for base, frozen, skipped in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            cells = [
                base["backbone"].removeprefix("spherefed_"), base["classes"], f"{base['side']}²", base["batch"],
                time_text(base["step_ms"]), time_text(frozen["step_ms"]), f"{frozen['latency_saved_percent']:.2f} %",
                time_text(skipped["step_ms"]), f"{skipped['latency_saved_percent']:.2f} %", _fits(base["memory_bytes"]),
                f"{frozen['memory_saved_percent']:.2f} %", f"{skipped['memory_saved_percent']:.2f} %",
            ]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines += ["", f"## Calibration, depthwise {mapping}", ""]
        lines += [
            "| backbone | classes | input | FFC client + server | CCVR client + server | FFC saves | FFC up | CCVR up |"
        ]
        lines += ["| --- " * 8 + "|"]
        for row in (r for r in report["calibration"] if r["depthwise"] == mapping):
            cells = [
                row["backbone"].removeprefix("spherefed_"), row["classes"], f"{row['side']}²",
                f"{time_text(row['ffc_client_ms'])} + {time_text(row['ffc_server_ms'])}",
                f"{time_text(row['ccvr_client_ms'])} + {time_text(row['ccvr_server_ms'])}",
                f"{row['saved_percent']:.2f} %", size(row["ffc_bytes"]), size(row["ccvr_bytes"]),
            ]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    lines += [
        "## The paper's claims",
        "",
        "| claim | paper | read as | largest here | where | MobileNetV2 |",
        "| --- " * 6 + "|",
    ]
    for row in report["claims"]:
        text = CLAIMS[row["claim"]][1]
        lines.append(
            f"| {text} | up to {row['paper_percent']} % | {row['assumption']} | {row['percent']:.2f} % | "
            f"{row['where']} | "
            f"{row['mobilenetv2_percent']:.2f} % |"
        )
    lines += ["", "## Assumptions", "", *(f"- {line}" for line in report["assumptions"]), ""]
    return "\n".join(lines)


def _fits(nbytes: int) -> str:
    """The size, and whether it is more than the board's 1 GiB."""
    return size(nbytes) + (" (does not fit)" if nbytes > 1 << 30 else "")


def _html(report: dict[str, Any]) -> str:
    tasks, times, memories = [], [], []
    for classes, side, _ in TASKS:
        for batch in (1, 64):
            chosen = [
                row for row in report["training"]
                if (row["classes"], row["side"], row["batch"], row["depthwise"]) == (classes, side, batch, "packed")
            ]  # fmt: skip
            tasks.append(f"{classes} classes, {side}x{side}, batch {batch}")
            times.append(_time_chart(chosen))
            memories.append(_memory_chart(chosen))
    calibration = _calibration_chart([row for row in report["calibration"] if row["depthwise"] == "packed"])
    view = {
        "device": report["device"], "tasks": tasks, "claims": _claims_table(report["claims"]),
        "assumptions": report["assumptions"],
    }  # fmt: skip
    charts = {"times": times, "memories": memories, "calibration": calibration}
    return render_page(Path(__file__).with_suffix(".html.j2"), view, charts=charts)


def _claims_table(claims: list[dict[str, Any]]) -> Table:
    rows = [
        (
            CLAIMS[r["claim"]][1], f"up to {r['paper_percent']} %", r["assumption"], f"{r['percent']:.2f} %",
            r["where"], f"{r['mobilenetv2_percent']:.2f} %", r["kind"],
        )
        for r in claims
    ]  # fmt: skip
    headers = ("claim", "paper", "read as", "largest here", "where", "MobileNetV2", "kind")
    return Table("the paper's claims", headers, rows, wide=(0, 2), left=(4,), tags=(6,), tight=True)


def _time_chart(rows: list[dict[str, Any]]) -> str:
    base = {row["backbone"]: row["step_ms"] for row in rows if row["method"] == "fedavg"}
    values = [
        Bar(
            f"{row['backbone'].removeprefix('spherefed_')} {row['method']}",
            {phase.replace("_", " "): 100 * ms / base[row["backbone"]] for phase, ms in row["phases_ms"].items()},
            time_text(row["step_ms"]) + _saved(row, "latency"),
        )
        for row in rows
    ]
    return bars(values, unit="FedAvg = 100", title="time of a step")


def _saved(row: dict[str, Any], what: str) -> str:
    return "" if row["method"] == "fedavg" else f", {row[f'{what}_saved_percent']:.2f} % saved"


def _memory_chart(rows: list[dict[str, Any]]) -> str:
    base = {row["backbone"]: row["memory_bytes"] for row in rows if row["method"] == "fedavg"}
    values = [
        Bar(
            f"{row['backbone'].removeprefix('spherefed_')} {row['method']}",
            {"peak": 100 * row["memory_bytes"] / base[row["backbone"]]},
            size(row["memory_bytes"]) + _saved(row, "memory"),
        )
        for row in rows
    ]
    return bars(values, unit="FedAvg = 100", title="peak memory of a step")


def _calibration_chart(rows: list[dict[str, Any]]) -> str:
    values = []
    for row in rows:
        total = row["ccvr_client_ms"] + row["ccvr_server_ms"]
        label = f"{row['backbone'].removeprefix('spherefed_')} {row['classes']} {row['side']}²"
        for name in ("ccvr", "ffc"):
            parts = {side: 100 * row[f"{name}_{side}_ms"] / total for side in ("client", "server")}
            note = f"{row['saved_percent']:.2f} % saved" if name == "ffc" else time_text(total)
            values.append(Bar(f"{label} {name}", parts, note))
    return bars(values, unit="CCVR = 100", title="client and server")


if __name__ == "__main__":
    sys.exit(main())
