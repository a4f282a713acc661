"""From contributions to the next global state. Pure: the same in a server and in the lab.

`merge_round` merges a round; `exact_sums` adds and subtracts standing sums; `next_global` makes the global state;
`forgotten_classes` says what remains without a class.
"""
