"""The fleet's own certificate authority, and the broker's files, which stop a client from acting as another."""
