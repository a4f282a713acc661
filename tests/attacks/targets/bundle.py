"""A bundle that anybody made: it is refused with a `BundleError`, or is all that its manifest says.

The first byte says what the rest is: a file as it is; or a good bundle of which one member, or some fields of the
manifest, are others, and whose hashes fit again, since whoever makes a bundle makes those, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from contract_samples import small_parts

from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.bundle.test_vectors import Vectors
from protofleet.contract.errors import BundleError
from protofleet.contract.methods import method
from tests.attacks.choices import Choices
from tests.attacks.guard import scratch
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 4096
MEMBERS = ("manifest.json", "features.onnx", "train_step.onnx", "params.safetensors", "vectors.safetensors")
_SAMPLES = Path(__file__).parents[2] / "files"


def run(data: bytes) -> None:
    choices = Choices(data)
    blob = choices.rest() if choices.below(4) == 0 else _made(choices)
    with scratch() as folder:
        path = folder / "a.bundle"
        path.write_bytes(blob)
        try:
            bundle = read_bundle(path)
        except BundleError as error:
            is_one_line(error)
            return
    m = bundle.manifest
    assert set(bundle.params) == {tensor.name for tensor in m.state if tensor.role != "optimizer"}
    assert all(np.isfinite(value).all() for value in bundle.params.values())
    assert bundle.sha256 == hashlib.sha256(blob).digest()
    bundle.extractor(method(m.method))
    assert m.classes >= 1
    for found in (m.step_inputs, m.weights, m.activation_bytes, m.given_shapes, m.parameter_count, m.extended):
        assert found is not None


@functools.cache
def _good() -> dict[str, bytes]:
    """The members of a small bundle that has all of them."""
    rng = np.random.default_rng(1)
    vectors = Vectors(rng.integers(0, 255, (2, 4, 4, 1), np.uint8), rng.normal(size=(2, 2)).astype(np.float32))
    with scratch() as folder:
        write_bundle(folder / "good.bundle", **small_parts(), vectors=vectors)
        return _members((folder / "good.bundle").read_bytes())


def _members(blob: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(blob)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _made(choices: Choices) -> bytes:
    """A bundle whose hashes fit."""
    members, manifest = dict(_good()), json.loads(_good()["manifest.json"])
    for _ in range(choices.below(4)):
        name = choices.one_of(MEMBERS)
        members[name] = _spliced(members[name], choices)
    for _ in range(choices.below(4)):
        _other_field(manifest, choices)
    if choices.below(4):
        manifest["members"] = {n: hashlib.sha256(data).hexdigest() for n, data in members.items() if n != MEMBERS[0]}
        spelt = json.dumps(manifest).encode()
        members["manifest.json"] = (
            spelt if members["manifest.json"] == _good()["manifest.json"] else members[MEMBERS[0]]
        )
    if choices.below(16) == 1:
        members[choices.text() or "x"] = choices.block()
    return _zipped(members, zipfile.ZIP_DEFLATED if choices.below(16) == 1 else zipfile.ZIP_STORED)


def _spliced(data: bytes, choices: Choices) -> bytes:
    """Some bytes replaced by others, fewer or more."""
    at, cut, put = choices.below(len(data) + 1), choices.number(), choices.take(choices.number())
    return data[:at] + put + data[at + cut :]


def _other_field(found: object, choices: Choices) -> None:
    """Another value somewhere in a JSON document."""
    while True:
        keys = list(found) if isinstance(found, dict) else list(range(len(found))) if isinstance(found, list) else []
        if not keys:
            return
        key = choices.one_of(keys)
        inner = found[key]  # type: ignore[index]
        if isinstance(inner, dict | list) and inner and choices.chance():
            found = inner
            continue
        found[key] = _value(choices, inner)  # type: ignore[index]
        return


def _value(choices: Choices, before: object) -> object:
    values = (
        None, True, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "a", [], {}, [before], [before, before],
        {"a": before}, str(before), choices.text(), [choices.number(4)] * 3, {choices.text(): choices.number()},
    )  # fmt: skip
    return choices.one_of(values)


def _zipped(members: Mapping[str, bytes], how: int) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, how)
    return buffer.getvalue()


def seeds() -> Iterable[bytes]:
    for path in sorted(_SAMPLES.glob("v*/small.bundle")):
        yield b"\0" + path.read_bytes()
    yield bytes([1, 0, 0, 1, 0, 0])
    for member in range(len(MEMBERS)):
        yield bytes([1, 1, member, 40, 3, 2, 7, 7, 0, 1, 0, 0])
    for field in range(24):
        yield bytes([1, 0, 1, field, 0, field % 21, 2, 65, 66, 1, 0, 0])
