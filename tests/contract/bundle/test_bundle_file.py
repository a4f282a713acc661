"""The bundle: the same parts are the same bytes; what is not whole, known and unchanged is refused in one line."""

from __future__ import annotations

import hashlib
import io
import os
import random
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from contract_samples import small_parts
from safetensors.numpy import save

from protofleet.contract.bundle import bundle_file as bundles
from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.errors import BundleError

EPOCH = (1980, 1, 1, 0, 0, 0)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "small.bundle", **small_parts())
    return tmp_path / "small.bundle"


def same(one, other) -> bool:
    parts = ("manifest", "features", "train_step")
    return all(getattr(one, part) == getattr(other, part) for part in parts) and all(
        np.array_equal(one.params[name], other.params[name]) for name in one.params.keys() | other.params.keys()
    )


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> Path:
    """A zip of these members, as a forger would write it: hashes are left as they are."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, compression)
    return path


def forge(path: Path, **changes) -> Path:
    """A bundle whose manifest says something else, with every hash right."""
    members = members_of(path)
    manifest = msgspec.json.decode(members["manifest.json"]) | changes
    return rewrite(path, members | {"manifest.json": msgspec.json.encode(manifest)})


def forge_params(path: Path, params: dict[str, np.ndarray]) -> Path:
    members = members_of(path)
    raw = save(params)
    manifest = msgspec.json.decode(members["manifest.json"])
    manifest["members"]["params.safetensors"] = hashlib.sha256(raw).hexdigest()
    changed = {"manifest.json": msgspec.json.encode(manifest), "params.safetensors": raw}
    return rewrite(path, members | changed)


# ── whole ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("trainable", [True, False])
def test_a_bundle_comes_back_as_it_was_written(tmp_path, trainable):
    parts = small_parts(trainable=trainable)
    sha256 = write_bundle(tmp_path / "b.bundle", **parts)
    got = read_bundle(tmp_path / "b.bundle")
    assert got.sha256 == sha256 == hashlib.sha256((tmp_path / "b.bundle").read_bytes()).digest()
    assert msgspec.structs.replace(got.manifest, members={}) == parts["manifest"]
    assert (got.features, got.train_step) == (parts["features"], parts["train_step"])
    assert got.manifest.trainable is trainable
    assert not got.signed
    assert got.params.keys() == parts["params"].keys()
    for name, value in parts["params"].items():
        np.testing.assert_array_equal(got.params[name], value)


_AT_ONCE = """
import os, sys, threading
from protofleet.contract.bundle import bundle_file as bundle
raw, ended = sys.stdin.buffer.read(), []
for _ in range(60):
    if not (child := os.fork()):
        sys.setswitchinterval(1e-6)
        together = threading.Barrier(16)
        read = lambda: (together.wait(), bundle._parse_manifest(raw, "b"))
        threads = [threading.Thread(target=read) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        os._exit(0)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(ended)
"""


def test_several_threads_may_be_the_first_to_read_a_bundle(bundle):
    """As a program with several devices does. One process in ten ended with a segmentation fault."""
    given = {"input": members_of(bundle)["manifest.json"], "capture_output": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", _AT_ONCE], cwd=Path(__file__).parents[3], **given)
    assert done.stdout.decode().strip() == str([0] * 60), done.stderr.decode()


def test_what_fedavg_would_send_is_counted_from_the_manifest(bundle):
    assert read_bundle(bundle).manifest.parameter_count == 2 * 3 + 2 + 3 * 2  # weights, running statistics, head


def test_the_same_parts_are_the_same_bytes_whatever_their_order_and_the_day(tmp_path, bundle):
    parts = small_parts()
    parts["params"] = dict(reversed(parts["params"].items()))
    parts["manifest"] = msgspec.structs.replace(parts["manifest"], members={"left": "over"})
    write_bundle(tmp_path / "again.bundle", **parts)
    assert (tmp_path / "again.bundle").read_bytes() == bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        assert {info.date_time for info in archive.infolist()} == {EPOCH}


def test_weights_that_are_views_of_other_memory_are_written_as_their_values(tmp_path):
    parts = small_parts()
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts["params"]["backbone.weight"] = wide.T[::2]  # (2, 3), neither contiguous nor of one order
    write_bundle(tmp_path / "b.bundle", **parts)
    np.testing.assert_array_equal(read_bundle(tmp_path / "b.bundle").params["backbone.weight"], wide.T[::2])


def test_writing_is_whole_or_not_at_all(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(BundleError, match="cannot write"):
        write_bundle(tmp_path / "taken", **small_parts())
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("change", ["missing", "shape", "nan", "dtype"])
def test_parts_that_do_not_fit_the_manifest_are_not_written(tmp_path, change):
    parts = small_parts()
    weight = parts["params"].pop("head.weight")
    if change != "missing":
        broken = {"shape": weight.T, "nan": weight * np.float32("nan"), "dtype": weight.astype(np.float64)}
        parts["params"]["head.weight"] = broken[change]
    with pytest.raises(BundleError, match=r"head\.weight"):
        write_bundle(tmp_path / "b.bundle", **parts)
    assert not list(tmp_path.iterdir())


# ── not whole ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_edited_byte_is_noticed_or_changes_nothing(bundle):
    whole, blob = read_bundle(bundle), bundle.read_bytes()
    harmless = 0
    for at in range(len(blob)):
        for flip in (0x01, 0x80, 0xFF):
            edited = bytearray(blob)
            edited[at] ^= flip
            bundle.write_bytes(edited)
            try:
                got = read_bundle(bundle)
            except BundleError:
                continue
            assert same(got, whole), at
            assert got.sha256 != whole.sha256, at  # and as another file it is another identity for the fleet
            harmless += 1
    assert harmless < len(blob)  # unused fields of the zip headers, and nothing else


def test_a_truncated_bundle_is_never_read(bundle):
    blob = bundle.read_bytes()
    for length in range(len(blob)):
        bundle.write_bytes(blob[:length])
        with pytest.raises(BundleError, match=r"small\.bundle"):
            read_bundle(bundle)


def test_a_bundle_mutated_at_random_is_refused_or_the_same(bundle):
    whole, blob, rng = read_bundle(bundle), bundle.read_bytes(), random.Random(3)
    for _ in range(1500):
        edited = bytearray(blob)
        for _ in range(rng.randint(1, 12)):
            at, change = rng.randrange(len(edited)), rng.random()
            if change < 0.5:
                edited[at] = rng.randrange(256)
            elif change < 0.75:
                del edited[at : at + rng.randint(1, 40)]
            else:
                edited[at:at] = rng.randbytes(rng.randint(1, 9))
        bundle.write_bytes(edited)
        try:
            assert same(read_bundle(bundle), whole)
        except BundleError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", ["features.onnx", "train_step.onnx", "params.safetensors"])
def test_a_changed_member_is_named_with_its_hashes(bundle, name):
    members = members_of(bundle)
    rewrite(bundle, members | {name: members[name] + b"!"})
    with pytest.raises(BundleError, match=rf"{name} was changed, expected sha256 [0-9a-f]{{12}}…, got [0-9a-f]{{12}}…"):
        read_bundle(bundle)


@pytest.mark.parametrize("name", ["features.onnx", "train_step.onnx", "params.safetensors"])
def test_a_members_hash_is_compared_to_its_last_digit(bundle, name):
    hashes = msgspec.json.decode(members_of(bundle)["manifest.json"])["members"]
    last = "0" if hashes[name][-1] != "0" else "1"
    with pytest.raises(BundleError, match=f"{name} was changed"):
        read_bundle(forge(bundle, members=hashes | {name: hashes[name][:-1] + last}))


@pytest.mark.parametrize("name", ["features.onnx", "train_step.onnx", "params.safetensors", "manifest.json"])
def test_a_missing_member_is_named(bundle, name):
    members = members_of(bundle)
    del members[name]
    rewrite(bundle, members)
    with pytest.raises(BundleError, match=name):
        read_bundle(bundle)


@pytest.mark.parametrize("name", ["extra.bin", "../features.onnx", "features.onnx/", "MANIFEST.JSON"])
def test_a_member_of_no_use_is_refused(bundle, name):
    rewrite(bundle, members_of(bundle) | {name: b"x"})
    with pytest.raises(BundleError, match="unexpected member"):
        read_bundle(bundle)


BESIDE = {
    "before": lambda raw, at: b"#!/bin/sh\n" + raw,
    "after": lambda raw, at: raw + b"PK",
    "a whole file after": lambda raw, at: raw + raw,
    "a comment": lambda raw, at: raw[:-2] + b"\x01\x00!",
    "between": lambda raw, at: _moved(raw, at, b"hidden"),
    "an extra field of a member": lambda raw, at: _again(raw, extra=b"\xfe\xca\x04\x00hide"),
    "a member's comment": lambda raw, at: _again(raw, comment=b"hidden"),
}


def _again(raw: bytes, **beside: bytes) -> bytes:
    """The same members, with more than their names in the headers."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive, zipfile.ZipFile(written, "w") as other:
        for info in archive.infolist():
            named = zipfile.ZipInfo(info.filename, info.date_time)
            for name, value in beside.items():
                setattr(named, name, value)
            other.writestr(named, archive.read(info))
    return written.getvalue()


def _moved(raw: bytes, at: int, hidden: bytes) -> bytes:
    """The bytes hidden between the last member and the directory, which still says where it begins."""
    begins = len(raw) - 6
    return raw[:at] + hidden + raw[at:begins] + (at + len(hidden)).to_bytes(4, "little") + raw[begins + 4 :]


@pytest.mark.parametrize("where", BESIDE)
def test_bytes_beside_the_members_are_refused(bundle, where):
    """A zip reader skips them: they would be a file in the file, that no hash of a member knows."""
    raw = bundle.read_bytes()
    changed = BESIDE[where](raw, int.from_bytes(raw[-6:-2], "little"))
    bundle.write_bytes(changed)
    with zipfile.ZipFile(bundle) as archive:
        assert len(archive.read("manifest.json")) > 100
    with pytest.raises(
        BundleError, match="expected a zip archive and nothing else, got bytes before, between or after"
    ):
        read_bundle(bundle)


def test_what_would_not_be_read_is_not_written(tmp_path):
    parts = small_parts()
    parts["manifest"] = msgspec.structs.replace(parts["manifest"], labels=("cat", "do\tg", "bird"))
    with pytest.raises(BundleError, match="labels without control characters"):
        write_bundle(tmp_path / "b.bundle", **parts)
    assert not list(tmp_path.iterdir())


def test_a_member_that_the_manifest_does_not_vouch_for_is_refused(tmp_path):
    write_bundle(tmp_path / "b.bundle", **small_parts(trainable=False))
    rewrite(tmp_path / "b.bundle", members_of(tmp_path / "b.bundle") | {"train_step.onnx": b"smuggled"})
    with pytest.raises(BundleError, match=r"unexpected member.*got train_step\.onnx"):
        read_bundle(tmp_path / "b.bundle")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice_is_refused(bundle):
    members = members_of(bundle)
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr(zipfile.ZipInfo("features.onnx", EPOCH), members["features.onnx"])
    with pytest.raises(BundleError, match=r"unexpected member.*features\.onnx"):
        read_bundle(bundle)


def test_a_compressed_member_is_refused_before_it_is_inflated(bundle):
    rewrite(bundle, members_of(bundle) | {"features.onnx": bytes(64 << 20)}, compression=zipfile.ZIP_DEFLATED)
    assert bundle.stat().st_size < 1 << 20  # 64 MiB of zeros in a small file: a zip bomb in little
    with pytest.raises(BundleError, match="a stored member"):
        read_bundle(bundle)


def test_a_member_that_claims_more_bytes_than_the_file_has_is_refused(bundle):
    blob = bytearray(bundle.read_bytes())
    at = blob.rindex(b"PK\x01\x02") + 20  # the last directory entry: its compressed and its plain size
    blob[at : at + 8] = (2 << 30).to_bytes(4, "little") * 2
    bundle.write_bytes(blob)
    with pytest.raises(BundleError):
        read_bundle(bundle)


def test_a_name_that_is_not_utf8_is_refused(bundle):
    blob = bundle.read_bytes().replace(b"features.onnx", b"features\xff\xfe\xfdnx")
    bundle.write_bytes(blob)
    with pytest.raises(BundleError):
        read_bundle(bundle)


# ── of another kind ─────────────────────────────────────────────────────────────────────────────────────────────────

MANIFESTS = {
    "a std of 0": ({"std": [0.0]}, "numbers as mean and positive ones as std"),
    "a negative std": ({"std": [-0.25]}, "numbers as mean and positive ones as std"),
    "an opset of another age": ({"opset": 999}, "expected opset 13 to 28, got 999"),
    "no opset": ({"opset": 0}, "expected opset 13 to 28, got 0"),
    "a line's end in a label": (
        {"labels": ["cat", "do\ng", "bird"]},
        r"labels without control characters, got 'do\\ng'",
    ),
    "an escape in a label": ({"labels": ["cat", "\x1b[2J", "bird"]}, "labels without control characters"),
    "an extractor": ({"extractor": "xyz"}, "expected a sha256 of the extractor, got xyz"),
    "schema 1": ({"schema": 1}, "expected schema 2, got schema 1, try exporting it anew: it is of Protofleet 0.1"),
    "a later schema": ({"schema": 3}, "expected schema 2, got schema 3, try a newer Protofleet"),
    "no schema": ({"schema": None}, "expected schema 2"),
    "a method of the future": ({"method": "fedlater"}, "fedlater"),
    "a head the method does not have": ({"head": "none"}, "a head of"),
    "a hyper-parameter too many": ({"hyper": {"lr": 0.1, "gamma": 1}}, "gamma"),
    "a hyper-parameter out of range": ({"hyper": {"lr": -1.0}}, "lr"),
    "one label twice": ({"labels": ["cat", "dog", "cat"]}, "labels that differ"),
    "no label": ({"labels": []}, "1 to 65535 labels"),
    "no features": ({"features": 0}, "positive feature width"),
    "an empty image": ({"input_shape": [4, 0, 1]}, "positive input shape"),
    "colours without means": ({"input_shape": [4, 4, 3]}, "3 channels"),
    "a batch of none": ({"batch": 0}, "positive batch"),
    "parts as large as a batch": ({"micro_batch": 4096}, "a micro-batch below the batch"),
    "parts without their graphs": ({"micro_batch": 1}, "gradients.onnx is missing"),
    "a batch that fills the memory": ({"batch": 1 << 28}, "under 2 GiB, got batch 268435456"),
    "images beyond all memory": ({"input_shape": [1 << 62, 1 << 62, 1]}, "under 2 GiB"),
    "features beyond all memory": ({"features": 1 << 63}, "under 2 GiB"),
    "activations beyond all memory": ({"cut": [{"name": "a0", "shape": [1 << 40]}]}, "under 2 GiB.* a0"),
    "text for a number": ({"features": "two"}, "manifest of schema 2"),
    "members that are not there": ({"members": {"setup.py": "00"}}, "setup.py is missing"),
    "no members": ({"members": {}}, "features.onnx"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_wrong_is_refused_with_what_was_expected(bundle, name):
    changes, words = MANIFESTS[name]
    with pytest.raises(BundleError, match=words):
        read_bundle(forge(bundle, **changes))


def test_fields_members_and_options_that_came_later_are_no_obstacle(bundle):
    """What a later 0.x adds: this reader leaves it out, but its bytes are in the hash and under the signature."""
    whole, members = read_bundle(bundle), members_of(bundle)
    manifest = msgspec.json.decode(members["manifest.json"])
    hashes = manifest["members"] | {"int8.onnx": hashlib.sha256(b"later").hexdigest()}
    later = manifest | {"members": hashes, "energy": {"mj": 3}, "hyper": {"lr": 0.05}}
    later["state"] = [tensor | {"precision": "int8"} for tensor in manifest["state"]]
    rewrite(bundle, members | {"manifest.json": msgspec.json.encode(later), "int8.onnx": b"later"})
    got = read_bundle(bundle)
    assert got.sha256 != whole.sha256
    assert msgspec.structs.replace(got.manifest, members={}) == msgspec.structs.replace(whole.manifest, members={})
    rewrite(bundle, members | {"manifest.json": msgspec.json.encode(later), "int8.onnx": b"forged"})
    with pytest.raises(BundleError, match=r"int8\.onnx was changed"):
        read_bundle(bundle)


def test_a_later_field_is_under_the_signature(signed):
    members = members_of(signed)
    later = msgspec.json.decode(members["manifest.json"]) | {"energy": 3}
    rewrite(signed, members | {"manifest.json": msgspec.json.encode(later)})
    with pytest.raises(BundleError, match="another signature"):
        read_bundle(signed, public_key=PUBLIC)


def test_members_that_overlap_are_refused(bundle):
    """Two directory entries of one member: a few of them would make a small file fill the memory."""
    blob = bytearray(bundle.read_bytes())
    end = blob.rindex(b"PK\x05\x06")
    start = int.from_bytes(blob[end + 16 : end + 20], "little")
    count = int.from_bytes(blob[end + 10 : end + 12], "little")
    big = blob.rindex(b"PK\x01\x02", start, end)
    copies = b"".join(bytes(blob[big:end]).replace(b"train_step", b"train_ste%d" % n) for n in range(9))
    size = (end - start + len(copies)).to_bytes(4, "little")
    tail = bytes(blob[end : end + 8]) + (count + 9).to_bytes(2, "little") * 2 + size + bytes(blob[end + 16 :])
    bundle.write_bytes(bytes(blob[:end]) + copies + tail)
    with pytest.raises(BundleError, match=r"overlapping|whole bundle"):
        read_bundle(bundle)


def test_members_within_members_are_refused(bundle):
    """Each entry is whole and named once, and holds all those after it: together they are far more than the file."""
    body, data, names = members_of(bundle)["manifest.json"], bytes(100_000), [f"m{n}" for n in range(9)]
    sizes = []
    for name in reversed(names):
        sizes.insert(0, (zlib.crc32(data), len(data)))
        data = _local_header(name, *sizes[0]) + data
    first = _local_header("manifest.json", zlib.crc32(body), len(body)) + body
    directory, at = _entry("manifest.json", zlib.crc32(body), len(body), 0), len(first)
    for name, (crc, size) in zip(names, sizes, strict=True):
        directory += _entry(name, crc, size, at)
        at += len(_local_header(name, crc, size))
    blob = first + data
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 10, 10, len(directory), len(blob), 0)
    bundle.write_bytes(blob + directory + end)
    with pytest.raises(BundleError, match=r"overlapping|whole bundle, expected a zip archive, got Overlapped"):
        read_bundle(bundle)


def _local_header(name: str, crc: int, size: int) -> bytes:
    return struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 33, crc, size, size, len(name), 0) + name.encode()


def _entry(name: str, crc: int, size: int, at: int) -> bytes:
    fixed = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 33, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return fixed + name.encode()


def test_a_member_above_the_limit_is_refused_before_it_is_read(bundle, monkeypatch):
    monkeypatch.setattr(bundles, "MAX_MEMBER_BYTES", 1000)
    with pytest.raises(BundleError, match=r"expected a stored member under 2 GiB"):
        read_bundle(bundle)


def test_a_method_that_is_named_as_code_is_never_loaded(bundle, tmp_path, monkeypatch):
    """A person may name `package.module:Class`; a file may not, or who opens it runs what it says."""
    (tmp_path / "of_a_stranger.py").write_text("class Anything: pass")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BundleError, match="a method and hyper-parameters that this version knows"):
        read_bundle(forge(bundle, method="of_a_stranger:Anything"))
    assert "of_a_stranger" not in sys.modules


