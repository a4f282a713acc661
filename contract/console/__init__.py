"""The terminal of a command, and the service manager.

- `durations` and `sizes` read what people write; `verbosity` has `--quiet` and `--verbose`.
- `tables` draws tables.
- `interrupt` turns Ctrl-C into one line.
- `service_manager` speaks sd_notify.
- `telemetry` switches off what libraries would report.
"""
