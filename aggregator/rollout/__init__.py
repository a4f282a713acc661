"""How far a bundle is rolled out: `rollout_stages`, a state machine without sockets, files or clock.

Its tables are in `store/rollout_tables`. `coordinators/rollout_coordinator` and `bundle_handout` run it.
"""
