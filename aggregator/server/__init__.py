"""The aggregator's process: messages in and out.

`service` runs from the files to the end of a run; `server` is the loop; `sole_aggregator` decides which of two stays;
`retained` knows what the broker retains; `run_events` and `standing_events` report what happens; `ending` says when to
stop; `run_report` and `standing_report` are the result as JSON; `broker` is the embedded broker.
"""
