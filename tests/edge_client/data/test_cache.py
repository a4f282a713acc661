"""edge_client/data/cache.py: decoded once, mapped, found again; whatever changes, dies or is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from contract_samples import small_parts
from edge_samples import FASHION, announcement
from PIL import Image

from protofleet.cli import main
from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.errors import DataError
from protofleet.contract.files.atomic_files import lock
from protofleet.contract.wire.codec import encode
from protofleet.edge_client.data import LocalData, cache, decode
from protofleet.edge_client.data.load import load_data, load_held_out
from protofleet.edge_client.data.samples import release_pages
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.trainer import Trainer
from tests.edge_client.data.test_load import manifest, png, samples, sorted_rows, write_folder, write_parquet

X, Y = samples(12)
LABELS = manifest().labels


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "photos", X, Y, LABELS)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each image that is opened."""
    seen: list[int] = []
    real = Image.open

    def opening(source: object, **options: object) -> Image.Image:
        seen.append(1)
        return real(source, **options)

    monkeypatch.setattr(decode.Image, "open", opening)
    return seen


def rows(data: LocalData) -> list[tuple[int, bytes]]:
    return sorted_rows(data.x, data.y)


def is_mapped(x: np.ndarray) -> bool:
    while isinstance(x, np.ndarray):
        x = x.base
    return type(x).__name__ in ("mmap", "memoryview")


def test_images_are_decoded_once_and_then_mapped(photos: Path, tmp_path: Path, opened: list[int]) -> None:
    place = tmp_path / "state" / "images"
    first = load_data(photos, manifest(), cache=place)
    assert len(opened) == 12
    again = load_data(photos, manifest(), cache=place)
    assert len(opened) == 12
    for data in (first, again):
        assert rows(data) == sorted_rows(X, Y)
        assert is_mapped(data.x)
        assert not data.x.flags.writeable
    assert [oct(path.stat().st_mode & 0o777) for path in (place.parent, place)] == ["0o700"] * 2
    assert {oct(path.stat().st_mode & 0o777) for path in place.iterdir()} == {"0o600"}
    (file,) = place.glob("*.images")
    assert X.nbytes < file.stat().st_size < X.nbytes + 1000


def _touch(root: Path) -> None:
    file = next(root.rglob("*.png"))
    os.utime(file, ns=(1, 1))


def _add(root: Path) -> None:
    (root / "ant" / "more.png").write_bytes(png(X[3]))


def _replace(root: Path) -> None:
    (root / "bee" / "0001.png").write_bytes(png(X[2]))


