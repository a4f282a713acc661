"""Protofleet inside your own program: one module for each public name (docs/library.md).

`device`, `aggregator` and `predictor` do what the commands do, on files or on arrays. `publisher` publishes answers.
`simulation` runs a federation in one call.
"""
