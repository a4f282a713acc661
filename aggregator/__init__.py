"""The server: rounds, durable store, aggregation rules, the FFC solver and the embedded broker."""
