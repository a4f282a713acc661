"""The demo: a fleet of processes, its baselines, its report.

`run` is the command's way: `prerequisites` are checked, `story` says what happens and `photos`, `shipped` or
`from_scratch` gives bundle and images (`make_photos` and `make_bundle` made what ships), `processes` starts broker,
aggregator and devices (each through `child_process`). `baselines` say what a device alone reaches; `summary` puts it
together, `report` and `shown_images` make the page. `living/` is `demo --living`.
"""
