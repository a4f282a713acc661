"""The bundle: one file with a backbone and a method's training step, for every device.

`bundle_file` reads and writes it; `graph_checks` refuses graphs that read files or never end; `test_vectors` are images
and their features; `class_names` checks what classes are called; `fleet_compatibility` says which bundles are one
fleet; `uplink_bytes` counts what a round sends up. `shipped_extractor` finds the extractor for photos that
`protofleet-photos` brings.
`onnx_runtime` is the one place that loads ONNX Runtime; `native_kernels` knows the optional wheel of native code.
"""
