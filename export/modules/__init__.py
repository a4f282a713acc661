"""Pieces of torch that the rest of the room shares.

- `norms`: padded batch normalisation.
- `preprocess`: preprocessing of images.
- `random_layers`: layers that draw random numbers.
- `torch_cache`: torch's compiler cache.
- `torch_threads`: torch on one thread.
"""
