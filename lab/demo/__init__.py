"""The demo: a fleet of processes, its baselines, its report."""
