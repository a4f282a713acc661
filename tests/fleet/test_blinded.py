"""A blinded fleet of real processes over a real broker: devices, an aggregator, and a helper that is somebody else."""

from __future__ import annotations

import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest
from brokers import require_mosquitto
from commands import run
from fleets import CLASSES, FLEET, Fleet, bundle, fleet_in, share
from fleets import run as run_whole
from pki_samples import Authority, GuardedMosquitto
from postgres_server import need_postgres

from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.identity.signatures import Signer, inside
from protofleet.contract.privacy.sealing import make_helper_key
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.messages import Contribution
from protofleet.pki.authority import Office
from protofleet.pki.register import Member

DEVICES = 3


def keys(folder: Path) -> Path:
    """A key of each device and the helper's list of them; the helper's public key file."""
    make_helper_key(folder / "helper.key")
    lines = ["[devices]"]
    for index in range(DEVICES):
        secret = bytes([index + 1]) * 32
        (folder / f"d{index}.key").write_bytes(secret)
        lines.append(f'd{index} = "{Signer(secret).public_key.hex()}"')
    (folder / "devices.toml").write_text("\n".join(lines))
    return folder / "helper.key.pub"


def gathered(fleet: Fleet, made: Path, *blinded: object) -> np.ndarray:
    """One round of FFC, and the head (C, D) that it came to."""
    fleet.aggregator([made], "--min-clients", DEVICES, "--ridge", "10", *blinded)
    for index in range(DEVICES):
        name = f"d{index}"
        own = ("--helper-key", blinded[1], "--identity", fleet.folder / f"{name}.key") if blinded else ()
        fleet.client(name, made, share(index, range(CLASSES)), *own)
    end_well(fleet)
    return fleet.state(read_bundle(made).sha256).head.dense(CLASSES, read_bundle(made).manifest.features)[0]


def end_well(fleet: Fleet) -> None:
    """Wait until all but the helper have ended by themselves."""
    logs = lambda: "\n---\n".join(map(fleet.log, fleet.processes))  # noqa: E731
    for name in set(fleet.processes) - {"helper"}:
        try:
            assert fleet.processes[name].wait(120) == 0, logs()
        except subprocess.TimeoutExpired:
            pytest.fail(logs())


