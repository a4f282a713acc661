"""From a recorded torch function to ONNX nodes, one `aten` operator at a time.

- `trace` records a function; `constants` folds its constants.
- `translation` walks the graph with an `emitter`, which holds the ONNX graph, and looks up each operator in the tables
  of `conv`, `elementwise`, `norm`, `pool`, `reduce` and `shape`.
- `kernel_nodes` has what the wheel protofleet-kernels has operators for, in a form of the step of its own.
- `pointwise` and `channel_runs` keep large activations in the cache.
"""
