"""One federation in one process: train, merge, evaluate, and checkpoint between rounds."""
