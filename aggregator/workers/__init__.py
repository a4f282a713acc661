"""Several processes on one store: one leads, the others take, decide, commit and answer beside it.

`shared_store` is the store, with `shared_standing_tables`. `leadership` decides which process leads. `worker` is the
loop of a process that does not lead; `shared_rounds` and `shared_standing` are its part in rounds and in standing sums.
`store_outage` says when to look again for a lost server.
"""