def test_optimizer_state_must_be_its_parameters_momentum(bundle):
    state = msgspec.json.decode(members_of(bundle)["manifest.json"])["state"]
    for broken in ({"name": "momentum.nobody"}, {"shape": [1 << 40]}, {"name": "loose"}):
        with pytest.raises(BundleError, match="optimizer state"):
            read_bundle(forge(bundle, state=[*state[:-1], state[-1] | broken]))
    with pytest.raises(BundleError, match="repeated name"):
        read_bundle(forge(bundle, state=[*state, state[0]]))


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b'{"schema":1}', b'{"schema":' + b"[" * 100_000, b'{"schema":"\xff"}', b"{" * 100_000],
    ids=["empty", "a list", "null", "bare", "deep", "not UTF-8", "deep maps"],
)
def test_a_manifest_that_is_no_manifest_is_refused(bundle, raw):
    rewrite(bundle, members_of(bundle) | {"manifest.json": raw})
    with pytest.raises(BundleError, match=r"manifest\.json"):
        read_bundle(bundle)


@pytest.mark.parametrize("change", ["nan", "infinity", "shape", "missing", "extra", "float64"])
def test_weights_other_than_the_manifests_are_refused_by_name(bundle, change):
    params = dict(read_bundle(bundle).params)
    weight = params.pop("backbone.weight").copy()
    if change in ("nan", "infinity"):
        weight[0, 0] = {"nan": np.nan, "infinity": -np.inf}[change]
    changed = {"shape": weight.reshape(3, 2), "float64": weight.astype(np.float64)}.get(change, weight)
    if change != "missing":
        params["backbone.weight"] = changed
    if change == "extra":
        params["backbone.extra"] = weight
    with pytest.raises(BundleError, match=r"backbone\.(weight|extra)"):
        read_bundle(forge_params(bundle, params))


