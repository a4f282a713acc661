"""Sums that stand: what `aggregator/coordinators/standing_coordinator.py` is given.

`standing_sums` are the total and who keeps it, `standing_heads` what is made of it, `standing_orders` what is taken
out of it, `standing_notices` what devices are told of that.
"""
