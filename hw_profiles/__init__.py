"""What a bundle costs on a piece of hardware, before anyone buys or flashes it.

The data flow, and the files along it:

    ONNX graph  →  workload         `workload`: what a network asks for, forward and in training
                →  cycles, traffic  `accelerator`: on a systolic array              protofleet cost
                →  memory           `memory`: of a step, and of our own process on a board
                →  latency, energy  `latency`, `energy`: on a CPU or GPU, and how it was fitted
    a bundle    →  measured here    `devices.measure`, `devices.host`               protofleet profile
                →  report           `reports`: as values, and as pages

Devices are data: `devices/*.toml`, read by `devices.schema`. Predictions need `onnx`; measuring does not. See
docs/hardware.md.
"""
