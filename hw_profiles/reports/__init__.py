"""The reports of `profile`, `cost` and `cost sweep`, as values and as pages.

`subject` is what is profiled; `profile_report`, with `profile_memory`, `cost_report` and `sweep_report` are the values,
versioned JSON, with a sentence of `which_board` that answers first; `profile_page`, `cost_page` and `sweep_page` show
them, with what `page` has for all.
"""
