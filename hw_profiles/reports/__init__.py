"""The reports of `profile` and `cost`, as values and as pages.

`subject` is what is profiled; `profile_report`, with `profile_memory`, and `cost_report` are the values, versioned
JSON; `profile_page` and `cost_page` show them, with what `page` has for both.
"""
