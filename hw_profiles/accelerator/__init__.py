"""The cost of a workload on a systolic array.

`systolic` counts the cycles of a product by one of the `dataflows`, `dram` the bytes of memory; `simulate` puts a whole
workload on the array; `round_cost` adds a round up. `paper_claims` sets published claims beside it, `scalesim_files`
writes what SCALE-Sim reads. `rtl_files` writes the array as Verilog; the Verilog lies in `rtl/`.
"""
