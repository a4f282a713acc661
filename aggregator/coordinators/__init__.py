"""What runs a fleet, without its network: ingest, machine, merging and store, joined in the order that keeps promises.

`coordinator_core` is the shared part. `round_coordinator` runs rounds, `standing_coordinator` standing sums,
`blinded_coordinator` blinded rounds: `blinded_set` is what is asked of the helper, over `helper_line`. `forgetting` and
`rollback` undo. `late_contributions` stand in for the next round. `joint_heads` serve left-out devices that agree.
`rollout_coordinator` and `bundle_handout` roll a bundle out. `background_work` runs long work.
"""