CHANGES = {
    "touched": _touch,
    "added": _add,
    "removed": lambda root: (root / "ant" / "0000.png").unlink(),
    "replaced": _replace,
    "renamed": lambda root: (root / "cat" / "0002.png").rename(root / "cat" / "9999.png"),
    "moved to another class": lambda root: (root / "cat" / "0002.png").rename(root / "ant" / "0002.png"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_has_changed_is_decoded_again_and_the_old_file_goes(
    change: str, photos: Path, tmp_path: Path, opened: list[int]
) -> None:
    place = tmp_path / "images"
    load_data(photos, manifest(), cache=place)
    (before,) = place.glob("*.images")
    CHANGES[change](photos)
    fresh = load_data(photos, manifest())
    opened.clear()
    data = load_data(photos, manifest(), cache=place)
    assert len(opened) == (0 if change == "removed" else 1)
    assert rows(data) == rows(fresh)
    (after,) = place.glob("*.images")
    assert before != after


def test_without_room_for_both_the_old_file_goes_first_and_all_is_decoded_again(
    photos: Path, tmp_path: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "images"
    load_data(photos, manifest(), cache=place)
    _add(photos)
    opened.clear()
    real = cache.shutil.disk_usage(tmp_path)

    def usage(_: object) -> object:
        free = cache._LEFT_FREE_BYTES + X.nbytes if list(place.glob("*.images")) else real.free
        return real._replace(free=free)

    monkeypatch.setattr(cache.shutil, "disk_usage", usage)
    assert len(load_data(photos, manifest(), cache=place)) == 13
    assert len(opened) == 13


def test_the_older_file_of_one_who_was_killed_before_he_removed_it_goes(photos: Path, tmp_path: Path) -> None:
    place = tmp_path / "images"
    load_data(photos, manifest(), cache=place)
    (older,) = place.glob("*.images")
    raw = older.read_bytes()
    _add(photos)
    load_data(photos, manifest(), cache=place)
    older.write_bytes(raw)
    load_data(photos, manifest(), cache=place)
    assert [path.name for path in place.glob("*.images")] != [older.name]
    assert len(list(place.glob("*.images"))) == 1


def test_rows_of_parquet_are_found_again_beside_other_files(tmp_path: Path, opened: list[int]) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for count, name in ((12, "a"), (5, "b")):
        write_parquet(folder / f"{name}.parquet", X[:count], Y[:count], LABELS)
        data = load_data(folder, manifest(), cache=tmp_path / "images")
    assert (len(opened), rows(data)) == (17, sorted_rows(np.concatenate([X, X[:5]]), np.concatenate([Y, Y[:5]])))


def test_files_that_look_alike_are_told_apart_by_names_and_sizes(tmp_path: Path) -> None:
    """Copies that keep their times, of pictures that are all of one size."""
    root, place = tmp_path / "d", tmp_path / "images"

    def put(name: str, pixels: np.ndarray) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / name)
        os.utime(root / name, ns=(1, 1))

    put("ant/0.bmp", X[0])
    put("bee/1.bmp", X[1])
    load_data(root, manifest(), cache=place)
    (root / "cat").mkdir()
    (root / "ant/0.bmp").rename(root / "cat/0.bmp")
    assert rows(load_data(root, manifest(), cache=place)) == sorted_rows(X[[1, 0]], np.array([1, 2]))
    put("bee/1.bmp", np.repeat(X[2], 2, axis=0))
    expected = load_data(root, manifest())
    assert rows(load_data(root, manifest(), cache=place)) == rows(expected)


def test_another_shape_is_another_file(photos: Path, tmp_path: Path) -> None:
    load_data(photos, manifest(), cache=tmp_path / "images")
    assert load_data(photos, manifest(shape=(2, 2, 1)), cache=tmp_path / "images").x.shape == (12, 2, 2, 1)
    assert len(list((tmp_path / "images").glob("*.images"))) == 1


def test_training_and_test_images_are_kept_side_by_side(photos: Path, tmp_path: Path, opened: list[int]) -> None:
    other = write_folder(tmp_path / "other", X[:3], Y[:3], LABELS)
    for _ in range(2):
        load_data(photos, manifest(), cache=tmp_path / "images")
        load_data(other, manifest(), purpose="test", cache=tmp_path / "images")
    assert len(opened) == 15
    assert len(list((tmp_path / "images").glob("*.images"))) == 2


def test_parquet_is_kept_too_and_both_parts_of_a_hold_out_are_views_of_one_file(
    tmp_path: Path, opened: list[int]
) -> None:
    path = write_parquet(tmp_path / "d.parquet", X, Y, LABELS)
    for _ in range(2):
        train, held = load_held_out(path, manifest(), share=0.25, cache=tmp_path / "images")
    assert len(opened) == 12
    assert sorted(rows(train) + rows(held)) == sorted_rows(X, Y)
    assert is_mapped(train.x)
    assert is_mapped(held.x)


def test_another_share_is_held_out_of_the_same_photos(photos: Path, tmp_path: Path) -> None:
    """They lie in another order in the file then."""
    for share, held_back in ((0.25, 3), (0.5, 6), (0.25, 3)):
        train, held = load_held_out(photos, manifest(), share=share, cache=tmp_path / "images")
        assert len(held) == held_back
        assert sorted(rows(train) + rows(held)) == sorted_rows(X, Y)


def test_broken_images_are_told_at_every_start(
    photos: Path, tmp_path: Path, opened: list[int], said: list[str]
) -> None:
    (photos / "bee" / "0000-torn.png").write_bytes(png(X[0])[:60])
    for _ in range(2):
        data = load_data(photos, manifest(), cache=tmp_path / "images")
        assert rows(data) == sorted_rows(X, Y)
    assert len(opened) == 13
    assert said[0] == said[1]
    assert "skipped 1 of 13 images" in said[0]
    assert "bee/0000-torn.png" in said[0]


def test_where_no_image_can_be_read_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "d" / "ant").mkdir(parents=True)
    (tmp_path / "d" / "ant" / "a.png").write_bytes(b"none")
    for _ in range(2):
        with pytest.raises(DataError, match="no image of 1 can be read"):
            load_data(tmp_path / "d", manifest(), cache=tmp_path / "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["lock"]


@pytest.mark.parametrize("damage", ["cut", "emptied", "another's", "longer"])
def test_a_damaged_file_is_made_again(damage: str, photos: Path, tmp_path: Path) -> None:
    load_data(photos, manifest(), cache=tmp_path / "images")
    (file,) = (tmp_path / "images").glob("*.images")
    raw = file.read_bytes()
    os.replace(file, tmp_path / "mapped by somebody")  # who has it open must not see it shrink
    damaged = {"cut": raw[:-30], "emptied": b"", "another's": raw.replace(b'"key": "', b'"key": "0'), "longer": raw * 2}
    file.write_bytes(damaged[damage])
    assert rows(load_data(photos, manifest(), cache=tmp_path / "images")) == sorted_rows(X, Y)
    assert file.read_bytes() == raw


LOAD = """
import sys
from pathlib import Path
from protofleet.contract.console.logs import told
from tests.edge_client.data.test_load import manifest
from protofleet.edge_client.data.load import load_data
with told(lambda line: print(line, flush=True)):
    data = load_data(sys.argv[1], manifest(shape=(64, 64, 3)), cache=Path(sys.argv[2]))
print(len(data), int(data.x.sum(dtype=int)), flush=True)
"""


def _loading(photos: Path, place: Path) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(photos), str(place)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests / 'support'}{os.pathsep}{tests.parent}"},
    )


