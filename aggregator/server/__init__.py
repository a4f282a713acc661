"""The aggregator's process: messages in and out.

`service` runs from the files to the end of a run; `server` is the loop, and
`beginning` what it is given; `sole_aggregator` decides which of two stays;
`retained` knows what the broker retains; `run_events` and `standing_events` report what happens, `run_report` and
`standing_report` are the result as JSON, and `kinds` says which of them a coordinator has; `verdicts` are told to
devices; `ending` says when to stop; `broker` is the embedded broker.
"""
