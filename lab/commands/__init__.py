"""The commands `protofleet lab …` and `protofleet demo`: `lab_cli` runs one federation, `compare_command` several
methods beside each other, `table_commands` the papers' tables.
"""
