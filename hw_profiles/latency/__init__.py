"""How long a workload takes on a board, learned from published rows."""
