"""Federations in one process with the deployed cores, the demo and its report."""
