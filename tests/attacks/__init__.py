"""What is attacked, by fuzzers and by a hostile broker: see `registry.py`."""
