"""What the fleet wants of this device, and how long it waits for it. No sockets, no disk.

`round_follower` follows announcements and global states; `leader_epochs` says which leader's count; `patience` and
`waiting_notice` are about waiting, and what a person is told of it.
"""
