"""From bytes that anyone may have sent to a decision, and its receipt.

`ingest` decides. `validation` checks whether the content can be true, `blinded_shares` checks a share.
`broken_message` says which contribution a broken message is about. `receipts` answers, at the pace of `refusal_rate`.
"""
