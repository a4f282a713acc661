"""What runs a fleet, without its network: ingest, machine, merging and store, joined in the order that keeps promises.

`coordinator` is the one interface of it. `round_coordinator` runs rounds, open or blinded, `standing_coordinator` sums
that stand; `kinds` puts the parts of each together.
"""
