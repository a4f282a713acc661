"""A torch backbone and a method's objective become a bundle of plain ONNX graphs.

The data flow through this room:

1. `backbones` builds the network and loads its weights.
2. `objectives` says what a training step minimises; `steps` makes a pure function of the network and the objective.
3. `operators` records the function and translates it to ONNX nodes, with the help of `graphs` and `modules`.
4. `bundles` does the same for inference. It uses torch's exporter where the table has no entry for an operator.
5. `verify` compares the graphs with torch.
6. `bundles/build.py` joins all steps; `cli` is the command `protofleet export`.

Import the modules themselves: they load torch.
"""

if __name__ != "protofleet.export":
    raise ImportError("expected import protofleet.export, got import export, try the full name", name="export")
