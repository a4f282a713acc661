"""The server: `kind` is `own` for the bundle's method, or another one's name; `fedavg`, or `arrays` for prototypes as
Flower alone would carry them. What came of it is a file."""

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.flower import MethodStrategy

FOLDER = Path(os.environ["BESIDE_FLOWER"])
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told, closed = context.run_config, []
    nodes = {"min_train_nodes": told["nodes"], "min_available_nodes": told["nodes"]}

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        closed.append(time.time())
        return None

    if told["kind"] in ("fedavg", "arrays"):
        bundle = read_bundle(FOLDER / "fleet.bundle")
        m, sends = bundle.manifest, ConfigRecord({"sends": told["kind"]})
        start = {t.name: bundle.params[t.name] for t in m.state if t.role in ("param", "buffer")}
        if told["kind"] == "arrays":
            start = {"prototypes": np.zeros((m.classes, m.features), np.float32), "counts": np.zeros(m.classes)}
        arrays = ArrayRecord({name: Array(value) for name, value in start.items()})
        strategy = FedAvg(fraction_evaluate=0.0, **nodes)
        strategy.start(grid, arrays, num_rounds=told["rounds"], train_config=sends, evaluate_fn=after_round)
    else:
        method = None if told["kind"] == "own" else told["kind"]
        run = bytes.fromhex(told["run"]) or None
        strategy = MethodStrategy.of_bundle(FOLDER / "fleet.bundle", method, run=run, **nodes)
        strategy.start(grid, num_rounds=told["rounds"], evaluate_fn=after_round)
        found = strategy.state.rows.items()
        rows, numbers = {kind: part.rows for kind, part in found}, {f"{kind}.classes": p.classes for kind, p in found}
        np.savez(FOLDER / f"{told['mark']}.npz", **rows, **numbers)
    (FOLDER / f"{told['mark']}.json").write_text(json.dumps(closed))
