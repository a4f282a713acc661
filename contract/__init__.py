"""Ground floor: everything that a device and an aggregator must agree on.

Methods, statistics, the bundle, the wire, and the MQTT link that both ends use. Needs numpy, cbor2, msgspec,
safetensors and paho-mqtt; ONNX Runtime only where `contract.runtime` is imported; never torch.

Importing it switches off what other libraries report by themselves (`contract/telemetry.py`).
"""

from contract.telemetry import switch_off

switch_off()
