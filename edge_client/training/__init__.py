"""Running and training a bundle's graphs on ONNX Runtime.

`onnx_session` opens sessions; `extractor` makes features of images, `kept_features` once where weights never change,
`frozen_trunk` for a network of which the tail is trained; `trainer` runs the training step, `micro_batches` in parts.
`compiled_graphs` holds what is compiled.
`local_samples` is what a method is offered; `warm_start` and `tail_check` begin and judge a trained tail.
"""
