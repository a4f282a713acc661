"""What a network asks of hardware, layer by layer, forward and in training."""
