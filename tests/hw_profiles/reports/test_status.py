"""What `profile --measure` found on a board travels in its client's status message."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from edge_samples import fashion, releases

from protofleet.cli import main
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import method
from protofleet.contract.mqtt.link import Address
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire.codec import decode, encode
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.hardware.profile_record import PROFILE_FILE, measured_metrics
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.rollout.active_bundle import find_active_bundle
from protofleet.edge_client.rollout.rollout_file import RolloutFile
from protofleet.edge_client.rollout.rollout_work import RolloutWork
from protofleet.edge_client.run.client import Client, Figures
from protofleet.edge_client.run.round_work import Own
from protofleet.edge_client.settings import ClientSettings


def test_a_measurement_reaches_the_status(mnist_like_bundle: Callable[..., Path], tmp_path: Path) -> None:
    path = mnist_like_bundle()
    bundle, state = read_bundle(path), tmp_path / "state"
    options = {"bundle": str(path), "broker": "mqtt://127.0.0.1:1", "id": "d", "state": str(state), "data": "d"}
    with RolloutFile(state, make=True) as file:
        active = find_active_bundle(read_settings(ClientSettings, options), file, None)
        with active.journal() as journal:
            args = ["profile", str(path), "--measure", "--under-load", "--seconds", "0.1", "--threads", "1"]
            assert main([*args, "--json", str(state / PROFILE_FILE)]) == 0
            found = measured_metrics(state, bundle.sha256)
            device = Device(bundle, fashion(bundle, 20, (0, 1)), "d")
            rollout = RolloutWork(
                file,
                active.installed,
                bundle,
                path,
                device_id="d",
                terms=active.terms,
                samples=lambda: device.samples,
                manager=ServiceManager({}),
                stopping=threading.Event(),
            )
            noised = Releases(Policy(), Ledger(tmp_path / "l"), fleet="fleet", own=method("ncm-dp"), hyper={})
            who = Membership(Address.parse("mqtt://127.0.0.1:1"), "fleet", "d", bundle)
            status, quiet = (
                decode(
                    encode(
                        Client(
                            who,
                            journal,
                            Own(device, each, Blinding(bundle.manifest, fleet="fleet", device="d")),
                            rollout=rollout,
                            figures=Figures(found),
                            patience_s=60.0,
                            stopping=threading.Event(),
                            manager=ServiceManager({}),
                        )._health.birth()
                    )
                )
                for each in (releases(tmp_path, bundle), noised)
            )
    assert found["profile_train_step_ms"] > 0
    assert found.items() <= dict(status.metrics).items()  # type: ignore[union-attr]
    assert "rss_bytes" in status.metrics  # type: ignore[union-attr]
    assert found["profile_memory_at_most_bytes"] > found["profile_memory_predicted_bytes"] > 0
    of_photos = {name for name in found if name.startswith("profile_memory_")}
    own = {name: value for name, value in found.items() if name not in of_photos}
    assert dict(quiet.metrics) == own  # type: ignore[union-attr]  # of an ε that is printed: memory follows from photos


def test_what_is_compared_with_a_prediction_travels_where_not_all_has_room(tmp_path: Path) -> None:
    compared = (
        *("profile_train_step_ms", "profile_train_step_predicted_ms", "profile_train_step_peak_rss_bytes"),
        *("profile_memory_predicted_bytes", "profile_memory_at_most_bytes", "profile_memory_samples"),
        *("profile_inference_ms", "profile_inference_predicted_ms"),
    )
    of_a_board = [  # which tells its temperature, and whether it was throttled
        f"profile_{phase}_{what}"
        for phase in ("inference", "train_step")
        for what in ("p99_ms", "threads", "temperature_c", "under_load", "throttled")
    ]
    figures = {name: float(number) for number, name in enumerate((*of_a_board, *compared))}
    record = {"kind": "measured", "bundle": {"sha256": "00" * 32}, "status_metrics": figures}
    (tmp_path / PROFILE_FILE).write_text(json.dumps(record))
    found = measured_metrics(tmp_path, bytes(32))
    assert len(found) == 12
    assert found.items() <= figures.items()
    assert set(compared) < set(found)


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
