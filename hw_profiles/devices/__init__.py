"""Devices as data, and this machine as one of them."""
