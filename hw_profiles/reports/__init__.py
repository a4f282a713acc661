"""The reports of `profile` and `cost`, as values and as pages."""
