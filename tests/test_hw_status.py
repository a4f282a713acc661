"""What `profile --measure` found on a board travels in its client's status message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from edge_samples import fashion

from contract.bundle import read_bundle
from contract.errors import UsageError
from contract.link import Address
from contract.wire import decode, encode
from edge_client.client import Client
from edge_client.device import Device
from edge_client.journal import Journal
from edge_client.profile_record import PROFILE_FILE, measured_metrics
from protofleet.cli import main


def test_a_measurement_reaches_the_status(mnist_like_bundle: Callable[..., Path], tmp_path: Path) -> None:
    path = mnist_like_bundle()
    bundle, state = read_bundle(path), tmp_path / "state"
    with Journal(state, fleet="f", device="d", bundle=bundle.sha256) as journal:
        args = ["profile", str(path), "--measure", "--seconds", "0.1", "--threads", "1"]
        assert main([*args, "--json", str(state / PROFILE_FILE)]) == 0
        found = measured_metrics(state, bundle.sha256)
        device = Device(bundle, fashion(bundle, 20, (0, 1)), "d")
        client = Client(
            device=device,
            journal=journal,
            bundle=bundle,
            address=Address.parse("mqtt://127.0.0.1:1"),
            fleet="f",
            device_id="d",
            measured=found,
        )
        status = decode(encode(client._health.birth()))
    assert found["profile_train_step_ms"] > 0
    assert found.items() <= dict(status.metrics).items()  # type: ignore[union-attr]
    assert "rss_bytes" in status.metrics  # type: ignore[union-attr]


def test_a_record_of_another_bundle_is_not_sent(tmp_path: Path) -> None:
    assert measured_metrics(tmp_path, b"\1" * 32) == {}
    record = {"kind": "measured", "bundle": {"sha256": "00" * 32}, "status_metrics": {"profile_inference_ms": 1.0}}
    (tmp_path / PROFILE_FILE).write_text(json.dumps(record))
    assert measured_metrics(tmp_path, b"\1" * 32) == {}
    assert measured_metrics(tmp_path, bytes(32)) == {"profile_inference_ms": 1.0}
    assert measured_metrics(tmp_path, b"\1" * 32, bytes(32)) == {"profile_inference_ms": 1.0}  # which it extends


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"bundle": {"sha256": "' + "00" * 32 + '"}}',
        '{"bundle": {"sha256": "' + "00" * 32 + '"}, "status_metrics": {"a": NaN}}',
        '{"bundle": {"sha256": "' + "00" * 32 + '"}, "status_metrics": {"a": "fast"}}',
    ],
)
def test_a_broken_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).write_text(text)
    with pytest.raises(UsageError, match=r"profile\.json"):
        measured_metrics(tmp_path, bytes(32))
