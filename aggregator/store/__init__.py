"""The durable store: everything the aggregator must not forget, by table.

`durable_store` joins the tables of `schema` and writes contributions and rounds; each table has a file beside it:
`order_table`, `meta_table`, `refused_devices`, `standing_tables`, `finding_tables`, `rollback_tables`,
`rollout_tables`, `blinded_tables`, `enrolment_tables`. `records` has the values that go in and out. `stored_run` and
`backup` read a store from outside; `operator_orders` writes an operator's order into it.
"""
