"""`protofleet helper`: the second party of blinded sums, run by another operator than the aggregator's.

It imports nothing else of this room: its questions and answers are in `contract/`.
"""
