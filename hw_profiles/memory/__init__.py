"""The memory of a workload, and of our client."""
