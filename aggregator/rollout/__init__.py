"""How far a bundle is rolled out: `rollout_stages`, a machine without sockets, files or clock.

Its tables are in `aggregator/store/rollout_tables.py`. What runs it is in `aggregator/parts/`:
`rollout_coordinator.py` and `bundle_handout.py`.
"""
