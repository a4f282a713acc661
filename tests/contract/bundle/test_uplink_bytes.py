"""Bytes up in a round: those of what a device of each method really sends, wherever a person is told them."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import numpy as np
import pytest
from contract_samples import small_parts
from lab_samples import shipped, some

from protofleet.cli import main
from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.bundle.uplink_bytes import counted_bytes, payload_bytes, sent_bytes, uplink_bytes
from protofleet.contract.methods import METHODS, method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.device.device import Device
from protofleet.hw_profiles.workload.calibration_step import statistic_bytes


@pytest.mark.parametrize("name", METHODS)
def test_profile_and_inspect_tell_what_a_device_sends(name, lab_bundle, tmp_path, capsys):
    path = lab_bundle(name)
    bundle = read_bundle(path)
    result = Device(bundle, some(shipped().train, 8), "device-1").run_round(
        Announcement(bytes(4), 1, "open", name, bundle.sha256), None
    )
    samples = 1000 if method(name).statistic.COUNTED else 1
    sent = dataclasses.replace(result.contribution, counts=np.full_like(result.contribution.counts, samples))
    really = len(encode(sent, METHODS[name].encoding))
    assert payload_bytes(bundle.manifest, method(name)) == really
    args = ["profile", str(path), "--devices", "raspberry-pi-4", "--json", str(tmp_path / "r.json")]
    assert main(args) == 0
    told = json.loads((tmp_path / "r.json").read_text())["uplink"]
    assert told["contribution_bytes"] == really
    assert told["closing_bytes"] == (uplink_bytes(bundle.manifest)["ffc"] if method(name).trains else really)
    assert told["statistic"] == METHODS[name].statistic.NAME
    capsys.readouterr()
    assert main(["inspect", str(path), "--json", "-"]) == 0
    inspected = json.loads(capsys.readouterr().out)["uplink_bytes_per_round"]
    assert inspected[name] == really
    assert inspected["fedavg"] == told["fedavg_bytes"]
    assert inspected["ffc"] > really or not method(name).trains


def test_ffc_sends_f64_and_the_cost_report_counts_so():
    triangle = 1280 * 1281 // 2
    assert 8 * (triangle + 10 * 1280) < sent_bytes(method("ffc"), 10, 1280) < 8 * (triangle + 10 * 1280) + 300
    assert statistic_bytes(method("ffc"), 10, 1280) == pytest.approx(6.66e6, rel=0.002)
    assert statistic_bytes(method("fedproto"), 10, 1280) == sent_bytes(method("fedproto"), 10, 1280)


def test_rounds_in_which_nothing_goes_up_have_no_class_rows():
    assert sent_bytes(method("spherefed"), 10, 1280) < 200 < sent_bytes(method("fedproto"), 10, 1280)


def test_a_bundle_that_trains_nothing_is_compared_with_the_head_that_fedavg_would_send(tmp_path):
    """Its manifest has frozen weights alone, so what FedAvg trains there is a head of C rows of D."""
    parts = small_parts(trainable=False)
    manifest = parts["manifest"]
    frozen = tuple(msgspec.structs.replace(t, role="frozen") for t in manifest.state if t.role != "optimizer")
    parts["manifest"] = msgspec.structs.replace(manifest, method="ffc", head="none", hyper={}, state=frozen)
    write_bundle(tmp_path / "b.bundle", **parts)
    manifest = read_bundle(tmp_path / "b.bundle").manifest
    assert uplink_bytes(manifest)["fedavg"] == 4 * manifest.classes * manifest.features


@pytest.mark.parametrize("found", METHODS.values(), ids=METHODS)
def test_bytes_by_the_numbers_alone_are_nearly_those_that_are_sent(found):
    """What frames them is left out: at this size less than a hundredth, and a count for each row."""
    sent, counted = (
        bytes_of(found, 20, 300, found.groups(found.resolve({}))) for bytes_of in (sent_bytes, counted_bytes)
    )
    if found.statistic.FIELDS:
        assert counted <= sent <= 1.01 * counted + 500
    else:
        assert counted == 0
