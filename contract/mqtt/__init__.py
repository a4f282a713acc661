"""The MQTT 5 link of both ends: one connection after another, TLS, and which of two processes stays.

`address` and `certificates` say where the broker is; `connection` decides, as a machine without sockets, in the terms
of `link_actions`; `transport` moves bytes; `link` joins them on a thread of its own. `tls_errors` puts a failed
handshake into words; `eviction` notices another process with the same certificate.
"""
