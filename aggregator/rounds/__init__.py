"""When a round opens and closes, and which devices it awaits.

`round_machine` is a state machine without sockets, files or clock; `schedule` says when the next round is due;
`presence` says which devices are online where there are no rounds.
"""
