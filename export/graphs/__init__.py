"""Plain ONNX graphs, and the kernels that are fast in ONNX Runtime.

- `graph_builder` writes nodes and bytes; `values` are the tensors of a trace, as the graph holds them.
- `windows`, `depthwise`, `blocked_kernels` and `bilinear` are convolutions in forms that run fast.
- `placement` says where weights lie.
- `half_weights` stores weights as float16.
- `precision` makes int8 and fp16 of a whole graph; `bias_correction` keeps the means of its channels.
"""
