"""The cost of the lab's runs on real boards.

`work` counts what one device does in a run; `cost` makes seconds and joules of it, by the cost models.
"""