def test_params_that_are_no_safetensors_are_refused(bundle):
    members = members_of(bundle)
    raw = b"\xff" * 64
    manifest = msgspec.json.decode(members["manifest.json"])
    manifest["members"]["params.safetensors"] = hashlib.sha256(raw).hexdigest()
    changed = {"manifest.json": msgspec.json.encode(manifest), "params.safetensors": raw}
    with pytest.raises(BundleError, match="expected safetensors"):
        read_bundle(rewrite(bundle, members | changed))


@pytest.mark.parametrize("kind", ["absent", "directory", "endless", "fifo", "text", "png", "nul"])
def test_what_is_no_bundle_file_is_refused_and_never_waits(tmp_path, kind):
    path = tmp_path / "x.bundle"
    if kind == "directory":
        path.mkdir()
    elif kind == "endless":
        path = Path("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("a bundle it is not")
    elif kind == "png":
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    elif kind == "nul":
        path = Path("a\0b")
    with pytest.raises(BundleError, match="expected a"):
        read_bundle(path)


# ── signed ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def keys(seed: bytes) -> tuple[bytes, bytes]:
    """A private key (32 bytes) and its public half."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return seed, Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


PRIVATE, PUBLIC = keys(b"p" * 32)
OTHER = keys(b"q" * 32)[1]


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "signed.bundle", **small_parts(), private_key=PRIVATE)
    return tmp_path / "signed.bundle"


def test_a_signed_bundle_is_read_with_its_key_and_without_one(signed):
    assert read_bundle(signed, public_key=PUBLIC).signed
    assert read_bundle(signed).signed


def test_a_bundle_signed_by_another_key_is_refused(signed):
    with pytest.raises(BundleError, match=r"manifest\.sig, expected an Ed25519 signature of the trusted key"):
        read_bundle(signed, public_key=OTHER)


def test_an_unsigned_bundle_is_refused_where_a_key_is_trusted(bundle):
    with pytest.raises(BundleError, match=r"manifest\.sig is missing.*got an unsigned bundle"):
        read_bundle(bundle, public_key=PUBLIC)


def test_a_manifest_changed_after_signing_is_refused(signed):
    with pytest.raises(BundleError, match=r"manifest\.sig"):
        read_bundle(forge(signed, version=99), public_key=PUBLIC)


@pytest.mark.parametrize("signature", [b"", b"short", bytes(64), bytes(65)])
def test_a_signature_that_is_none_is_refused(signed, signature):
    rewrite(signed, members_of(signed) | {"manifest.sig": signature})
    with pytest.raises(BundleError, match=r"manifest\.sig"):
        read_bundle(signed, public_key=PUBLIC)


def test_a_key_of_the_wrong_length_is_refused(signed):
    with pytest.raises(BundleError, match="trusted key"):
        read_bundle(signed, public_key=b"short")


def test_a_signature_covers_every_member_through_its_hash(signed):
    buffer = io.BytesIO(members_of(signed)["params.safetensors"])
    raw = bytearray(buffer.getvalue())
    raw[-1] ^= 1
    rewrite(signed, members_of(signed) | {"params.safetensors": bytes(raw)})
    with pytest.raises(BundleError, match=r"params\.safetensors was changed"):
        read_bundle(signed, public_key=PUBLIC)
