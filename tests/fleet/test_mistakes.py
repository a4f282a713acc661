"""Mistakes with methods as a user meets them: an exit code and one line; a fleet that runs is not harmed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fleets
import msgspec
import numpy as np
import pytest
from aggregator_samples import manifest
from commands import run_process
from contract_samples import empty_graph
from fleets import Fleet, bundle, error_line, fleet_in, run, share

from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.extras import install_command
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import decode

NOWHERE = "mqtt://127.0.0.1:1"
EXPORT = ("export", "--backbone", "small_cnn", "--classes", "5", "--input", "14x14x1", "--out")
MISSING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dp_accounting":
            raise ModuleNotFoundError("No module named 'dp_accounting'", name=name)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made(method, hyper)`: a real bundle, exported once."""
    folder, known = tmp_path_factory.mktemp("bundles"), dict[str, Path]()

    def make(name: str, **hyper: object) -> Path:
        key = f"{name}{sorted(hyper.items())}"
        if key not in known:
            known[key] = bundle(folder / f"{len(known)}.bundle", name, hyper=hyper)
        return known[key]

    return make


def _bundle(path: Path, name: str = "fedproto", *, hyper: dict[str, object] | None = None, **changes: Any) -> Path:
    """A bundle with opaque graphs, which an aggregator never opens; its version tells it from the others."""
    settled = method(name).resolve(hyper or {})
    parts = msgspec.structs.replace(manifest(name=name), hyper=settled, **changes)
    params = {"backbone.weight": np.ones((2, 2), np.float32)}
    write_bundle(path, parts, features=empty_graph(), train_step=empty_graph(), params=params)
    return path


def _aggregate(folder: Path, *bundles: Path, options: tuple[str, ...] = ()) -> tuple[int, str]:
    chosen = [word for path in bundles for word in ("--bundle", path)]
    return run("aggregate", *chosen, "--broker", NOWHERE, "--store", folder / "s.sqlite", "--patience", 1, *options)


def _client(folder: Path, path: Path, x: np.ndarray, y: np.ndarray, *options: object) -> tuple[int, str]:
    return run(*_words(folder, path, x, y), *options)


def _words(folder: Path, path: Path, x: np.ndarray, y: np.ndarray) -> tuple[object, ...]:
    np.savez(folder / "d.npz", x=x, y=y)
    told = ("--data", folder / "d.npz", "--state", folder / "state", "--broker", NOWHERE, "--patience", 0.2)
    return ("client", "--id", "d0", "--bundle", path, *told)


