"""The front door: the `protofleet` command, and what puts several rooms together."""
