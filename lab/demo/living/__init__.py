"""`protofleet demo --living`: a simulated month of a fleet that stays, with real processes.

`run` is the command's way: `story` plans the month, `fleet` has its processes, `life` goes through the days, `figures`
measures each day, `proofs` compares the end with a fleet in which none of it happened; `summary` and `report` write it.
"""
