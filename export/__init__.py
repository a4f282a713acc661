"""A torch backbone and a method's objective become a bundle of plain ONNX graphs.

The way through the room, in order: `backbones` and `weights` make the network; `objectives` says what a step
minimises and `step` turns both into a pure function; `trace` records it; `translate` and its `translate_*` tables
write it as ONNX nodes with `graph`; `features` does the same for inference, by `torch_exporter` where the table lacks
an operator, and `placement` says where its weights lie; `verify` compares the result with torch; `build` ties
them together and `cli` is `protofleet export`. Import the modules themselves: they load torch.
"""
