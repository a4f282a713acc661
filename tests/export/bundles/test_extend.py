"""`export --extend`: more classes over the same extractor, byte for byte; and which bundles are one growing fleet."""

from __future__ import annotations

import hashlib
import json
import tempfile
import unicodedata
import zipfile
from contextlib import chdir
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_samples import manifest
from commands import one_error_line, run
from contract_samples import empty_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.bundle.bundle_file import Bundle, Extends, Manifest, read_bundle, write_bundle
from protofleet.contract.bundle.fleet_compatibility import announced_lists, check_fleet, list_digest
from protofleet.contract.bundle.test_vectors import Vectors, probe_images
from protofleet.contract.errors import BundleError, UsageError
from protofleet.contract.identity.signing_keys import read_private_key
from protofleet.contract.methods import METHODS, method
from protofleet.export.bundles.extend import _check_added, extend_bundle

EXTRACTOR = "11" * 32
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
LISTS = st.lists(NAMES, min_size=2, max_size=9, unique_by=lambda name: unicodedata.normalize("NFC", name))


def made(path: Path, labels: tuple[str, ...] = ("cat", "dog"), name: str = "ncm", **changes: object) -> Bundle:
    """A bundle whose graph is opaque, which is all that is ever looked at here."""
    fields = {"labels": labels, "extractor": EXTRACTOR, **changes}
    about: Manifest = msgspec.structs.replace(manifest(name=name), **fields)  # type: ignore[arg-type]
    x = probe_images(about.input_shape)
    vectors = Vectors(x, np.full((len(x), about.features), 0.5, np.float32))
    params = {"backbone.weight": np.eye(2, dtype=np.float32)}
    write_bundle(
        path, about, features=empty_graph(), train_step=None, params=params, vectors=vectors, private_key=b"k" * 32
    )
    return read_bundle(path)


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.startswith("manifest")}


