"""The ground floor: everything that a device and an aggregator must agree on.

It holds the methods, the statistics, the bundle, the wire, and the MQTT link of both ends. It needs numpy, cbor2,
msgspec, safetensors and paho-mqtt. It needs ONNX Runtime only where `protofleet.contract.bundle.onnx_runtime` is
imported. It never needs torch.

Importing the package switches off what other libraries report by themselves (`contract/console/telemetry.py`), and
lets log records pass unseen where the program has no handler for them (`contract/console/logs.py`).
"""

if __name__ != "protofleet.contract":
    raise ImportError("expected import protofleet.contract, got import contract, try the full name", name="contract")


from protofleet.contract.console import logs  # noqa: F401
from protofleet.contract.console.telemetry import switch_off

switch_off()
