"""The device: runs a bundle, trains on ONNX Runtime, summarises, publishes, survives power cuts."""

if __name__ != "protofleet.edge_client":
    raise ImportError(
        "expected import protofleet.edge_client, got import edge_client, try the full name", name="edge_client"
    )
