"""`protofleet helper`: the second party of blinded sums, run by somebody else than the aggregator.

It imports nothing else of this room: what it is asked and answers is in `contract/`.
"""
