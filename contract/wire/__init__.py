"""The messages of the wire, as values and as bytes.

In order: a message is a table of fields, and a value of it is valid if it exists (`messages`, `envelopes`,
`helper_messages`, `rollout_messages`, `calibration_messages`). `fields` says what a field may be, and reads and writes
maps; `tensors` does so for arrays, with `encodings` and `scaled_integers`. `codec` makes bytes of a message, with
`array_layouts`; `chunks` cuts what is large; `topics` says where it goes; `sampling` says who takes part.
`global_state` is what comes back, whole; `joint_heads` names the rows that a few devices are given. The same in RFC
8610's language: `messages.cddl`.
"""
