"""The operations of a network, layer by layer, forward and in training."""
