"""Ground floor: everything that a device and an aggregator must agree on.

Methods, statistics, the bundle, the wire, and the MQTT link that both ends use. Needs numpy, cbor2, msgspec,
safetensors and paho-mqtt; never torch.
"""
