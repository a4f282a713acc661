"""A backbone by name, cut at its features.

- `backbone` is the entry point.
- `backbone_names` lists the names; `networks` and `libraries` build the networks.
- `weights` loads a file of weights.
- `vision` loads torchvision beside any build of torch.
"""
