"""Commands that put several rooms together, a module each; `solving` is shared by `predict` and `model`, `measure` by
`profile`, `inspect_ledger` by `inspect`. A room's own commands are in the room.
"""
