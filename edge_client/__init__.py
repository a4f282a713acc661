"""The device: runs a bundle, trains on ONNX Runtime, summarises, publishes, survives power cuts.

A round's way: `run` is the process; `messages` come in, and `rounds` says what they ask for; `device` computes, with
`training` on `data`; `privacy` says what may leave, and records it; `journal` makes it durable; `messages` sends it.

Beside it: `standing` is the same without rounds, `rollout` changes the bundle, `trials` tries what is relied on,
`identity` signs and trusts, `answers` answers about photos, `cameras` take them, `photos` keeps some, `page` shows
them, `home_assistant` tells a house of them, `hardware` is the board; `settings` are those of `protofleet client`.
"""

if __name__ != "protofleet.edge_client":
    raise ImportError(
        "expected import protofleet.edge_client, got import edge_client, try the full name", name="edge_client"
    )
