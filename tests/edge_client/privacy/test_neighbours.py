"""What a noised release says of one photo, from the folder on: neighbouring folders, the client with its defaults, and
the bytes that it hands to its outbox."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_samples import manifest
from edge_samples import RUN
from numpy.typing import NDArray
from PIL import Image

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.methods import method
from protofleet.contract.privacy.secret_noise import SecretNoise
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution
from protofleet.edge_client.data.draws import Draws
from protofleet.edge_client.data.learned import LearnedFile, example_of
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.data.samples import UNLABELLED, pixel_hash
from protofleet.edge_client.device.own_samples import OwnSamples
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.privacy import accountant
from protofleet.edge_client.privacy.accountant import cost_of
from protofleet.edge_client.privacy.elapsed_time import Moment, moment
from protofleet.edge_client.privacy.ledger import Cost, Entry, Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.rounds.round_follower import Task
from protofleet.edge_client.run.client import Client
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings

TEN = tuple(f"c{number}" for number in range(10))
HUNDRED = tuple(f"c{number:02}" for number in range(100))
SHAPE = (28, 28, 1)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is released is then the sums themselves."""
    monkeypatch.setattr(SecretNoise, "whole_normal", lambda self, shape, deviation: np.zeros(shape, np.int64))


def photo(folder: Path, label: str, name: str, seed: int) -> Path:
    path = folder / label / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, SHAPE[:2], np.uint8)
    Image.fromarray(pixels).save(path, compress_level=0)
    return path


def photos(folder: Path, sizes: dict[str, int], seed: int) -> Path:
    """A folder of photos, so many of each class, under random names."""
    rng = np.random.default_rng(seed)
    for label, count in sizes.items():
        for _ in range(count):
            number = int(rng.integers(2**60))
            photo(folder, label, f"{number:x}", number)
    return folder


def released(
    bundle: Path,
    folder: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    *numbers: int,
    method: str = "ncm-dp",
    encoding: str = "f64",
    between: Callable[[int], None] = lambda number: None,
    **options: object,
) -> list[Contribution]:
    """What `protofleet client` has sent for these rounds, by the bytes in its outbox; no broker is asked."""
    sent = list[Contribution]()

    def rounds(client: Client) -> None:
        for number in numbers or (1,):
            between(number)
            sha256 = client._member.who.bundle.sha256
            asked = Announcement(run=RUN, round=number, phase="open", method=method, bundle=sha256, encoding=encoding)
            client._rounds.take_part(Task(asked, GlobalState(RUN, 0, 0)))
        found = {pending.key[1]: decode(pending.payload) for pending in client._journal.pending()}
        sent.extend(found[number] for number in numbers or (1,))  # type: ignore[misc]

    monkeypatch.setattr(Client, "run", rounds)
    monkeypatch.setattr(accountant, "_epsilons", lambda delta, costs: list(costs))  # a process of seconds
    named = {"bundle": str(bundle), "broker": "mqtt://h", "id": "pi-1", "data": str(folder), "state": str(state)}
    named |= {"provider": "cpu", "portable_step": True}  # what is measured at a start takes seconds
    Service(read_settings(ClientSettings, {**named, **options})).run(lambda content, finished: None)
    return sent


def sums(sent: Contribution) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """B (C, D) and n (C,), as they were sent."""
    return np.asarray(sent.body.rows, np.float64), np.asarray(sent.further[-1], np.float64)[:, 0]


def moved(one: Contribution, other: Contribution) -> tuple[int, float]:
    """How far the counts of all classes together, and the rows, are apart."""
    (b, n), (c, m) = sums(one), sums(other)
    return int(np.abs(n - m).sum()), float(np.linalg.norm(b - c))


@pytest.fixture(scope="module")
def ten(exported: Callable[..., Path]) -> Path:
    return exported(method_name="ncm-dp", backbone="small_cnn", labels=TEN, input_shape=SHAPE)


@pytest.fixture(scope="module")
def hundred(exported: Callable[..., Path]) -> Path:
    return exported(method_name="ncm-dp", backbone="small_cnn", labels=HUNDRED, input_shape=SHAPE)


