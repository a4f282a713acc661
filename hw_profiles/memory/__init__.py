"""How much memory a workload and our client need."""
