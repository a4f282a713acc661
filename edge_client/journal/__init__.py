"""What a device must not forget through a power cut, in one SQLite file.

`journal` has weights, rounds and contributions; `standing_journal` the sums that stand; `issued_marks` how new the
newest signed message was; `history` one line for each round; `retention` what is dropped with the years.
"""
