"""A Flower app: prototypes by `MethodStrategy`, or FedAvg, over the same bundle, images and training step."""
