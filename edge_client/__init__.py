"""The device: runs a bundle, trains on ONNX Runtime, summarises, publishes, survives power cuts."""
