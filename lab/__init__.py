"""Federations in one process with the deployed cores, the demo and its report.

A run's way: `commands` read the options (`run_settings`; `method_names` are checked before torch is loaded); `data` is
divided over clients; `engine` runs rounds, on `workers`, with the `algorithms` that average weights over `training` in
torch; `reporting` shows it. `paper_tables` are many runs beside published numbers, with `board_costs`; `demo` is a
fleet of real processes.
"""

if __name__ != "protofleet.lab":
    raise ImportError("expected import protofleet.lab, got import lab, try the full name", name="lab")
