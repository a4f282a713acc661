"""How a fleet is, read from a store that an aggregator may be writing.

`fleet_text` reads what the store knows at one moment; `fleet_state` says in a sentence whether all is well, and who
needs care; `conditions` what devices say of their clock, disk and certificate. `standing_suspects` compares the sums
that stand, to find devices that contradict the others.
"""
