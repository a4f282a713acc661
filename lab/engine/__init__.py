"""One federation in one process: train, merge, evaluate, keep between rounds."""
