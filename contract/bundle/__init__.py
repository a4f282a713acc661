"""The bundle: one file with a backbone and a method's training step, for every device.

`bundle_file` reads and writes it; `graph_checks` refuses graphs that read files or never end; `test_vectors` are images
and their features; `fleet_compatibility` says which bundles are one fleet; `uplink_bytes` counts what a round sends up.
`onnx_runtime` is the one place that loads ONNX Runtime.
"""
