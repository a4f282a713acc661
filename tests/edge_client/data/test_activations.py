"""edge_client/data/activations.py: what a file's name follows from, who shares the budget, and a disk that refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protofleet.edge_client.data import activations
from protofleet.edge_client.data.activations import ActivationStore

WIDTH, ROW_BYTES, PLENTY = 30, 120, 1 << 20
TRUNK = bytes(32)
PHOTOS = np.arange(600 * 4, dtype=np.uint16).view(np.uint8).reshape(600, 2, 2, 2)


def _fetched(store: ActivationStore, name: str, x: np.ndarray, identity: bytes = TRUNK) -> tuple[int, int]:
    """How many photos' activations are kept, and how many had to be computed."""
    computed: list[int] = []

    def compute(row: int) -> np.ndarray:
        computed.append(row)
        return np.resize(np.array([row, x[row].sum(), 0.5], np.float32), WIDTH)

    found = store.fetch(name, identity, x, WIDTH, compute)
    expected = [np.resize([row, x[row].sum(), 0.5], WIDTH) for row in range(len(found))]
    np.testing.assert_array_equal(found, np.reshape(expected, (len(found), WIDTH)))
    return len(found), len(computed)


def test_a_file_is_of_all_its_photos_their_shape_and_the_trunk(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path, PLENTY)
    assert [_fetched(store, "train", PHOTOS) for _ in range(2)] == [(600, 600), (600, 0)]
    for row in (0, 255, 256, 599):
        changed = PHOTOS.copy()
        changed[row, 1, 1, 1] ^= 1
        assert _fetched(store, "train", changed) == (600, 600)
    assert _fetched(store, "train", changed.reshape(600, 4, 2, 1)) == (600, 600)
    assert _fetched(store, "train", changed.reshape(600, 4, 2, 1), bytes(range(32))) == (600, 600)
    assert len(list(tmp_path.iterdir())) == 1


def test_all_names_share_the_budget_and_each_has_its_file(tmp_path: Path, said: list[str]) -> None:
    store = ActivationStore(tmp_path, 10 * ROW_BYTES)
    assert _fetched(store, "train", PHOTOS[:6]) == (6, 6)
    (tmp_path / "train-0.activations.partial").write_bytes(b"of a process that was killed")
    assert _fetched(store, "held", PHOTOS[6:12]) == (4, 4)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["held", "train"]
    assert _fetched(store, "train", PHOTOS[:6]) == (6, 0)
    assert said[1].startswith("activations of 4 of 6 photos are kept (0 MB)")


def test_what_lies_there_already_needs_no_room_and_the_rest_leaves_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, left_free = activations.shutil.disk_usage(tmp_path), 64 << 20
    for free, fresh in ((left_free + 5 * ROW_BYTES, 5), (left_free, 0), (0, 0)):
        monkeypatch.setattr(activations.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert _fetched(ActivationStore(tmp_path / "new", PLENTY), f"at {free}", PHOTOS[:20]) == (fresh, fresh)
        assert _fetched(ActivationStore(tmp_path, PLENTY), "train", PHOTOS[:5]) == (5, 0 if free <= left_free else 5)


def test_a_disk_that_refuses_is_said_and_takes_nothing_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    store = ActivationStore(tmp_path, 6 * ROW_BYTES)
    with monkeypatch.context() as full:
        full.setattr(
            "protofleet.contract.files.atomic_files.os.fsync",
            lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        assert _fetched(store, "train", PHOTOS[:6])[0] == 0
    assert said[-1] == "activations cannot be kept (No space left on device): the trunk runs again in each epoch"
    assert _fetched(store, "held", PHOTOS[:6]) == (6, 6)
