"""The extractor for photos that `protofleet-photos` ships: what its file says of itself, and fleets' bundles of it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from commands import one_error_line, run, run_process
from safetensors.numpy import load

from protofleet.contract.bundle import shipped_extractor
from protofleet.contract.bundle.bundle_file import Bundle, Extends, read_bundle, write_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.bundle.test_vectors import TOLERANCE, distance
from protofleet.contract.errors import BundleError, UsageError
from protofleet.contract.methods import METHODS
from protofleet.edge_client.hardware.mapped_weights import laid_aside
from protofleet.edge_client.training.extractor import Extractor
from protofleet.export.bundles.fleet_bundle import fleet_bundle

FOLDER = Path(__file__).parents[2] / "photos"
SIGNS = ("zero", "two", "дом", "big cat")


@pytest.fixture(scope="module")
def shipped() -> Bundle:
    return read_bundle(photos_bundle())


def test_readme_has_the_size_and_the_hash_of_the_file_that_is_there_and_of_the_weights(shipped: Bundle) -> None:
    blob, readme = photos_bundle().read_bytes(), (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"| {len(blob):,} | `{hashlib.sha256(blob).hexdigest()}` |" in readme
    assert 5e6 < len(blob) < 10e6
    original = re.search(r"sha256 ([0-9a-f]{64})", shipped.manifest.provenance)
    assert original is not None
    assert original[1] in readme
    assert "Apache-2.0" in shipped.manifest.provenance
    assert "ML Illustrated" in (FOLDER / "NOTICE").read_text(encoding="utf-8")


def test_this_processor_computes_the_shipped_features_from_half_weights_mapped_or_not(
    shipped: Bundle, tmp_path: Path
) -> None:
    assert shipped.vectors is not None
    kinds = {value.dtype for value in shipped.params.values() if value.ndim > 1}
    assert kinds == {np.dtype(np.float16)}
    mapped = laid_aside(shipped.params, tmp_path)
    assert all(mapped[name].dtype == value.dtype for name, value in shipped.params.items())
    for params in (shipped.params, mapped):
        assert distance(Extractor(shipped, params).features(shipped.vectors.x), shipped.vectors.z) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name, rule in METHODS.items() if rule.extractor == "bundle"])
def test_a_fleet_s_bundle_has_the_same_extractor_for_every_method_without_training(
    name: str, shipped: Bundle, tmp_path: Path
) -> None:
    if METHODS[name].trains:
        return
    written = fleet_bundle(shipped, SIGNS, tmp_path / "fleet.bundle", method_name=name)
    fleet = read_bundle(written.path)
    assert fleet.sha256 == written.sha256
    assert (fleet.manifest.labels, fleet.manifest.method) == (SIGNS, name)
    assert (fleet.features, fleet.manifest.extractor) == (shipped.features, shipped.manifest.extractor)
    assert fleet.extractor(METHODS["ncm"]) == shipped.extractor(METHODS["ncm"])
    assert fleet.vectors is not None
    assert fleet_bundle(fleet, SIGNS, tmp_path / "again.bundle", method_name=name).sha256 == written.sha256


def test_a_fleet_s_bundle_extends_nothing_and_says_where_it_comes_from(shipped: Bundle, tmp_path: Path) -> None:
    longer = Extends(sha256="0" * 64, classes=1)
    source = replace(shipped, manifest=msgspec.structs.replace(shipped.manifest, extends=(longer,)))
    plain = fleet_bundle(source, SIGNS, tmp_path / "plain.bundle")
    told = fleet_bundle(source, SIGNS, tmp_path / "told.bundle", provenance="our own words", bundle_version=3)
    assert (plain.manifest.provenance, plain.manifest.version) == (shipped.manifest.provenance, 1)
    assert (told.manifest.provenance, told.manifest.version) == ("our own words", 3)
    assert read_bundle(plain.path).manifest.extends == read_bundle(told.path).manifest.extends == ()


@pytest.mark.parametrize(
    ("labels", "changes", "expected"),
    [
        (["cat"], {}, "2 to 65,535 classes"),
        (["cat", "cat"], {}, "names that differ"),
        (["cat", ""], {}, "not empty"),
        (["cat", "dog"], {"method_name": "fedproto"}, "one that trains nothing"),
        (["cat", "dog"], {"method_name": "ffc", "hyper": {"project": "1281"}}, "at most D"),
    ],
)
def test_what_a_fleet_s_bundle_cannot_be_is_one_line(
    labels: list[str], changes: dict, expected: str, shipped: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=expected):
        fleet_bundle(shipped, labels, tmp_path / "fleet.bundle", **changes)
    assert not (tmp_path / "fleet.bundle").exists()


def test_export_takes_the_shipped_extractor_and_a_bundle_s_without_torch(tmp_path: Path) -> None:
    first, second = tmp_path / "first.bundle", tmp_path / "second.bundle"
    run("export", "--backbone", "photos", "--method", "ffc", "--classes", "cat,dog,hamster", "--out", first)
    run("export", "--backbone", first, "--method", "fedcof", "--classes", "a,b", "--set", "groups=2", "--out", second)
    made = read_bundle(second).manifest
    assert (made.labels, made.method, made.hyper["groups"]) == (("a", "b"), "fedcof", 2)
    assert made.extractor == read_bundle(first).manifest.extractor
    words = ("--backbone", "photos", "--method", "ncm", "--classes", "2", "--out", tmp_path / "third.bundle")
    without = "import sys; sys.modules['torch'] = sys.modules['onnx'] = None; from protofleet.cli import main; main()"
    assert run_process("export", *words, code=without).returncode == 0
    line = one_error_line(run("export", *words, "--seed", "1"))
    assert "--seed" in line
    assert "the extractor stays as it is" in line


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert photos_bundle().is_file()
    monkeypatch.setattr(shipped_extractor, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(shipped_extractor, "_PACKAGE", "protofleet_photos_of_nobody")
    with pytest.raises(UsageError, match=r"protofleet-photos.*--backbone FILE\.bundle"):
        photos_bundle()


def test_half_weights_halve_a_bundle_and_nearly_keep_its_features(tmp_path: Path) -> None:
    from protofleet.export.bundles.build import build_bundle

    small = {"backbone": "small_cnn", "labels": ["a", "b"], "input_shape": (12, 12, 1), "half_weights": True}
    with pytest.raises(UsageError, match="--half-weights"):
        build_bundle(**small, method_name="fedproto", out=tmp_path / "x.bundle")
    whole = build_bundle(**small | {"half_weights": False}, method_name="ffc", out=tmp_path / "whole.bundle")
    half = build_bundle(**small, method_name="ffc", out=tmp_path / "half.bundle")
    assert half.bundle_bytes < 0.6 * whole.bundle_bytes
    one, other = read_bundle(whole.path), read_bundle(half.path)
    features = [Extractor(bundle, bundle.params).features(one.vectors.x) for bundle in (one, other)]  # type: ignore[union-attr]
    assert 0 < distance(features[1], features[0]) < 2e-3
    with zipfile.ZipFile(half.path) as archive:
        assert {v.dtype for v in load(archive.read("params.safetensors")).values()} == {
            np.dtype(np.float16),
            np.dtype(np.float32),
        }
    trained = msgspec.structs.replace(other.manifest, method="fedproto", head="local")
    with pytest.raises(BundleError, match="float32"):
        write_bundle(tmp_path / "y.bundle", trained, features=other.features, train_step=None, params=other.params)


@pytest.mark.slow
def test_the_wheel_has_the_bundle_its_licence_and_the_notice(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "photos")  # a build leaves files where it is done
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tmp_path / "photos")]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("protofleet_photos-*.whl"))) as wheel:
        names = wheel.namelist()
        assert {name.rpartition("/")[2] for name in names} >= {"photos.bundle", "LICENSE", "NOTICE"}
        assert not any("make_bundle" in name for name in names)
        assert wheel.read("protofleet_photos/photos.bundle") == photos_bundle().read_bytes()
