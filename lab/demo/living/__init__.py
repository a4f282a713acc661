"""`protofleet demo --living`: a simulated month of a fleet that stays, with real processes."""
