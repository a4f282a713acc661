"""From a backbone and a method to a bundle. `build` is the whole of `protofleet export`.

- `bundle_graphs` records and verifies the graphs.
- `features` makes the graph for inference: by the table of translations, by `torch_exporter` where an operator is
  unknown, or from an ONNX file (`onnx_features`).
- `extend` adds classes; `fleet_bundle` takes another bundle's extractor for other classes.
- `classifier` writes one plain ONNX file for other runtimes.
"""
