"""What a device's owner lets out, and the record of what has left.

`policy` is the owner's file; `releases` asks it before anything is made, and tells `ledger` before it is sent;
`accountant` sums up ε; `elapsed_time` is a clock that nobody can set; `blinded_shares` is how a blinded round leaves.
"""
