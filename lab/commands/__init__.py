"""The commands `protofleet lab …` and `protofleet demo`: `lab_cli` runs one federation, `table_commands` the papers'
tables.
"""
