"""How a round closes, and what it comes to: what `aggregator/coordinators/round_coordinator.py` is given.

`round_books` are what these parts share. `open_rounds` closes a round, `round_results` makes what it comes to, and
`round_orders` changes it. `forgetting` and `rollback` undo. `late_contributions` stand in for the next round.
`joint_heads` serve left-out devices that agree. `accuracy_reports` are what devices say of the result.
"""
