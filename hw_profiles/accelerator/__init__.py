"""The cost of a workload on a systolic array.

`systolic` counts the cycles of a product by one of the `dataflows`, `memory_system` its stalls and its bytes of DRAM
behind a DMA, which `memory_timing` solves for many products side by side; `layer_traffic` says what else of a layer
crosses the DMA. `simulate` puts a whole workload on the array; `round_cost` adds a round up. `chip` says what an array
takes of an FPGA and refuses what it cannot hold, `access_energy` counts picojoules, `sweep` costs many arrays, of which
`pareto` finds those that no other beats. `paper_claims` sets published claims beside it, `scalesim_files` writes what
SCALE-Sim reads. `rtl_files` writes the array as Verilog; the Verilog lies in `rtl/`.
"""
