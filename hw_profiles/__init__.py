"""What a bundle costs on a piece of hardware, before anyone buys or flashes it.

The data flow, and the files along it:

    ONNX graph  →  workload          graph, operators, fold, phases, workload; networks: SphereFed's backbones as graphs
                →  training step     training; calibration: what statistics and their servers compute
                →  cycles, traffic   systolic, dram, array; scalesim: files to check it with      protofleet cost
                →  memory            memory; client_memory: our own process on a board
                →  latency, energy   demand, latency, energy, nominal; fit, crossval, rows: how it was fitted
    a bundle    →  measured here     measure, host                                                protofleet profile
                →  report            cost_report, cost_page, round_cost, claims; profile_report, profile_page; page

Devices are data: `devices/*.toml`, read by `device`. Predictions need `onnx`; measuring does not. DESIGN section 5.
"""
