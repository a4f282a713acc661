"""A command's settings are data: one frozen dataclass for each command, and everything else follows from it.

A field is written once, with its type, its default and an `Option` (`options.py`): help, bounds, check. From the class
follow

    command_line    the command's options, `--config FILE.toml` and `--print-config`
    sources         the values: file, then environment (`PROTOFLEET_CLIENT_THREADS`), then command line
    toml_text       what `--print-config` writes, secrets left out
    common          fields that several commands have: the broker's address, how much is said

A program makes the class itself, `ClientSettings(bundle=…, broker=…)`, with the same checks.
"""
