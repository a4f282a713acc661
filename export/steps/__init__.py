"""One training step as a pure function: `cut` divides a network into a frozen trunk and a trained tail, `step` joins it
with an objective and an optimizer (`optimizers`), `micro` divides a batch into parts.
"""
