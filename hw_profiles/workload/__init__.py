"""The operations of a network, layer by layer, forward and in training.

`from_onnx` reads a graph, with `module_names`, `operators` and `constant_folding`; `model` is the value that all have;
`phases` says what of a step is forward and what backward. Without a graph `training` derives a step: `training_step`
over `step_builder` and `loss_terms`, `calibration_step` for sums. `baselines` and `paper_networks` are other people's.
`fusion` says which layers run as part of the product before them, `spans` in what runs an operator works, `reuse` how
far back a number was last touched.
"""
