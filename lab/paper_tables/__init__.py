"""The papers' tables: settings, runs, and the published numbers beside ours.

`config` reads a table's definition (`definitions/`), `presets` its settings by source; `runner` and `one_run` run its
cells, over `seeds`, with `metrics`; `run_log` keeps each run; `table_ledger` is the table as it stands. `verdicts`
compares with the paper; `render`, `pages`, `cost_page` and `more_tables` write what `results/` shows.
"""
