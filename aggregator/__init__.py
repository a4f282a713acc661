"""The server: rounds, durable store and the embedded broker.

What is exported here is pure: values in, values out, no sockets and no files. A simulation drives the same code. The
server around it is `aggregator.server`, its commands are in `aggregator.cli`.
"""

from aggregator.rounds import Policy, Rounds, plan
from aggregator.state import next_global

__all__ = ["Policy", "Rounds", "next_global", "plan"]
