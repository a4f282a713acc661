"""`protofleet init`: from a folder of photos to a fleet that can be started.

`look` reads the photos and says what is in them. `files` writes the fleet's folder. `first_run` starts broker,
aggregator and one device here, and asks about photos that were not shown.
"""
