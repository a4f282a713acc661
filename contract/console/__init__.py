"""The terminal of a command, and the service manager.

- `durations` and `sizes` read what people write; `verbosity` has `--quiet` and `--verbose`.
- `tables` draws tables.
- `logs` has what log records carry, and shows them.
- `interrupt` turns Ctrl-C into one line.
- `service_manager` speaks sd_notify.
- `telemetry` switches off what libraries would report.
"""
