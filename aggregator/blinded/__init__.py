"""Rounds whose contributions nobody sees: `blinded_rounds` closes one with the sum that a helper opens.

`blinded_set` is what is asked of the helper, over `helper_line`.
"""
