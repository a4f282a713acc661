"""Data sets, and their division over clients."""