def _slow_photos(root: Path) -> Path:
    """Enough work that something can happen meanwhile."""
    raw = png(np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8))
    for row in range(90):
        folder = root / LABELS[row % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row}.png").write_bytes(raw)
    return root


def _partial(place: Path, least_bytes: int) -> None:
    """Wait until somebody is in the middle of writing."""
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > least_bytes for path in place.glob("*.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_while_it_writes_nothing_wrong_is_ever_found(tmp_path: Path) -> None:
    photos, place = _slow_photos(tmp_path / "photos"), tmp_path / "images"
    process = _loading(photos, place)
    _partial(place, 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(place.glob("*.partial"))
    assert not list(place.glob("*.images"))
    said, _ = _loading(photos, place).communicate(timeout=120)
    assert said.split()[0] == "90"
    assert not list(place.glob("*.partial"))
    assert len(list(place.glob("*.images"))) == 1


def test_two_processes_at_once_find_the_same(tmp_path: Path) -> None:
    photos, place = _slow_photos(tmp_path / "photos"), tmp_path / "images"
    both = [_loading(photos, place) for _ in range(2)]
    one, other = (process.communicate(timeout=120)[0].splitlines()[-1] for process in both)
    assert one == other
    assert one.startswith("90 ")
    assert len(list(place.glob("*.images"))) == 1


def test_whoever_comes_second_waits_says_so_and_decodes_nothing(
    photos: Path, tmp_path: Path, opened: list[int], said: list[str]
) -> None:
    load_data(photos, manifest(), cache=tmp_path / "done")
    (ready,) = (tmp_path / "done").glob("*.images")
    place = tmp_path / "images"
    place.mkdir()
    first = lock(place / "lock")
    found: list[LocalData] = []
    second = threading.Thread(target=lambda: found.append(load_data(photos, manifest(), cache=place)))
    second.start()
    deadline = time.monotonic() + 60
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    (place / ready.name).write_bytes(ready.read_bytes())
    os.close(first)
    second.join(30)
    assert said == [f"waiting for another process that decodes images into {place}"]
    assert len(opened) == 12
    assert rows(found[0]) == sorted_rows(X, Y)


def test_threads_of_one_process_share_it_too(photos: Path, tmp_path: Path, opened: list[int]) -> None:
    found: list[LocalData] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_data(photos, manifest(), cache=tmp_path / "images")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(opened) == 12
    assert all(rows(data) == sorted_rows(X, Y) for data in found)
    assert len(found) == 4


# ── a disk that refuses ──


def _full(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = cache.shutil.disk_usage("/")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_small_sets_are_held_in_memory_where_the_disk_is_full(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    _full(monkeypatch, 10 << 20)
    data = load_data(photos, manifest(), cache=tmp_path / "images")
    assert rows(data) == sorted_rows(X, Y)
    assert not is_mapped(data.x)
    (line,) = said
    assert line.startswith("decoded images are not kept for the next start: ")
    assert "67 MB are needed, 10 MB are free" in line


def test_a_large_set_without_room_is_one_line(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _full(monkeypatch, 10 << 20)
    with pytest.raises(
        DataError, match=r"12 images, decoded 75 MB, cannot be kept in .*images, expected room on its disk"
    ):
        load_data(photos, manifest(shape=(1024, 2035, 3)), cache=tmp_path / "images")


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filling(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("protofleet.contract.files.atomic_files.os.fsync", filling)
    assert rows(load_data(photos, manifest(), cache=tmp_path / "images")) == sorted_rows(X, Y)
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["lock"]


def test_a_state_that_is_no_directory_is_left_to_the_journal(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    assert rows(load_data(photos, manifest(), cache=tmp_path / "state" / "images")) == sorted_rows(X, Y)


# ── what it is for ──


def test_a_device_trains_on_mapped_images_as_on_those_in_memory(tmp_path: Path, mnist_like_bundle) -> None:
    bundle = read_bundle(mnist_like_bundle())
    x = np.random.default_rng(0).integers(0, 256, (60, *bundle.manifest.input_shape), np.uint8)
    names = tuple(name.replace("/", " ") for name in bundle.manifest.labels)
    photos = write_folder(tmp_path / "photos", x, np.arange(60) % 10, names)
    for label, name in zip(bundle.manifest.labels, names, strict=True):
        if label != name:  # a class whose name no folder can have
            (photos / name / "all").mkdir()
    lines = [f"{path},{label}" for label, name in zip(bundle.manifest.labels, names, strict=True)
             for path in sorted((photos / name).glob("*.png"))]  # fmt: skip
    (tmp_path / "d.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    sent = []
    for place in (None, tmp_path / "images"):
        data = load_data(tmp_path / "d.csv", bundle.manifest, cache=place)
        result = Device(bundle, data, "pi-1").run_round(announcement(bundle), None)
        sent.append(encode(result.contribution, "f64"))
    assert is_mapped(data.x)
    assert sent[0] == sent[1]


RELEASE = """
import sys, mmap, os
from pathlib import Path
import numpy as np
from protofleet.edge_client.data.samples import release_pages
with open(sys.argv[1], "w+b") as file:
    file.truncate(17_000 * 64 * 64 * 3)
    x = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).reshape(-1, 64, 64, 3)
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
before = resident()
whole = x[10:]
whole[:: 2].max()
read = resident()
release_pages(whole)
print(before, read, resident(), int(x[3].max()))
"""


def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RELEASE, str(tmp_path / "f")], capture_output=True, text=True, check=True, timeout=60
    )
    before, read, after, value = map(int, done.stdout.split())
    assert read > before + 150
    assert after < before + 20
    assert value == 0
    release_pages(np.zeros(3))  # of an array in memory there is nothing to give back


def _resident_kb(file: Path) -> int:
    """How much of a mapped file this process has in memory, as the kernel counts."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_training_and_extraction_keep_no_more_than_a_batch_in_memory(tmp_path: Path, mnist_like_bundle) -> None:
    bundle = read_bundle(mnist_like_bundle())
    data = load_data(FASHION / "train.parquet", bundle.manifest, cache=tmp_path)
    (file,) = tmp_path.glob("*.images")
    assert data.x.nbytes > 4_500_000
    data.x.max()
    assert _resident_kb(file) > 4_000
    device = Device(bundle, data, "pi-1")
    device.run_round(announcement(bundle, method="ffc"), None)  # extraction alone
    assert _resident_kb(file) < 500
    data.x.max()
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    trainer.fit(data, epochs=1, lr=0.01, given={}, seed=0)
    assert _resident_kb(file) < 500


def test_the_client_keeps_its_images_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the real command, which then finds no broker."""
    parts = small_parts()
    write_bundle(tmp_path / "b.bundle", **parts)
    photos = write_folder(tmp_path / "photos", X, Y % 2, parts["manifest"].labels)
    monkeypatch.setattr(sys, "argv", ["tests"])
    line = f"client --bundle {tmp_path}/b.bundle --broker mqtt://127.0.0.1:1 --id d --patience 0.1"
    assert main([*line.split(), "--data", str(photos), "--test", str(photos), "--state", str(tmp_path / "st")]) == 1
    capsys.readouterr()
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "st" / "images").glob("*.images"))
    assert names == ["test", "train"]


def test_pixels_in_an_archive_need_no_pillow(tmp_path: Path) -> None:
    """A small board pays for what decodes photos only where there are photos."""
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    code = (
        "import sys, protofleet.edge_client.device.device\n"
        "from tests.edge_client.data.test_load import manifest\n"
        "[sys.modules.pop(name) for name in list(sys.modules) if name.split('.')[0] == 'PIL']\n"
        "from protofleet.edge_client.data.load import load_data\n"
        f"load_data({str(tmp_path / 'd.npz')!r}, manifest(), cache=__import__('pathlib').Path({str(tmp_path)!r}))\n"
        "assert not {'PIL.Image', 'protofleet.edge_client.data.decode',"
        " 'protofleet.edge_client.data.cache'} & set(sys.modules)\n"
    )
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tests / 'support'}{os.pathsep}{tests.parent}"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
