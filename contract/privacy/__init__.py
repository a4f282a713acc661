"""Noise with a stated ε, and sums of which only the total can be seen.

- Noise: `mechanism` states what a release costs; `noised_sums` adds noise that `secret_noise` draws; `noised_heads`
  makes heads and means of noised sums, on the server.
- Blinded sums: `blinding` divides numbers into shares; `sealing` seals a seed for the helper; `openable_sets` says
  which sets of devices may be summed.
"""