def more_and_more(folder: Path, labels: tuple[str, ...], seed: int) -> Callable[[int], None]:
    """Before each round but the first there is one photo more."""
    rng = np.random.default_rng(seed)

    def between(number: int) -> None:
        if number > 1:
            photo(folder, str(rng.choice(labels)), f"one more {number}", 1000 * seed + number)

    return between


@pytest.mark.parametrize("shape", ["10 classes", "100 classes of 4 to 9"])
def test_one_photo_more_is_one_photo_more_in_what_is_released(
    shape: str, ten: Path, hundred: Path, without_noise: None, tmp_path: Path, monkeypatch
) -> None:
    rng = np.random.default_rng(0)
    bundle, labels = (ten, TEN) if shape == "10 classes" else (hundred, HUNDRED)
    sizes = {label: int(rng.integers(*((5, 40) if bundle is ten else (4, 10)))) for label in labels}
    folder, state = photos(tmp_path / "photos", sizes, 0), tmp_path / "state"
    between = more_and_more(folder, labels, 0)
    found = released(bundle, folder, state, monkeypatch, *range(1, 7), between=between)
    found += released(bundle, folder, state, monkeypatch, 7)  # after a restart, the same
    assert found[-2].body.rows.tobytes() == found[-1].body.rows.tobytes()
    changed = [moved(before, after) for before, after in pairwise(found)]
    assert max(count for count, _ in changed) == 1
    assert max(rows for _, rows in changed) <= 1.0
    assert sums(found[-1])[1].sum() < sum(sizes.values())  # some are held out


# ── the steps between the folder and the sums ───────────────────────────────────────────────────────────────────────


def own(folder: Path, state: Path, key: bytes = b"k" * 32, **options: object) -> OwnSamples:
    """A device's samples, as a client whose bundle adds noise reads them."""
    named = {"bundle": "b", "broker": "mqtt://h", "id": "pi-1", "data": str(folder), "state": str(state)}
    state.mkdir(exist_ok=True)  # a client's journal lies there
    settings = read_settings(ClientSettings, {**named, **options})
    described = msgspec.structs.replace(manifest(classes=10, name="ncm-dp"), labels=TEN)
    return OwnSamples(settings, described, state, draw_key=key, rule="each alone")


def summed(folder: Path, state: Path, key: bytes = b"k" * 32, **options: object) -> Counter[tuple[bytes, int]]:
    """What is summed: each image, and its class."""
    data = own(folder, state, key, **options).read().data.labelled
    return Counter((pixel_hash(image), int(label)) for image, label in zip(data.x, data.y, strict=True))


def apart(one: Counter[tuple[bytes, int]], other: Counter[tuple[bytes, int]]) -> int:
    """How many samples one has and the other has not, and the other way round."""
    return (one - other).total() + (other - one).total()


