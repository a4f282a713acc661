"""Predicts the time of a workload on a board, learned from published rows."""
