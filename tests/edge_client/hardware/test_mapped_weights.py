"""What a waiting device does not hold: weights in a mapped file, and what ONNX Runtime scatters."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import LinkError
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.hardware.code_pages import release_code
from protofleet.edge_client.hardware.mapped_weights import laid_aside
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.training.extractor import Extractor


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"kernel": (8, 3, 3, 3), "rate": (), "none": (0, 4), "dense": (512, 1024)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {"odd": np.float32([1, 2, 3]), "turned": found["dense"][:4].T, **found, "last": np.float32([4, 5])}


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
        assert found[name].__array_interface__["data"][0] % 64 == 0
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
    bundle = read_bundle(mnist_like_bundle())
    aside = laid_aside(bundle.params, tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (3, *bundle.manifest.input_shape), dtype=np.uint8)
    release_code()
    np.testing.assert_array_equal(Extractor(bundle, aside).features(x), Extractor(bundle, bundle.params).features(x))


def test_a_client_holds_no_weights_but_those_that_were_laid_aside(mnist_like_bundle, tmp_path) -> None:
    path, arrays = mnist_like_bundle(), (np.zeros((20, 28, 28, 1), np.uint8), np.arange(20) % 10)
    given = {"bundle": str(path), "broker": "mqtt://127.0.0.1:1", "id": "pi-1", "state": str(tmp_path), "data": "-"}
    mine, found = read_bundle(path).sha256, list[type]()
    earlier = [o for o in gc.get_objects() if type(o) is Bundle]  # what other tests of this process have left

    def look(summary: dict, is_over: bool) -> None:
        held = [o for o in gc.get_objects() if type(o) is Bundle and o.sha256 == mine]
        held = [o for o in held if not any(o is other for other in earlier)]
        found.extend(type(root(value)) for each in held for value in each.params.values())

    with pytest.raises(LinkError):
        Service(read_settings(ClientSettings, {**given, "until_finished": True, "patience": 0.1}), arrays).run(look)
    assert set(found) == {mmap.mmap}


def root(value: object) -> object:
    """Whose memory an array is in."""
    while getattr(value, "base", None) is not None:
        value = value.base
    return value.obj if isinstance(value, memoryview) else value


@pytest.fixture(autouse=True)
def _linux() -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("only Linux says what is resident")
