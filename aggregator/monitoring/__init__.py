"""What an aggregator knows of its fleet's health: events, accuracy, drift, and what policies refuse.

`events` has what happens, as values; `accuracy`, `calibration`, `drift` and `class_drift` sum up the devices' reports;
`device_table` keeps what is known of each device, and what happened to it; `policy_refusals` keeps which releases the
devices' owners refuse.
"""