def statistic(fleet: Fleet, made: Path) -> FeatureGram:
    """The sums of the round that a store holds, of one device after another or as one."""
    width, total = read_bundle(made).manifest.features, None
    with stored_run(fleet.folder / "store.sqlite") as stored:
        for _, message in stored.contributions(1, "ffc"):
            part = message.statistic(FeatureGram, CLASSES, width)
            total = part if total is None else total.merge(part)
    return total


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_blinded_round_gives_the_open_rounds_head_and_no_part_holds_a_devices_numbers(tmp_path):
    made = bundle(tmp_path / "fleet.bundle", "ffc")
    for name in ("open", "blinded"):
        (tmp_path / name).mkdir()
    with fleet_in(tmp_path / "open") as fleet:
        plain = gathered(fleet, made)
        sent, pooled = fleet.messages(1), statistic(fleet, made)
    with fleet_in(tmp_path / "blinded") as fleet:
        public = keys(fleet.folder)
        told = ("--devices", fleet.folder / "devices.toml", "--least", DEVICES)
        where = ("--key", fleet.folder / "helper.key", "--store", fleet.folder / "ledger.sqlite")
        fleet.start("helper", "helper", "--broker", fleet.url, "--fleet", FLEET, *where, *told)
        blinded = gathered(fleet, made, "--helper", public, "--least", DEVICES)
        assert "opened the sum of 3 devices" in fleet.log("helper")
        shares = [inside(fleet.sent(f"d{n}")[1][0]) for n in range(DEVICES)]
        summed = statistic(fleet, made)
    np.testing.assert_allclose(blinded, plain, atol=1e-9, rtol=0)
    assert np.abs(summed.gram - pooled.gram).max() <= DEVICES * 2.0**-37 + 1e-12
    assert summed.counts.tolist() == pooled.counts.tolist()
    assert all(isinstance(each, Contribution) and not len(each.counts) for each in shares)
    assert len({len(each.share) for each in shares}) == 1
    kept = b"".join(path.read_bytes() for path in (tmp_path / "blinded").iterdir() if "sqlite" in path.name)
    for each in sent:  # neither aggregator nor helper has any device's own numbers
        assert each.triangle[:4].tobytes() not in kept
    with sqlite3.connect(tmp_path / "blinded" / "ledger.sqlite") as db:
        assert db.execute("SELECT devices, least FROM opened").fetchall() == [(DEVICES, DEVICES)]
    db.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_blinded_round_that_two_workers_take_gives_the_open_rounds_head(tmp_path):
    made, place = bundle(tmp_path / "fleet.bundle", "ffc"), need_postgres().new_place()
    for name in ("open", "blinded"):
        (tmp_path / name).mkdir()
    with fleet_in(tmp_path / "open") as fleet:
        plain = gathered(fleet, made)
    with fleet_in(tmp_path / "blinded") as fleet:
        public = keys(fleet.folder)
        told = ("--devices", fleet.folder / "devices.toml", "--least", DEVICES)
        where = ("--key", fleet.folder / "helper.key", "--store", fleet.folder / "ledger.sqlite")
        fleet.start("helper", "helper", "--broker", fleet.url, "--fleet", FLEET, *where, *told)
        words = ("--min-clients", DEVICES, "--ridge", "10", "--helper", public, "--least", DEVICES, "--store", place)
        for name in ("one", "two"):
            fleet.start(
                name, "aggregate", "--worker", "--broker", fleet.url, "--fleet", FLEET, "--bundle", made, *words
            )
        for index in range(DEVICES):
            name, own = f"d{index}", ("--helper-key", public, "--identity", fleet.folder / f"d{index}.key")
            fleet.client(name, made, share(index, range(CLASSES)), *own)
        end_well(fleet)
        assert "opened the sum of 3 devices" in fleet.log("helper")
    with DurableStore(place, read_bundle(made).sha256, FLEET) as store:
        blinded = store.state().head.dense(CLASSES, read_bundle(made).manifest.features)[0]
    np.testing.assert_allclose(blinded, plain, atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_blinded_round_over_a_mosquitto_with_the_files_of_pki_and_every_signature(tmp_path):
    """Every process has its own certificate, the access rules let each do its part, and the helper hears the
    aggregator's signature alone; then a second helper comes with the same certificate."""
    require_mosquitto()
    names = [f"d{index}" for index in range(DEVICES)]
    authority = Authority(tmp_path / "pki", dict.fromkeys(names, (FLEET,)), (FLEET,))
    with Office.open(authority.folder) as office:
        office.admit("helper", Member(role="helper", fleets=(FLEET,)))
    broker = GuardedMosquitto(authority)
    made = bundle(tmp_path / "fleet.bundle", "ffc", private_key=bytes([9]) * 32)
    public = keys(tmp_path)
    (tmp_path / "aggregator.key").write_bytes(bytes([9]) * 32)
    (tmp_path / "aggregator.pub").write_bytes(Signer(bytes([9]) * 32).public_key)

    def own(name: str) -> tuple[object, ...]:
        return "--ca", authority.folder / "broker" / "ca.pem", "--cert", authority.file(name)

    def helps(ledger: str) -> tuple[object, ...]:
        where = ("--key", tmp_path / "helper.key", "--store", tmp_path / ledger, "--broker", authority.url)
        told = ("--devices", tmp_path / "devices.toml", "--least", DEVICES, "--trust", tmp_path / "aggregator.pub")
        return ("helper", *where, "--fleet", FLEET, *told, *own("helper"))

    fleet = Fleet(folder=tmp_path, url=authority.url)
    try:
        fleet.start("helper", *helps("ledger.sqlite"))
        blinded = ("--helper", public, "--least", DEVICES, "--sign", tmp_path / "aggregator.key")
        fleet.aggregator([made], "--ridge", "10", *blinded, *own("aggregator"))
        for index, name in enumerate(names):
            signs = ("--identity", tmp_path / f"{name}.key", "--trust", tmp_path / "aggregator.pub")
            fleet.client(name, made, share(index, range(CLASSES)), "--helper-key", public, *signs, *own(name))
        end_well(fleet)
        assert "opened the sum of 3 devices" in fleet.log("helper")
        assert statistic(fleet, made).counts.sum() == sum(len(share(index, range(CLASSES))[1]) for index in range(3))
        assert "Denied" not in broker.log
        code, said = run_whole(*helps("second.sqlite"))
        assert (code, "the ledger that opened 1 with this key, got a new one" in said) == (2, True), said
    finally:
        fleet.end()
        broker.close()


def test_the_command_line_of_the_helper_is_one_line_at_every_mistake(tmp_path):
    key, listed = tmp_path / "key", tmp_path / "devices.toml"
    done = run("helper", "--new-key", key)
    assert done.returncode == 0
    assert "aggregate --helper" in done.stderr
    told = ["--store", tmp_path / "ledger", "--broker", "mqtt://127.0.0.1:1", "--devices", listed, "--least"]
    assert "expected --store and --broker" in run("helper", "--key", key).stderr
    for least in (1, 1_025):
        assert "--least, expected 2 to 1,024" in run("helper", "--key", key, *told, least).stderr
    assert "No such file" in run("helper", "--key", key, *told, 3).stderr
    for text, line in WRONG_LISTS.items():
        listed.write_text(text)
        assert line in run("helper", "--key", key, *told, 3).stderr


WRONG_LISTS = {
    "devices = ": "expected TOML",
    "[others]": "a table [devices]",
    '[devices]\ncam-1 = "00"': "64 hex digits",
    f'[devices]\ncam-1 = "{"ab" * 32}"\ncam-2 = "{"ab" * 32}"': "a key of its own for each device",
    f'[devices]\n"cam/1" = "{"0" * 64}"': "of a-z, 0-9",
}
