"""Verification: no bundle is written whose graphs disagree with torch.

- `verify` compares graphs with torch.
- `agreement` says when two float32 results are equal.
- `memory` bounds the memory of the comparison.
"""
