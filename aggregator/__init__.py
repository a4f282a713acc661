"""The server: rounds, durable store and the embedded broker.

What is exported here is pure: values in, values out, no sockets and no files. A simulation drives the same code. The
server around it is `protofleet.aggregator.server.server`, its commands are in
`protofleet.aggregator.commands`.
"""

if __name__ != "protofleet.aggregator":
    raise ImportError(
        "expected import protofleet.aggregator, got import aggregator, try the full name", name="aggregator"
    )


from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.rounds.round_machine import Policy, Rounds, plan

__all__ = ["Policy", "Rounds", "next_global", "plan"]
