"""Eager training in torch: `local_training` for clients and for pretraining, on the device of `torch_device`."""
