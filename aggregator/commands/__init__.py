"""The commands of an operator: options in, lines and an exit code out.

`aggregate_cli` has `aggregate` and `broker`; `fleet_cli`, `fleet_keys_cli` and `fleet_text` have `fleet …` and
`forget`; `fleet_state`, `fleet_status_cli` and `notices` have `status` and `watch`; `rollout_cli` has `rollout`.
`solve_again` makes a head again from a store. `standing_suspects` looks for liars in a store.
"""
