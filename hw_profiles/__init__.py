"""The cost of a bundle on a piece of hardware, before anyone buys or flashes it.

The data flow, and the files along it:

    ONNX graph  →  workload         `workload`: the operations of a network, forward and in training
                →  cycles, traffic  `accelerator`: on a systolic array              protofleet cost
                →  memory           `memory`: of a step, and of our own process on a board
                →  latency, energy  `latency`, `energy`: on a CPU or GPU, with the fit
    a board     →  its device file  `calibration`, from small graphs that it ran        protofleet profile --calibrate
    a bundle    →  measured here    `devices.measure`, `devices.host`               protofleet profile
                →  report           `reports`: as values, and as pages

A fleet's bill, from all of these and from bytes on the wire, is made in `plan` (protofleet plan).

Devices are data: `devices/*.toml`, read by `devices.schema`. Predictions need `onnx`, and measuring does not. See
docs/hardware.md.
"""

if __name__ != "protofleet.hw_profiles":
    raise ImportError(
        "expected import protofleet.hw_profiles, got import hw_profiles, try the full name", name="hw_profiles"
    )
