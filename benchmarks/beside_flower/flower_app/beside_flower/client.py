"""The client: the device's core trains on this partition's images, for our method and for FedAvg alike."""

import os
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.flower import bundle_mod

FOLDER = Path(os.environ["BESIDE_FLOWER"])


def images(context: Context) -> tuple[np.ndarray, np.ndarray]:
    with np.load(FOLDER / f"{context.node_config['partition-id']}.npz") as data:
        return data["x"], data["y"]


app = ClientApp(mods=[bundle_mod(FOLDER / "fleet.bundle", images)])


@app.train()
def plain(message: Message, context: Context) -> Message:
    """As the method's own round without anybody's prototypes: the same step, over the same images; then either weights
    are sent, as for FedAvg, or class means, as an app without Protofleet would send them."""
    bundle, (x, y), config = read_bundle(FOLDER / "fleet.bundle"), images(context), message.content["config"]
    device = Device(bundle, LocalData(x, y), f"{context.node_config['partition-id']}")
    if config["sends"] == "fedavg":
        device.restore({name: array.numpy() for name, array in message.content["arrays"].items()})
    announced = Announcement(bytes(4), config["server-round"], "open", bundle.manifest.method, bundle.sha256)
    done = device.run_round(announced, None).contribution
    sent = device.state()
    if config["sends"] == "arrays":
        sent = {"prototypes": done.body.rows.astype(np.float32), "counts": done.counts.astype(np.float64)}
    arrays = ArrayRecord({name: Array(value) for name, value in sent.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=message)