@pytest.mark.parametrize("seed", range(12))
def test_of_any_folder_one_photo_more_is_at_most_one_sample_more(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    sizes = {label: int(rng.integers(*(1, 6) if seed % 2 else (4, 10))) for label in TEN}
    folder, state = photos(tmp_path / "photos", sizes, seed), tmp_path / "state"
    key, share = rng.bytes(32), float(rng.choice([0.1, 0.3, 0.5]))
    found = [summed(folder, state, key, hold_out=share)]
    for number in range(4):
        photo(folder, str(rng.choice(TEN)), f"more {number}", 1000 * seed + number)
        found.append(summed(folder, state, key, hold_out=share))
    assert [apart(before, after) <= 1 for before, after in pairwise(found)] == [True] * 4
    assert summed(folder, tmp_path / "another", key, hold_out=share) == found[-1]  # nothing but folder and key counts
    assert summed(folder, state, rng.bytes(32), hold_out=share) != found[-1]  # a key that was lost draws anew


def odd_text(folder: Path) -> None:
    (folder / "c1" / "broken.png").write_bytes(b"no image")


def odd_class(folder: Path) -> None:
    photo(folder, "c77", "of no class", 1)


def odd_empty(folder: Path) -> None:
    (folder / "c1" / "empty.png").touch()


def odd_pipe(folder: Path) -> None:
    os.mkfifo(folder / "c1" / "pipe.png")


def odd_copy(folder: Path) -> None:
    first = next((folder / "c1").iterdir())
    (folder / "c2" / "copy.png").write_bytes(first.read_bytes())


def odd_link(folder: Path) -> None:
    (folder / "c1" / "to itself.png").symlink_to(folder / "c1" / "to itself.png")


@pytest.mark.parametrize("share", [0.1, 0.0])
@pytest.mark.parametrize("odd", [odd_text, odd_class, odd_empty, odd_pipe, odd_copy, odd_link])
def test_a_photo_that_cannot_be_used_moves_no_other(odd: Callable[[Path], None], share: float, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", dict.fromkeys(TEN, 6), 0)
    before = summed(folder, tmp_path / "state", hold_out=share)
    odd(folder)
    after = summed(folder, tmp_path / "state", hold_out=share)
    assert apart(before, after) <= (odd is odd_copy)


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_a_line_that_declares_a_split_moves_no_other(share: float, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", dict.fromkeys(TEN, 8), 0)
    files = sorted(folder.glob("*/*.png"))
    lines = [f"{file},{file.parent.name}," for file in files]
    found, states = [], iter(range(9))
    for last in (None, "test", "valid", "train", ""):
        extra = photo(tmp_path / "beside", "c0", f"extra {last}", 5)
        own_line = [] if last is None else [f"{extra},c0,{last}"]
        (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *lines, *own_line]))
        found.append(summed(tmp_path / "list.csv", tmp_path / f"state {next(states)}", hold_out=share))
    assert [apart(found[0], each) <= 1 for each in found] == [True] * 5


@pytest.mark.parametrize("share", [0.1, 0.0])
@pytest.mark.parametrize("split", ["test", "valid"])
def test_a_photo_to_test_with_that_has_no_label_moves_no_other(split: str, share: float, tmp_path: Path) -> None:
    """Where the bundle's own method knows photos without a label."""
    folder, found = photos(tmp_path / "photos", dict.fromkeys(TEN, 6), 0), []
    lines = [f"{file},{file.parent.name},train" for file in sorted(folder.glob("*/*.png"))]
    for more in ([], [f"{photo(tmp_path / 'beside', 'c0', 'extra', 5)},,{split}"]):
        (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *lines, *more]))
        given = own(tmp_path / "list.csv", tmp_path / "state", hold_out=share)
        given._manifest = msgspec.structs.replace(given._manifest, hyper={**given._manifest.hyper, "pu_weight": 0.0})
        data = given.read().data.labelled
        found.append(Counter((pixel_hash(image), int(label)) for image, label in zip(data.x, data.y, strict=True)))
    assert found[0] == found[1]


