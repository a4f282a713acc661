"""`protofleet helper`: the second party of blinded sums, run by another operator than the aggregator's.

`settings` are its options, `cli` its command; `process` is the loop; `opening` decides whether a set may be opened, and
opens it; `ledger` keeps which shares were opened; `witness` lies beside the key and says which ledger opens sums with
it. Its questions and answers are in `contract/`; of this room it uses the name of a store alone.
"""
