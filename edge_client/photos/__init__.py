"""Photos of a camera that a device keeps for a while, for its owner to name: they never leave by the wire.

`photo_ring` keeps them in one file of the state directory, up to a limit, the oldest leaving first;
`kept_photo` is one of them, and how a name finds it again; `naming` makes them examples of a class.
"""