@pytest.mark.parametrize("line", ["{photo},c0,trian", ",c0,train"])
def test_a_line_of_a_list_that_is_wrong_moves_no_other(line: str, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", dict.fromkeys(TEN, 6), 0)
    lines = ["path,label,split", *(f"{file},{file.parent.name},train" for file in sorted(folder.glob("*/*.png")))]
    found = []
    for more in ([], [line.format(photo=photo(tmp_path / "beside", "c0", "extra", 5))]):
        (tmp_path / "list.csv").write_text("\n".join([*lines, *more]))
        found.append(summed(tmp_path / "list.csv", tmp_path / "state"))
    assert found[0] == found[1]
    with pytest.raises(DataError, match="line 62"):  # where no noise is added, its owner is told
        load_data(tmp_path / "list.csv", own(folder, tmp_path / "state")._manifest)


@pytest.mark.parametrize(("cell", "label"), [(None, 0), ({"bytes": None}, 0), ({"bytes": b""}, 0), ("first", None)])
def test_a_row_of_parquet_that_is_wrong_moves_no_other(cell: object, label: int | None, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(photos(tmp_path / "photos", dict.fromkeys(TEN, 6), 0).glob("*/*.png"))
    cells: list[object] = [{"bytes": file.read_bytes()} for file in files]
    labels: list[int | None] = [TEN.index(file.parent.name) for file in files]
    found = []
    for more in ([], [(cells[0] if cell == "first" else cell, label)]):
        images = pa.array(cells + [one for one, _ in more], pa.struct([("bytes", pa.binary())]))
        numbers = pa.array(labels + [one for _, one in more], pa.int64())
        pq.write_table(pa.table({"image": images, "label": numbers}), tmp_path / "all.parquet")
        found.append(summed(tmp_path / "all.parquet", tmp_path / "state"))
    assert found[0] == found[1]
    with pytest.raises(DataError, match="row 60, expected image bytes and a label, got a null"):
        load_data(tmp_path / "all.parquet", own(tmp_path, tmp_path / "state")._manifest)


@pytest.mark.parametrize("odd", [10, -1, -7])
def test_a_number_of_no_class_moves_no_other(odd: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 4, 4, 1), np.uint8), rng.integers(0, 10, 40)
    np.savez(tmp_path / "d.npz", x=x[:-1], y=y[:-1])
    before = summed(tmp_path / "d.npz", tmp_path / "state")
    y[-1] = odd
    np.savez(tmp_path / "d.npz", x=x, y=y)
    assert summed(tmp_path / "d.npz", tmp_path / "state") == before


@pytest.mark.parametrize("form", ["a list", "a file", "arrays"])
def test_photos_without_a_label_train_and_are_never_held_out(form: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 4, 4, 1), np.uint8), np.where(np.arange(60) < 30, np.arange(60) % 10, UNLABELLED)
    source = tmp_path / ("list.csv" if form == "a list" else "d.npz")
    if form == "a list":
        lines = ["path,label", *(f"{row}.png,{TEN[label] if label >= 0 else ''}" for row, label in enumerate(y))]
        source.write_text("\n".join(lines))
        for row, image in enumerate(x):
            Image.fromarray(image[..., 0]).save(tmp_path / f"{row}.png")
    else:
        np.savez(source, x=x, y=y)
    given = own(source, tmp_path / "state", hold_out=0.5)
    given._manifest = msgspec.structs.replace(given._manifest, hyper={**given._manifest.hyper, "pu_weight": 0.5})
    given._arrays = (x, y) if form == "arrays" else None
    found = given.read()
    assert found.held is not None
    assert (found.held.y >= 0).all()
    assert (len(found.held) > 0, int((found.data.y == UNLABELLED).sum())) == (True, 30)


def test_what_was_learned_beside_moves_one(tmp_path: Path) -> None:
    """A photo that is taught is one sample more; one of the folder that is taught under another label is replaced."""
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 8), 0), tmp_path / "state"
    described = own(folder, state)._manifest
    before = summed(folder, state)
    taught = LearnedFile(state, TEN)
    taught.learn(example_of(photo(tmp_path / "beside", "c3", "new", 99), described), "c3")
    with_one = summed(folder, state)
    assert apart(before, with_one) == 1
    photo(folder, "c4", "the same", 99)  # what was learned is left out of the folder
    assert apart(with_one, summed(folder, state)) == 0
    taught.learn(example_of(next((folder / "c5").iterdir()), described), "c6")
    assert apart(with_one, summed(folder, state)) <= 2


def test_arrays_and_pixels_of_a_file_are_drawn_one_by_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 4, 4, 1), np.uint8), rng.integers(0, 10, 60)
    found = []
    for count in range(40, 60):
        keep = np.r_[59 - np.arange(count - 40), np.arange(40)]  # the new ones come first
        np.savez(tmp_path / "d.npz", x=x[keep], y=y[keep])
        given = own(tmp_path / "d.npz", tmp_path / "state")
        given._arrays = (x[keep], y[keep])
        data = given.read().data
        found.append(summed(tmp_path / "d.npz", tmp_path / "state"))
        hashed = Counter((pixel_hash(image), int(label)) for image, label in zip(data.x, data.y, strict=True))
        assert hashed == found[-1]
    assert max(apart(before, after) for before, after in pairwise(found)) == 1


def test_a_file_is_read_for_its_draw_once_and_a_lost_record_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 6), 0), tmp_path / "state"
    first, read = summed(folder, state), list[str]()
    whole = Draws._file_number
    monkeypatch.setattr(Draws, "_file_number", lambda self, path: read.append(path) or whole(self, path))
    assert (summed(folder, state), read) == (first, [])
    new = photo(folder, "c1", "new", 7)
    summed(folder, state)
    assert read == [str(new)]
    new.unlink()
    (state / "photo-draws").write_bytes(b"cut off")
    assert summed(folder, state) == first
    assert (state / "photo-draws").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_read_for_a_while_gets_its_own_number_then(tmp_path: Path, monkeypatch) -> None:
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 6), 0), tmp_path / "state"
    with monkeypatch.context() as patch:
        patch.setattr(Draws, "_file_number", lambda self, path: 0)  # as of one that cannot be opened
        assert not summed(folder, state)
    assert summed(folder, state) == summed(folder, tmp_path / "another")


