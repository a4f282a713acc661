"""The server: rounds, durable store, aggregation rules, the FFC solver and the embedded broker.

What is exported here is pure: values in, values out, no sockets and no files. A simulation drives the same code. The
server around it is `aggregator.server`, its commands are in `aggregator.cli`.
"""

from aggregator.rounds import Policy, Rounds, plan
from aggregator.rules import RULES, merge
from aggregator.state import next_global
from contract.ridge import solve_head

__all__ = ["RULES", "Policy", "Rounds", "merge", "next_global", "plan", "solve_head"]
