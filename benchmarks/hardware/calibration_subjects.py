"""The networks and training steps on which `profile --calibrate` is tried: twelve for inference, six in training.

Written down before the suite of small graphs was: none of them is in it, and none was fitted. Not a module of the
product: a device's own file is made without them.
"""

from __future__ import annotations

__all__ = ["INFERENCE", "TRAINING"]

# backbone, input (H, W, c); one photo
INFERENCE = (
    ("small_cnn", (32, 32, 3)),
    ("fedhp_cifar", (32, 32, 3)),
    ("resnet18", (224, 224, 3)),
    ("torchvision:resnet50", (128, 128, 3)),
    ("mobilenet_v2", (224, 224, 3)),
    ("mobilenet_v3_small", (160, 160, 3)),
    ("torchvision:mobilenet_v3_large", (96, 96, 3)),
    ("efficientnet_b0", (160, 160, 3)),
    ("squeezenet1_1", (128, 128, 3)),
    ("torchvision:densenet121", (96, 96, 3)),
    ("torchvision:shufflenet_v2_x1_0", (128, 128, 3)),
    ("torchvision:regnet_x_400mf", (128, 128, 3)),
)
# backbone, input, batch; the step of FedProto
TRAINING = (
    ("small_cnn", (32, 32, 3), 16),
    ("resnet18", (64, 64, 3), 16),
    ("mobilenet_v2", (64, 64, 3), 16),
    ("mobilenet_v3_small", (64, 64, 3), 16),
    ("squeezenet1_1", (64, 64, 3), 8),
    ("efficientnet_b0", (64, 64, 3), 8),
)
