"""The demo: a fleet of processes, its baselines, its report.

`run` is the command's way: `prerequisites` are checked, `story` says what happens and `shipped` or `from_scratch` gives
its bundle (`make_bundle` made the one that ships), `processes` starts broker, aggregator and devices (each through
`child_process`). `baselines` say what a device alone reaches; `summary` puts it together, `report` and `shown_images`
make the page. `living/` is `demo --living`.
"""