@given(labels=LISTS, steps=st.lists(LISTS, min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_all_but_the_classes_is_the_same_bytes_however_often_it_is_extended(
    labels: list[str], steps: list[list[str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "0.bundle")
        before = first = made(path, tuple(labels), "ffc")
        for number, names in enumerate(steps, 1):
            there = {unicodedata.normalize("NFC", name) for name in before.manifest.labels}
            added = [name for name in names if unicodedata.normalize("NFC", name) not in there]
            added = added or [f"new class {number}"]
            grown = Path(folder, f"{number}.bundle")
            told = extend_bundle(path, added, grown)
            now = read_bundle(grown)
            assert (told.sha256, told.extended, told.unsigned) == (now.sha256, before.sha256, before.signed)
            assert now.manifest.labels == (*before.manifest.labels, *added)
            assert now.manifest.version == before.manifest.version + 1
            assert now.manifest.provenance.endswith(f"added to bundle {before.sha256.hex()}")
            assert members(grown) == members(path)
            shared = [found for found in METHODS.values() if found.extractor == "bundle"]
            assert shared
            assert all(now.extractor(found) == first.extractor(found) for found in shared)
            assert now.manifest.extended == {before.sha256: before.manifest.classes, **before.manifest.extended}
            path, before = grown, now


@given(one=LISTS, other=LISTS, cut=st.none() | st.integers(2, 9))
@settings(max_examples=200, deadline=None)
def test_bundles_are_one_fleet_where_the_shorter_list_begins_the_longer(
    one: list[str], other: list[str], cut: int | None
) -> None:
    """Whichever is given first; the line names the first class that differs."""
    other = other if cut is None else one[:cut]
    a, b = (
        (Path(name), Bundle(msgspec.structs.replace(manifest(name="ffc"), labels=tuple(labels), extractor=EXTRACTOR),
                            bytes([index]) * 32, b"", None, {}))
        for index, (name, labels) in enumerate({"a": one, "b": other}.items())
    )  # fmt: skip
    shared = min(len(one), len(other))
    differs = next((i for i in range(shared) if one[i] != other[i]), None)
    for given_first, given_second in ((a, b), (b, a)):
        if differs is not None:
            with pytest.raises(BundleError, match=f"class {differs} is another than in [ab], expected"):
                check_fleet([given_first, given_second])
            continue
        roster = check_fleet([given_first, given_second])
        assert roster.manifest.classes == max(len(one), len(other))
        assert dict(roster.shorter) == {
            each.sha256: each.manifest.classes for _, each in (a, b) if each.sha256 != roster.bundle
        }
        lists = announced_lists(roster.manifest, roster.shorter)
        assert (
            list(lists) == [list_digest(names) for names in sorted((one, other), key=len, reverse=True)][: len(lists)]
        )


@given(labels=LISTS)
def test_what_stands_for_a_list_is_what_any_json_library_makes_of_it(labels: list[str]) -> None:
    plain = json.dumps(labels, ensure_ascii=False, separators=(",", ":")).encode()
    assert list_digest(labels) == hashlib.sha256(plain).digest()[:8]


def test_only_what_shares_an_extractor_and_trains_nothing_may_be_shorter(tmp_path: Path) -> None:
    long, short = ("cat", "dog", "hamster"), ("cat", "dog")
    for name, other in (("fedproto", EXTRACTOR), ("ncm", "22" * 32), ("ncm", "")):
        pair = [
            (Path(f"{n}"), Bundle(msgspec.structs.replace(manifest(name=name), labels=labels, extractor=of),
                                  bytes([n]) * 32, b"", None, {}))
            for n, (labels, of) in enumerate([(long, EXTRACTOR), (short, other)])
        ]  # fmt: skip
        with pytest.raises(
            BundleError, match="another number of classes than the fleet's first bundle, expected 3, got"
        ):
            check_fleet(pair)


def test_what_a_bundle_extends_is_known_to_its_fleet_without_its_file(tmp_path: Path) -> None:
    old = made(tmp_path / "old.bundle")
    extend_bundle(tmp_path / "old.bundle", ["hamster"], tmp_path / "new.bundle")
    new = read_bundle(tmp_path / "new.bundle")
    roster = check_fleet([(Path("new"), new)])
    assert (roster.bundle, dict(roster.shorter), roster.others) == (new.sha256, {old.sha256: 2}, ())
    assert check_fleet([(Path("old"), old), (Path("new"), new)]) == roster


@pytest.mark.parametrize(
    "extends",
    [
        (Extends("11" * 32, 3),),
        (Extends("11" * 32, 0),),
        (Extends("11" * 32, 1), Extends("22" * 32, 2)),
        (Extends("another", 1),),
    ],
)
def test_a_manifest_extends_ever_shorter_lists(tmp_path: Path, extends: tuple[Extends, ...]) -> None:
    with pytest.raises(BundleError, match="expected shorter bundles, ever shorter") as told:
        made(tmp_path / "b.bundle", ("a", "b", "c"), extends=extends)
    assert "\n" not in str(told.value)


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_says_what_it_kept_and_what_it_added(tmp_path: Path) -> None:
    old = made(tmp_path / "old.bundle", version=4)
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    out = tmp_path / "new.bundle"
    done = run("export", "--extend", tmp_path / "old.bundle", "--classes", "+hamster, +mouse", "--out", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert "the first 2 as they were, then hamster, mouse" in done.stderr
    assert f"sha256 {old.sha256.hex()[:12]}…" in done.stderr
    assert f"{EXTRACTOR[:12]}… of both" in done.stderr
    assert "is signed and this one is not" in done.stderr
    grown = read_bundle(out)
    assert (grown.manifest.labels, grown.manifest.version) == (("cat", "dog", "hamster", "mouse"), 5)
    signed = run(
        "export", "--extend", out, "--classes", "+rat", "--out", tmp_path / "s.bundle", "--sign", key, "--provenance",
        "the spring", "--bundle-version", 9,
    )  # fmt: skip
    assert signed.returncode == 0, signed.stderr
    last = read_bundle(tmp_path / "s.bundle")
    assert (last.signed, last.manifest.version, last.manifest.classes) == (True, 9, 5)
    assert last.manifest.provenance == f"the spring; rat added to bundle {grown.sha256.hex()}"
    assert list(last.manifest.extended.values()) == [4, 2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--classes", "hamster"], "--classes with --extend, expected + before each new name, got hamster"),
        (["--classes", "+"], "--classes with --extend, expected + before each new name"),
        (["--classes", "+dog"], "expected classes that the bundle does not have, got dog, which is class 1"),
        (["--classes", "+a,+a"], "expected classes that the bundle does not have, got a again"),
        (
            ["--classes", "+caf\u00e9,+cafe\u0301"],
            "expected names that do not look the same, got 'caf\\xe9' and 'cafe\\u0301'",
        ),
        (["--classes", "+a\nb"], "expected names of characters that can be seen, got 'a\\nb'"),
        (["--classes", "++a"], "expected names without + before them, got '+a'"),
        (["--classes", "+a\u2028b"], "expected names of characters that can be seen, got 'a\\u2028b'"),
        (["--classes", "+\udcff"], "expected names of characters that can be seen"),
        (["--classes", "+a", "--out", "old.bundle"], "--out, expected another file than the bundle that is extended"),
        (["--classes", "+a", "--method", "ffc"], "--method with --extend, expected one of them, got both"),
        (["--classes", "+a", "--seed", "0"], "--seed with --extend"),
        (["--classes", "+a", "--trainable-blocks", "1"], "--trainable-blocks with --extend"),
        (["--classes", "+a", "--bundle-version", "1"], "--bundle-version, expected above 1, which"),
    ],
)
def test_what_cannot_be_added_is_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    made(tmp_path / "old.bundle")
    if "--out" not in words:
        words = [*words, "--out", "new.bundle"]
    before = (tmp_path / "old.bundle").read_bytes()
    with chdir(tmp_path):
        done = run("export", "--extend", tmp_path / "old.bundle", *words)
    assert (tmp_path / "old.bundle").read_bytes() == before
    assert (done.returncode, line in one_error_line(done)) == (2, True), done.stderr
    assert not (tmp_path / "new.bundle").exists()


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if found.trains])
def test_what_trains_for_so_many_classes_is_not_extended(tmp_path: Path, name: str) -> None:
    made(tmp_path / "old.bundle", name=name)
    done = run("export", "--extend", tmp_path / "old.bundle", "--classes", "+a", "--out", tmp_path / "new.bundle")
    assert done.returncode == 2
    line = one_error_line(done)
    assert f"cannot be extended: {name} trains a step that is made for 2 classes, expected a bundle of " in line
    assert all(other in line for other, found in METHODS.items() if not found.trains)


def test_a_bundle_without_an_extractors_name_is_not_extended(tmp_path: Path) -> None:
    made(tmp_path / "old.bundle", extractor="")
    done = run("export", "--extend", tmp_path / "old.bundle", "--classes", "+a", "--out", tmp_path / "new.bundle")
    assert "expected the extractor in its manifest, got none" in one_error_line(done)


def test_who_signs_the_longer_one_loses_no_signature(tmp_path: Path) -> None:
    made(tmp_path / "old.bundle")
    told = extend_bundle(tmp_path / "old.bundle", ["a"], tmp_path / "new.bundle", private_key=b"k" * 32)
    assert (told.unsigned, read_bundle(tmp_path / "new.bundle").signed) == (False, True)


def test_a_class_number_has_two_bytes() -> None:
    long = manifest(classes=65_534)
    _check_added(["the last"], long)
    with pytest.raises(UsageError, match="expected 65535 classes at most, got 65536"):
        _check_added(["the last", "one more"], long)


def test_weights_that_would_be_packed_otherwise_are_not_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another packing is another extractor by its hash, though its numbers are the same."""
    made(tmp_path / "old.bundle")
    monkeypatch.setattr("protofleet.export.bundles.extend.pack_params", lambda params: b"in another order")
    with pytest.raises(BundleError, match="expected weights as export packs them, got another order"):
        extend_bundle(tmp_path / "old.bundle", ["a"], tmp_path / "new.bundle")
    assert not (tmp_path / "new.bundle").exists()


@pytest.mark.parametrize("missing", ["--backbone", "--method"])
def test_without_extend_a_backbone_and_a_method_are_needed(tmp_path: Path, missing: str) -> None:
    given = {"--backbone": "small_cnn", "--method": "ncm"}
    words = [word for option, value in given.items() if option != missing for word in (option, value)]
    done = run("export", "--classes", "2", "--out", tmp_path / "b.bundle", *words)
    assert one_error_line(done).startswith(f"error: {missing}, expected a value, got none")
    assert method("ncm").trains is False


# ── the key ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_private_keys_in_every_usual_form(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

    def pem(key: ed25519.Ed25519PrivateKey | x25519.X25519PrivateKey) -> bytes:
        plain = serialization.NoEncryption()
        return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)

    key = ed25519.Ed25519PrivateKey.generate()
    raw = key.private_bytes_raw()
    path = tmp_path / "key"
    for form in (raw, raw.hex().encode() + b"\n", pem(key)):
        path.write_bytes(form)
        assert read_private_key(str(path)) == raw
    other = pem(x25519.X25519PrivateKey.generate())
    for wrong in (b"", raw + b"x", b"zz" * 32, other, b"-----BEGIN PRIVATE KEY-----\nx"):
        path.write_bytes(wrong)
        with pytest.raises(UsageError, match="--sign") as told:
            read_private_key(str(path))
        assert "\n" not in str(told.value)
