"""The commands of an operator: options in, lines and an exit code out.

`aggregate_cli` has `aggregate` and `broker`; `fleet_cli` and `fleet_keys_cli` have `fleet …` and `forget`;
`fleet_status_cli` and `notices` have `status` and `watch`; `rollout_cli` has `rollout`.
`solve_again` makes a head again from a store.
"""
