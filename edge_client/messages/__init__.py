"""Messages in and out: `inbox` reads what arrives, `outbox` decides when to send, `presence` says that the device is
here, `status_message` what it tells of itself. `membership` is who it is in a fleet.
"""
