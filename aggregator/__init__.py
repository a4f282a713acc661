"""The server: rounds, durable store and the embedded broker.

A contribution's way: `server` has the process and its loop; `ingest` decides on a message, with `enrolment` for who may
speak; `coordinators` join it with `store`, `rounds` and `merging`, after `screening`; receipts go back. `workers` do so
beside each other, `helper` opens blinded sums, `rollout` has a roll-out's stages. `monitoring` and `metrics` tell how
it goes, `overview` reads it from the store; `page` and `commands` are the operator's; `database` is a file or a server.

What is exported here is pure: values in, values out, no sockets and no files. A simulation drives the same code.
"""

if __name__ != "protofleet.aggregator":
    raise ImportError(
        "expected import protofleet.aggregator, got import aggregator, try the full name", name="aggregator"
    )


from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.rounds.round_machine import Policy, Rounds, plan

__all__ = ["Policy", "Rounds", "next_global", "plan"]
