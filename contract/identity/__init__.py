"""Identity: keys, signatures, tokens and lists of devices.

- `signing_keys` reads keys from files.
- `ed25519` signs bytes and checks signatures; `signatures` does the same for messages.
- `tokens` are what a device enrols with.
- `allowlist` is a file of devices and their keys.
"""
