"""Data sets, and their division over clients.

`datasets` loads them, by name (`hub`) or from files; `make_subset` made the one that ships; `partition` divides it over
clients; `shift` makes clients see differently; `validation` holds photos back from what is chosen on.
"""
