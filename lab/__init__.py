"""Federations in one process with the deployed cores, the demo and its report."""

if __name__ != "protofleet.lab":
    raise ImportError("expected import protofleet.lab, got import lab, try the full name", name="lab")
