"""Files that are written whole or not at all, SQLite files, and JSON for other programs.

- `atomic_files` writes files and locks them.
- `sqlite` opens, migrates and writes a database. The aggregator's store and the device's journal are made of it.
- `passwords` reads a file of names and secrets.
- `json_output` is the option `--json` of every command.
"""