def test_photos_that_begin_alike_are_drawn_one_by_one(tmp_path: Path) -> None:
    """As those of one camera do, by kilobytes; and who knows no key cannot tell which are held out."""
    start, draws = bytes(200_000), {key: Draws(key) for key in (b"k" * 32, b"l" * 32)}
    held = []
    for key, each in draws.items():
        numbers = [each._number(start + bytes([place])) for place in range(100)]
        numbers += [each._number(start + bytes(100_000), 300_000 + place) for place in range(100)]
        assert len(set(numbers)) == 200, key
        held.append(each._below(np.array(numbers, "<u8"), 0.5))
    assert [60 < int(each.sum()) < 140 for each in held] == [True, True]
    assert 60 < int((held[0] != held[1]).sum()) < 140


def test_each_device_draws_by_a_key_of_its_own_that_outlives_the_process(tmp_path: Path) -> None:
    keys = []
    for name in ("one", "one", "other"):
        with Journal(tmp_path / name, fleet="fleet", device="pi-1", bundle=bytes(32)) as journal:
            keys.append((journal.draw_key(), journal.secret()))
    (first, secret), (again, _), (other, _) = keys
    assert (len(first), first == again, first == other, first == secret) == (32, True, False, False)


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_noise_that_is_only_announced_is_added_to_photos_that_are_drawn_one_by_one(
    exported: Callable[..., Path], without_noise: None, tmp_path: Path, monkeypatch
) -> None:
    """The device has divided its photos by classes, since its bundle adds no noise; from then on it does not."""
    bundle = exported(method_name="ncm", backbone="small_cnn", labels=TEN, input_shape=SHAPE)
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 9), 0), tmp_path / "state"
    rules, whole = list[str](), OwnSamples._divided
    monkeypatch.setattr(OwnSamples, "_divided", lambda self: rules.append(self.rule) or whole(self))
    between = more_and_more(folder, TEN, 0)
    found = released(bundle, folder, state, monkeypatch, *range(1, 6), between=between)
    assert max(count for count, _ in map(moved, found, found[1:])) == 1
    assert (rules[0], set(rules[1:])) == ("of each class", {"each alone"})
    rules.clear()
    released(bundle, folder, state, monkeypatch, 7, method="ncm")
    assert rules == ["each alone"]


@pytest.mark.parametrize("own_method", ["ncm", "ncm-dp"])
@pytest.mark.parametrize("asked", ["ncm-dp", "ffc-dp"])
def test_neighbours_stay_neighbours_through_restarts_another_share_and_lost_draws(
    own_method: str, asked: str, exported: Callable[..., Path], without_noise: None, tmp_path: Path, monkeypatch
) -> None:
    """Two devices of one key, one with a photo more: each release of theirs is one photo apart at most, whatever the
    owner changes between two starts, and a key that is lost draws anew for both."""
    bundle = exported(method_name=own_method, backbone="small_cnn", labels=TEN, input_shape=SHAPE)
    fewer = photos(tmp_path / "fewer", dict.fromkeys(TEN, 7), 3)
    more = Path(shutil.copytree(fewer, tmp_path / "more"))
    photo(more, "c3", "one more", 77)
    one, other = tmp_path / "one", tmp_path / "other"
    released(bundle, fewer, one, monkeypatch, 1, method=asked)
    shutil.copytree(one, other)
    for number, share in enumerate((None, 0.3, 0.0, 0.5, None), 2):
        options = {} if share is None else {"hold_out": share}
        if number == 5:
            for state in (one, other):
                for lost in ("photo-draws", "photos-sent"):
                    (state / lost).unlink(missing_ok=True)
        (a,) = released(bundle, fewer, one, monkeypatch, number, method=asked, **options)
        (b,) = released(bundle, more, other, monkeypatch, number, method=asked, **options)
        counts, rows = moved(a, b)
        assert counts <= 1
        assert rows <= 1.0 + 1e-9
        assert len(a.body.classes) == len(TEN)


