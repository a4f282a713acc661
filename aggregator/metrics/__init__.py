"""Numbers for a monitoring system, and lines for a person: `metrics` counts, `metrics_server` serves them over HTTP,
`console` writes one line for each event.
"""
