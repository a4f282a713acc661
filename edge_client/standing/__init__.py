"""Sums that stand, without rounds: `sample_choice` says which samples the next sums are of, `standing_sums` makes and
sends them, `generations` follows what receipts say of them.
"""
