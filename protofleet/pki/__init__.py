"""The fleet's own certificate authority, and the broker's files, which stop a client from acting as another.

`authority` issues, revokes and renews, `x509` makes the certificates, `register` keeps what was issued; `names` are who
may be named what; `broker` writes Mosquitto's files; `expiry` says what runs out when.
"""