# ── names ──


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ("--method", "fedprotto"),
            "unknown method, expected a known method, got fedprotto, try one of fedproto",
        ),
        (("--method", "fedhp", "--set", "anchor_pul=sum"), "no hyper-parameter 'anchor_pul', try one of anchor_pull"),
        (("--method", "fedhkd", "--set", "temprature=1"), "no hyper-parameter 'temprature', try one of temperature"),
        (
            ("--method", "fedhp", "--set", "aggregation=client"),
            "aggregation, expected one of share, printed, got client",
        ),
        (("--method", "fedpr", "--set", "distance=l1"), "distance, expected one of squared, l2, sum, got l1"),
        (("--method", "fedhkd", "--set", "noise=-1"), "noise, expected 0 to 1e+06, got -1"),
        (("--method", "ffc", "--set", "project=100000"), "project, expected 0 to 65536, got 100000"),
        (("--method", "ffc", "--set", "project=129"), "project, expected at most D = 128, got 129"),
        (("--method", "fedhp", "--head", "local"), "--head, expected none for fedhp, got local"),
    ],
)
def test_a_name_or_value_that_no_method_has(
    options: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since torch takes seconds to load; `protofleet/test_cli.py` holds the two to be the same."""
    from protofleet.cli import main

    assert main([*EXPORT, str(tmp_path / "x.bundle"), *options]) == 2
    assert line in error_line(capsys.readouterr().err)
    assert not (tmp_path / "x.bundle").exists()


def test_a_demo_of_an_unknown_method() -> None:
    code, said = run("demo", "--method", "fedprotto")
    assert code == 2
    assert "try one of fedproto" in error_line(said)


# ── bundles that are no fleet ──


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("fedproto", {"labels": ("class-0", "class-1")}, "number of classes than the fleet's first bundle, expected 3"),
        ("fedproto", {"labels": ("class-0", "class-2", "class-1")}, "class 1 is another than in"),
        ("fedproto", {"features": 6}, "another feature width than the fleet's first bundle, expected 4, got 6"),
        ("spherefed", {"hyper": {"project": 2}}, "another project than the fleet's first bundle, expected 0, got 2"),
        ("spherefed", {"hyper": {"project_seed": 2}}, "another project_seed than the fleet's first bundle"),
        ("fedproto", {"hyper": {"aggregation": "client"}}, "another weighting"),
    ],
)
def test_bundles_that_differ_where_they_must_agree(
    name: str, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    bundles = [_bundle(tmp_path / "one.bundle", name), _bundle(tmp_path / "other.bundle", name, version=2, **changes)]
    code, said = _aggregate(tmp_path, *bundles)
    assert code == 2
    assert "other.bundle: " in error_line(said)
    assert line in error_line(said)
    assert not (tmp_path / "s.sqlite").exists()


def test_two_bundles_cannot_end_with_an_ffc_round(tmp_path: Path) -> None:
    bundles = [_bundle(tmp_path / f"{n}.bundle", version=n) for n in (1, 2)]
    code, said = _aggregate(tmp_path, *bundles, options=("--calibrate",))
    assert code == 2
    assert "a round of FFC, expected one backbone, got 2 bundles, try --no-calibrate" in error_line(said)
    code, said = _aggregate(tmp_path, *bundles)  # left to itself it leaves that round out, and goes on to the broker
    assert code == 1
    assert "broker" in error_line(said)


def test_the_same_bundle_twice(tmp_path: Path) -> None:
    path = _bundle(tmp_path / "one.bundle")
    code, said = _aggregate(tmp_path, path, path)
    assert code == 2
    assert "expected a bundle that was not given yet, got the same one again" in error_line(said)


def test_a_device_whose_bundle_is_not_the_fleets_ends_and_the_others_go_on(
    fleet: Fleet, made: Callable[..., Path]
) -> None:
    mine, another, stranger = (made("fedproto", epochs=1, lr=lr) for lr in (0.01, 0.02, 0.03))
    fleet.client("d2", stranger, share(2, (0, 3)))
    fleet.wait_for("d2", "connected")
    fleet.aggregator([mine, another], "--rounds", 2, "--min-clients", 2, "--no-calibrate")
    fleet.client("d0", mine, share(0, (0, 1)))
    fleet.client("d1", another, share(1, (1, 2)))
    codes = fleet.finish()
    assert (codes["d2"], codes["d0"], codes["d1"]) == (2, 0, 0), fleet.log("aggregator")
    known = [read_bundle(path).sha256.hex()[:12] for path in (mine, another)]
    line = error_line(fleet.log("d2"))
    assert f"the fleet runs another bundle, expected sha256 {known[0]}… or {known[1]}…" in line
    assert sorted(fleet.payloads(1)) == sorted(fleet.payloads(2)) == ["d0", "d1"]


# ── too little data ──


@pytest.mark.parametrize("count", [1, 7])
def test_a_device_with_one_sample_or_one_class_is_welcome(
    count: int, tmp_path: Path, made: Callable[..., Path]
) -> None:
    x, _ = share(0, (3,), count)
    code, said = _client(tmp_path, made("fedhp", epochs=1), x, np.full(count, 3))
    assert code == 1
    assert "no broker" in error_line(said)  # which is all that it lacks here


def test_one_sample_is_enough_for_ffc(fleet: Fleet, made: Callable[..., Path]) -> None:
    """It trains nothing: the sums of one sample are sums as any other's, beside a device with more."""
    path = made("ffc", project=8)
    fleet.aggregator([path], "--rounds", 1, "--min-clients", 2)
    fleet.client("d0", path, share(0, (3,), 1))
    fleet.client("d1", path, share(1, (0, 3)))
    assert set(fleet.finish().values()) == {0}
    sums = {
        device: decode(payload).statistic(FeatureGram, fleets.CLASSES, 8)
        for device, payload in fleet.payloads(1).items()
    }
    assert sums["d0"].counts.tolist() == [0, 0, 0, 1, 0]
    np.testing.assert_allclose(sums["d0"].matrix, np.outer(sums["d0"].cross[3], sums["d0"].cross[3]), atol=1e-12)
    assert fleet.state(read_bundle(path).sha256).head.classes.tolist() == [0, 3]


# ── privacy ──


def test_an_accountant_that_is_not_installed(tmp_path: Path, made: Callable[..., Path]) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(MISSING)
    path = os.pathsep.join([str(tmp_path / "hook"), *filter(None, sys.path)])
    words = _words(tmp_path, made("fedhkd", epochs=1, noise=1.0), *share(0, (0, 1)))
    done = run_process(*words, PYTHONPATH=path)
    assert done.returncode == 2
    line = error_line(done.stderr)
    assert "the privacy accountant, expected dp-accounting, got ModuleNotFoundError" in line
    assert f"try {install_command('privacy')}" in line
