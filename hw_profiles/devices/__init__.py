"""Devices as data, one TOML file each.

`schema` reads and checks one; `host` describes this machine; `measure` times it,
`load` watches what else runs meanwhile; `calibrated` is what `profile --calibrate` adds to a file.
"""