def test_while_photos_cannot_be_read_a_noised_round_is_noise_alone(
    ten: Path, without_noise: None, tmp_path: Path, monkeypatch
) -> None:
    """As of an empty folder, to which one photo adds one: neither a row less nor photos that are gone."""
    folder = photos(tmp_path / "photos", dict.fromkeys(TEN, 3), 0)

    def gone(number: int) -> None:
        if number == 2:
            folder.rename(tmp_path / "elsewhere")

    there, none = released(ten, folder, tmp_path / "state", monkeypatch, 1, 2, between=gone)
    assert sums(there)[1].sum() > 0
    assert not any(part.any() for part in sums(none))
    assert len(none.body.classes) == 10


def test_where_the_number_of_each_class_is_known_none_is_held_out(mnist_like_bundle, tmp_path: Path) -> None:
    m = read_bundle(mnist_like_bundle("fedhkd", hyper={"noise": 4.0})).manifest
    noised = Releases(Policy(), Ledger(tmp_path / "l"), fleet="f", own=method("fedhkd"), hyper=m.hyper)
    assert noised.hold_out() == "nothing"
    for other in ("ncm", "ncm-dp"):  # whatever is announced, since the next round may be the bundle's own again
        asked = Announcement(run=RUN, round=1, phase="open", method=other, bundle=bytes(32))
        assert noised.hold_out(asked) == "nothing"
    folder = photos(tmp_path / "photos", dict.fromkeys(TEN, 8), 0)
    samples = own(folder, tmp_path / "state")
    samples.rule = noised.hold_out()
    found = samples.read()
    assert (len(found.data), found.test, found.held) == (80, None, None)


@pytest.mark.parametrize("policy", [Policy(), Policy(epsilon=5.0, delta=1e-5)])
def test_an_announced_method_that_takes_the_numbers_as_known_decides_too(policy: Policy, tmp_path: Path) -> None:
    """Drawn one by one, a photo in the place of another could go to the other side, which its neighbours never do."""
    with Ledger(tmp_path / "l") as ledger:
        releases = Releases(policy, ledger, fleet="f", own=method("ncm"), hyper={"noise": 4.0})
        asked = Announcement(run=RUN, round=1, phase="open", method="fedhkd", bundle=bytes(32))
        assert releases.hold_out(asked) == "nothing"
        assert releases.hold_out(replace(asked, method="ncm-dp")) == "each alone"
        assert releases.hold_out() == ("each alone" if policy.is_private else "of each class")


def test_numbers_that_do_not_fit_cost_what_they_would_have(ten: Path, tmp_path: Path, monkeypatch) -> None:
    """That they do not follows from them, and is told by the refusal."""
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 3), 0), tmp_path / "state"
    monkeypatch.setattr(SecretNoise, "whole_normal", lambda self, shape, deviation: np.full(shape, 2**52, np.int64))
    (tmp_path / "policy.toml").write_text('encodings = ["f16"]')
    (sent,) = released(ten, folder, state, monkeypatch, encoding="f16", policy=str(tmp_path / "policy.toml"))
    assert sent.says_nothing
    with Ledger(state / "ledger.sqlite") as ledger:
        spent = ledger.spent()
        assert ledger.noised() == {"ncm-dp": True}  # it is a release: a restart knows of it, no second one is made,
        assert ledger.has_release("fleet", sent.run, sent.round, "ncm-dp")
        assert ledger.free_in_s(1, 3600.0, moment()) > 0  # and a rate counts it
    mechanism = method("ncm-dp").mechanism(method("ncm-dp").resolve({}))
    assert spent.add_remove == cost_of(mechanism, np.ones(10, int)).add_remove


def test_without_noise_numbers_that_do_not_fit_use_up_no_rate_and_their_answer_is_sent(tmp_path: Path) -> None:
    """What goes out in their place has no row, so it may go at a later start, too."""
    asked = Announcement(run=RUN, round=1, phase="open", method="ncm", bundle=bytes(32))
    with Ledger(tmp_path / "l") as ledger:
        policy = Policy(releases_per_day=1.0, min_samples=5)
        releases = Releases(policy, ledger, fleet="f", own=method("ncm"), hyper={"noise": 0.0})
        releases.withheld(asked, b"no row", np.ones(10, np.int64))
        assert (releases.wait_s(), releases.may_send((RUN, 1, "ncm"))) == (0.0, "")
        assert ledger.spent().bare_add_remove == 1  # that they did not fit follows from the photos


