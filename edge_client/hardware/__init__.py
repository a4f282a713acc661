"""The board: its execution providers, its memory, and what it measures of itself.

`providers` chooses among ONNX Runtime's providers by what was tried; `process_metrics` measures; `profile_record` keeps
what `profile --measure` found; `conditions` looks at clock, disk and certificate; `code_pages` and `mapped_weights`
give memory back while the device waits.
"""
