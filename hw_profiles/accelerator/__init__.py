"""The cost of a workload on a systolic array."""
