"""Whom a device trusts, and the key it signs with.

`signing_identity` is its own key, `enrolment` how a token enrols it, `trust` what it believes of what it hears.
"""
