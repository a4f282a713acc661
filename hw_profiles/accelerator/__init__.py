"""What a workload costs on a systolic array."""