def test_after_a_restart_nothing_is_told_beside_what_was_noised(
    exported: Callable[..., Path], tmp_path: Path, monkeypatch
) -> None:
    """Neither by the ledger nor, where that is lost, by the journal."""
    bundle = exported(method_name="ncm", backbone="small_cnn", labels=TEN, input_shape=SHAPE)
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 9), 0), tmp_path / "state"
    told, whole = list[set[str]](), Client.__init__

    def made(self: Client, *parts: object, **given: object) -> None:
        whole(self, *parts, **given)  # type: ignore[arg-type]
        self._health.accuracy = {"accuracy": 0.5}
        told.append(set(self._health.birth().metrics) & {"accuracy", "peak_rss_bytes"})
        assert self._figures.tells_accuracy == (len(told) == 1)

    monkeypatch.setattr(Client, "__init__", made)
    for number in (1, 2, 3):
        released(bundle, folder, state, monkeypatch, number)
        if number == 2:
            (state / "ledger.sqlite").unlink()
    assert told == [{"accuracy", "peak_rss_bytes"}, set(), set()]


@pytest.mark.parametrize("name", ["ncm-dp", "fedhkd", "of-nobody-here"])
def test_noise_that_a_method_had_once_keeps_figures_at_home_whatever_it_adds_now(name: str, tmp_path: Path) -> None:
    """A bundle's settings may take its noise away, and a package's method may be there no more."""
    bundle = {"fleet": "fleet", "device": "pi-1", "bundle": bytes(32)}
    for cost in (Cost(0.0, 0.0), Cost(0.5, None), Cost(None, 0.5)):
        state = tmp_path / repr(cost)
        with Journal(state, **bundle) as journal, Ledger(state / "ledger.sqlite") as ledger:  # type: ignore[arg-type]
            entry = Entry("round", "fleet", RUN, 1, name, "", "f32", 1, 9, bytes(32), cost)
            ledger.record(entry, Moment("boot", 1.0, 1.0))
            found = Releases(Policy(), ledger, fleet="fleet", own=method("ncm"), hyper={"noise": 0.0})
            found.begin(journal)
            assert found.is_private == (cost != Cost(0.0, 0.0) or name == "ncm-dp")
            assert found.hold_out() == ("each alone" if found.is_private else "of each class")


def test_a_noised_round_that_a_device_refused_keeps_nothing_at_home(tmp_path: Path) -> None:
    """It was answered without a row, so nothing noised has left."""
    bundle = {"fleet": "fleet", "device": "pi-1", "bundle": bytes(32)}
    with Journal(tmp_path, **bundle) as journal, Ledger(tmp_path / "ledger.sqlite") as ledger:  # type: ignore[arg-type]
        entry = Entry("sat-out", "fleet", RUN, 1, "ncm-dp", "", "f32", 1, 9, bytes(32), Cost(0.0, 0.0))
        ledger.record(entry, Moment("boot", 1.0, 1.0))
        found = Releases(Policy(), ledger, fleet="fleet", own=method("ncm"), hyper={"noise": 0.0})
        found.begin(journal)
        assert (found.is_private, found.hold_out()) == (False, "of each class")


def test_a_client_whose_policy_is_gone_does_not_start_before_its_owner_says_so(
    ten: Path, tmp_path: Path, monkeypatch
) -> None:
    folder, state = photos(tmp_path / "photos", dict.fromkeys(TEN, 3), 0), tmp_path / "state"
    (tmp_path / "policy.toml").write_text('encodings = ["f64"]')
    released(ten, folder, state, monkeypatch, policy=str(tmp_path / "policy.toml"))
    with pytest.raises(UsageError, match="looser than when this device last started, expected encodings f64, got enc"):
        released(ten, folder, state, monkeypatch, 2)
    assert released(ten, folder, state, monkeypatch, 2, accept_looser_policy=True)
    assert released(ten, folder, state, monkeypatch, 3)
