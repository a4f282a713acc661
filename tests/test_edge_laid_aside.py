"""What a waiting device does not hold: weights in a mapped file, and what ONNX Runtime scatters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.bundle import read_bundle
from edge_client.code_pages import release_code
from edge_client.extractor import Extractor
from edge_client.laid_aside import laid_aside
from edge_client.onnx_session import warm_up


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"kernel": (8, 3, 3, 3), "rate": (), "none": (0, 4), "dense": (512, 1024)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def resident_kb(inside: int) -> int:
    """Of the mapping that this address is in, how much is resident."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(edge, 16) for edge in first.split("-"))
            found = low <= inside < high
        elif found and first == "Rss:":
            return int(rest[0])
    raise AssertionError("no such mapping")


def test_weights_laid_aside_are_the_same_and_leave_memory_with_the_code(tmp_path: Path) -> None:
    own = weights()
    found = laid_aside(own, tmp_path)
    assert found.keys() == own.keys()
    for name, value in own.items():
        np.testing.assert_array_equal(found[name], value, strict=True)
        assert not found[name].flags.writeable
    assert not [*tmp_path.iterdir()], "the file has no name"
    place = found["dense"].__array_interface__["data"][0]
    assert resident_kb(place) >= 2048
    release_code()
    assert resident_kb(place) == 0
    np.testing.assert_array_equal(found["dense"], own["dense"])


def test_weights_stay_where_they_are_where_no_file_can_be_written(tmp_path: Path) -> None:
    own = weights()
    assert laid_aside(own, tmp_path / "nowhere") is own
    assert laid_aside({}, tmp_path) == {}


def test_a_session_over_weights_that_were_laid_aside_gives_the_same_features(mnist_like_bundle, tmp_path) -> None:
    warm_up()
    bundle = read_bundle(mnist_like_bundle())
    aside = laid_aside(bundle.params, tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (3, *bundle.manifest.input_shape), dtype=np.uint8)
    release_code()
    np.testing.assert_array_equal(Extractor(bundle, aside).features(x), Extractor(bundle, bundle.params).features(x))


@pytest.fixture(autouse=True)
def _linux() -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("only Linux says what is resident")
