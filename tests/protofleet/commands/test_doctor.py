"""`protofleet doctor` finds what is wrong, says what helps, leaves nothing behind, and ends with 1 at a fault."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fleets
import pytest
from brokers import Embedded, free_port
from commands import ROOT, run_process

from protofleet.commands import doctor
from protofleet.commands.doctor import examine
from protofleet.contract.bundle import native_kernels
from protofleet.contract.extras import install_command


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fleets.bundle(tmp_path_factory.mktemp("doctor") / "fleet.bundle", "fedhkd")


def found(name: str, *given: object, **options: object) -> doctor.Finding:
    return next(finding for finding in examine(*given, **options) if finding.check == name)


def test_a_machine_that_runs_these_tests_is_well(bundle, tmp_path):
    broker = Embedded()
    broker.start()
    try:
        findings = list(examine(bundle, broker.url, state=tmp_path / "deep" / "state"))
    finally:
        broker.stop()
    assert [f for f in findings if f.state == "fault"] == []
    assert {"system", "Python", "packages", "methods", "bundle", "state directory", "broker"} <= {
        f.check for f in findings
    }
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    assert "a step of" in found("bundle", bundle).found


def test_each_fault_is_named_with_what_helps(bundle, tmp_path):
    broken = tmp_path / "broken.bundle"
    whole = bytearray(bundle.read_bytes())
    whole[len(whole) // 2] ^= 1
    broken.write_bytes(whole)
    assert found("bundle", broken).state == "fault"
    assert found("bundle", tmp_path / "none.bundle").state == "fault"
    assert found("state directory", state=broken).found.count("expected a directory") == 1
    nobody = found("broker", broker=f"mqtt://127.0.0.1:{free_port()}")
    assert nobody.state == "fault"
    assert "no broker" in nobody.found


def test_a_full_disk_and_a_small_memory_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    assert found("state directory", state=tmp_path).state == "fault"
    monkeypatch.setattr(doctor, "_memory", lambda name: 100 << 20)
    assert found("memory").state == "note"
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert "64-bit" in found("system").advice


def test_a_missing_package_is_a_fault_and_a_missing_extra_a_note(monkeypatch):
    plain = doctor.version

    def without(name: str) -> str:
        if name in ("cbor2", "pyarrow"):
            raise doctor.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(doctor, "version", without)
    assert found("packages") == doctor.Finding(
        "packages", "fault", f"protofleet {plain('protofleet')}", "pip install cbor2"
    )
    lacks = found("extra parquet")
    assert (lacks.state, lacks.found, lacks.advice) == ("note", "no pyarrow", install_command("parquet"))


def test_the_wheel_of_native_code_is_told_with_its_hash_where_it_is(monkeypatch):
    kernels = native_kernels.Kernels("1.2", Path("/lib.so"), "avx2", "ab" * 32)
    monkeypatch.setattr(native_kernels, "installed_kernels", lambda: kernels)
    assert found("kernels").found == f"protofleet-kernels 1.2, avx2, sha256 {'ab' * 32}"
    monkeypatch.setattr(native_kernels, "installed_kernels", lambda: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    assert found("kernels").state == "note"
    assert "cannot be used" in found("kernels").found
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert not [finding for finding in examine() if finding.check == "kernels"]


def test_a_method_that_cannot_be_loaded_is_noted(tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[protofleet.methods]\nbroken = broken_module:Method\n")
    done = run_process("doctor", "--json", tmp_path / "found.json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    told = {f["check"]: f for f in json.loads((tmp_path / "found.json").read_text())["findings"]}
    assert told["method broken"]["state"] == "note"
    assert "broken_module" in told["method broken"]["found"]


def test_a_fault_is_the_exit_code(tmp_path):
    code, said = fleets.run("doctor", "--bundle", tmp_path / "none.bundle", "--json", "-")
    assert code == 1
    assert "FAULT" in said


def test_an_extra_lacks_what_the_extras_that_it_names_lack() -> None:
    """`demo` is `protofleet[broker,report]`, and was well without either."""
    named = ['iotcore>=0.4; extra == "broker"', 'jinja2>=3.1; extra == "report"']
    wanted = [*named, 'protofleet[broker,report]; extra == "demo"']
    assert doctor._of_extra("demo", wanted) == named


def test_a_package_of_ours_that_an_extra_is_made_of_is_looked_for() -> None:
    wanted = ['protofleet-kernels>=0.1; extra == "kernels"', 'protofleet[broker]; extra == "photos"']
    assert doctor._of_extra("kernels", wanted) == wanted[:1]
    assert doctor._of_extra("photos", wanted) == []
