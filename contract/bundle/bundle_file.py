"""The bundle: one file that carries a backbone and a method's training step to every device.

A bundle is a zip archive, stored and with fixed timestamps, so that the same contents are the same bytes:

    manifest.json        the `Manifest` below, of schema 2; names the sha256 of every other member but the signature
    features.onnx        x u8 (N, H, W, c) → z f32 (N, D)
    train_step.onnx      x, y, sample_weight, prototypes, prototype_mask, lr, further…, state… → loss, state′…
    train_step.FORM.onnx the same step in a form for some processors, which a device tries   (optional)
    trunk.onnx           x u8 (N, H, W, c) → a0 f32 (N, …), a1, …        (where only the tail is trained)
    tail.onnx            a0, a1, … → z f32 (N, D), as features.onnx gives it
    gradients.onnx       x, y, … of a part of a batch, state… → loss, gradient.<param>…, <buffer>′…   (optional)
    update.onnx          lr, gradient.<param>…, param…, optimizer… → param′…, optimizer′…   (with gradients.onnx)
    params.safetensors   initial weights, and the head where it is frozen: float32; where nothing is trained
                         also float16, which the graph casts
    vectors.safetensors  a few images and their features, to check a processor by   (optional;
    contract/bundle/test_vectors.py)
    manifest.sig         Ed25519 signature of manifest.json   (optional)

Where only the tail of the network is trained, the step takes the trunk's activations `a0, a1, …` in place of `x`.

A reader checks in this order, and stops at the first error:

1. The file is a zip archive of known members, and holds nothing else.
2. The schema of the manifest is known.
3. The signature is from the trusted key, if a key was given.
4. Every member has the hash that the manifest names.
5. The weights are those that the manifest lists.
6. The graphs read nothing else, and every run of them ends (`contract/bundle/graph_checks.py`).

A writer checks the same. The identity of a bundle is the sha256 of the whole file.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.class_names import is_readable
from protofleet.contract.bundle.graph_checks import check_graph, weight_places
from protofleet.contract.bundle.test_vectors import VECTORS, Vectors, read_vectors
from protofleet.contract.errors import BundleError, MethodError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.identity import ed25519
from protofleet.contract.methods import METHODS, Head, Method, Value, method

__all__ = [
    "SCHEMA",
    "STEP_INPUTS",
    "Activation",
    "Bundle",
    "Extends",
    "Manifest",
    "Role",
    "StateTensor",
    "pack_params",
    "read_bundle",
    "write_bundle",
]

SCHEMA = 2
_FORM = re.compile(r"train_step\.([a-z0-9]+)\.onnx")
_RUN_PIXELS = 16_384  # of the photos that go through the features graph at a time
_MICRO = ("gradients.onnx", "update.onnx")
STEP_INPUTS = ("x", "y", "sample_weight", "prototypes", "prototype_mask", "lr")
MAX_MEMBER_BYTES = 2 << 30
_MEMBER_NAME = re.compile(r"[a-z0-9_]{1,64}(\.[a-z0-9_]{1,64}){0,3}")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_OPSETS = range(13, 29)  # what a graph's operators can be of; 20 is what is written, 28 the newest there was

Role = Literal["param", "buffer", "optimizer", "frozen", "trunk"]  # of a tensor of the training step


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor that the training step reads, and, unless it is frozen, writes back as `<name>.next`.

    Roles: `param` is trained, `buffer` is running statistics, `optimizer` starts at zero and is not stored,
    `frozen` is read only, and `trunk` is read by the graphs of inference alone: no step has it.
    """

    name: str
    shape: tuple[int, ...]
    role: Role


class Activation(msgspec.Struct, frozen=True):
    """A tensor that the trunk hands to the tail: its name in the graphs, and its shape for one image; float32."""

    name: str
    shape: tuple[int, ...]


class Extends(msgspec.Struct, frozen=True):
    """A bundle that another one extends: its sha256 (hex), and how many classes it has, which are the other's first."""

    sha256: str
    classes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle is, as `manifest.json` says it. A reader leaves out fields that it does not know.

    Attributes:
        version: grows with each export of the same fleet's bundle.
        backbone: the backbone's name, or `module:callable`.
        provenance: how the initial weights were obtained, in words.
        labels: C class names, in the order of the class numbers.
        features: D, the feature width.
        input_shape: (H, W, c) of the uint8 images.
        mean, std: per channel, applied inside the graphs to x / 255.
        batch: B, the fixed batch of the training step.
        micro_batch: samples of a part of a batch in gradients.onnx; 0 where there is none.
        state: the training step's tensors in input order.
        members: sha256 (hex) of every other member but the signature.
        extractor: sha256 (hex) of what turns images into features: the features graph, preprocessing inside, and the
            backbone's weights. Bundles that differ otherwise may share it.
        cut: where only the tail of the network is trained, what the trunk hands to it; empty where all is trained.
        extends: the bundles of the same extractor that this one adds classes to, newest first.
    """

    schema: int
    version: int
    protofleet: str
    backbone: str
    provenance: str
    method: str
    head: Head
    hyper: dict[str, Value]
    labels: tuple[str, ...]
    features: int
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch: int
    micro_batch: int = 0
    opset: int
    state: tuple[StateTensor, ...]
    members: dict[str, str]
    extractor: str = ""
    cut: tuple[Activation, ...] = ()
    extends: tuple[Extends, ...] = ()

    @property
    def extended(self) -> dict[bytes, int]:
        """How many classes each bundle has that this one extends, by its sha256 (32 bytes)."""
        return {bytes.fromhex(shorter.sha256): shorter.classes for shorter in self.extends}

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return len(self.labels)

    @property
    def step_inputs(self) -> tuple[str, ...]:
        """The inputs of the training step that are not state, in order."""
        images = tuple(activation.name for activation in self.cut) or STEP_INPUTS[:1]
        return (*images, *STEP_INPUTS[1:], *method(self.method).step_inputs(self.hyper))

    @property
    def weights(self) -> tuple[str, ...]:
        """The backbone's tensors: what features.onnx takes."""
        names = self.names("param", "buffer", "frozen", "trunk")
        return tuple(name for name in names if name.startswith("backbone."))

    @property
    def activation_bytes(self) -> int:
        """What the trunk makes of one image; 0 where there is no trunk."""
        return 4 * sum(prod(activation.shape) for activation in self.cut)

    @property
    def extraction_batch(self) -> int:
        """How many photos go through the features graph at a time on a CPU (docs/decisions/240).

        As many as have 16,384 pixels, one of 128 × 128 or sixteen of 32 × 32, at most the batch; the batch itself where
        a trunk is frozen.
        """
        height, width, _ = self.input_shape
        return self.batch if self.cut else min(self.batch, max(_RUN_PIXELS // (height * width), 1))

    @property
    def given_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the step's inputs that come from the global state, or from the labels that a device knows."""
        sizes = {"classes": self.classes, "features": self.features}
        further = method(self.method).step_inputs(self.hyper)
        own = {name: tuple(sizes[axis] for axis in axes) for name, axes in further.items()}
        return {"prototypes": (self.classes, self.features), "prototype_mask": (self.classes,), **own}

    @property
    def parts_note(self) -> str:
        """How training a batch in parts differs from training it whole, for a person; empty if it does not differ."""
        if not self.micro_batch or not self.names("buffer"):
            return ""
        statistics_note = f"batch normalisation takes the statistics of {self.micro_batch} samples at a time"
        return f"in parts, {statistics_note}: another step than that of a whole batch"

    @property
    def trainable(self) -> bool:
        """Whether the bundle carries a training step."""
        return "train_step.onnx" in self.members

    def names(self, *roles: str) -> tuple[str, ...]:
        """The state tensors of these roles, in input order."""
        return tuple(tensor.name for tensor in self.state if tensor.role in roles)

    @property
    def parameter_count(self) -> int:
        """Trained numbers, head included: what FedAvg would send."""
        return sum(int(np.prod(t.shape)) for t in self.state if t.role in ("param", "buffer"))


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been read and checked.

    Attributes:
        sha256: 32 bytes, the hash of the whole file: the bundle's identity on the wire.
        params: initial weights by state-tensor name: float32, or float16 of a bundle that trains nothing.
        vectors: test vectors of the extractor; None in a bundle that has none.
        trunk, tail: the features graph in two, where only its tail is trained.
        forms: further forms of the training step, by name; they need not run here.
        micro: gradients.onnx and update.onnx, the training step in two.
    """

    manifest: Manifest
    sha256: bytes
    features: bytes
    train_step: bytes | None
    params: Mapping[str, NDArray[np.float32]]
    signed: bool = False
    vectors: Vectors | None = None
    trunk: bytes | None = None
    tail: bytes | None = None
    forms: Mapping[str, bytes] = field(default_factory=dict)
    micro: tuple[bytes, bytes] | None = None

    def extractor(self, rule: Method) -> bytes:
        """32 bytes: the identity of the features that a round of this method sums.

        It is empty where a method sums features of the device's own weights. Sums add up over devices that have the
        same extractor and the same preparation of features (`Method.preparation`).
        """
        return extractor_of(self.manifest, self.sha256, rule)


def extractor_of(manifest: Manifest, sha256: bytes, rule: Method) -> bytes:
    """See `Bundle.extractor`; of a bundle that does not say its extractor, the bundle itself."""
    if rule.extractor == "local":
        return b""
    identity = bytes.fromhex(manifest.extractor) if manifest.extractor else sha256
    prepared = rule.preparation(rule.resolved_in(manifest.hyper))
    return hashlib.sha256(identity + msgspec.json.encode(prepared, order="sorted")).digest()


# arguments: the members of the file, by name
def write_bundle(
    path: str | os.PathLike[str],
    manifest: Manifest,
    *,
    features: bytes,
    train_step: bytes | None,
    params: Mapping[str, NDArray[np.float32]],
    vectors: Vectors | None = None,
    trunk: bytes | None = None,
    tail: bytes | None = None,
    forms: Mapping[str, bytes] | None = None,
    micro: tuple[bytes, bytes] | None = None,
    private_key: bytes | None = None,
) -> bytes:
    """Write a bundle whole or not at all, and return its sha256 (32 bytes).

    Args:
        manifest: its `members` are filled in here, whatever they hold.
        params: every state tensor but the optimizer's, float32; float16 where the graph casts them.
        vectors: images and the features that these graph and weights give them.
        trunk, tail: where the manifest has a cut.
        forms: further forms of the training step, by name (a-z, 0-9).
        micro: gradients.onnx and update.onnx, where the manifest has a micro-batch.
        private_key: 32 bytes Ed25519 seed, to sign the manifest (extra `security`).

    Raises:
        BundleError: when the parts do not fit each other, or the file cannot be written.
    """
    _check_manifest(manifest, path)
    _check_params(manifest, params, path)
    parts = {"features.onnx": features, "params.safetensors": pack_params(params)}
    further: dict[str, bytes | None] = {"train_step.onnx": train_step, "trunk.onnx": trunk, "tail.onnx": tail}
    further |= dict(zip(_MICRO, micro or (None, None), strict=True))
    parts |= {name: graph for name, graph in further.items() if graph is not None}
    parts |= {f"train_step.{form}.onnx": graph for form, graph in (forms or {}).items()}
    if vectors is not None:
        parts[VECTORS] = vectors.packed()
        read_vectors(parts[VECTORS], manifest.input_shape, manifest.features, path)
    hashes = {name: hashlib.sha256(parts[name]).hexdigest() for name in sorted(parts)}
    header = msgspec.json.encode(msgspec.structs.replace(manifest, members=hashes))
    _check_graphs(manifest, parts, path)
    members = {"manifest.json": msgspec.json.format(header, indent=1), **parts}
    if private_key is not None:
        members["manifest.sig"] = ed25519.sign(private_key, members["manifest.json"])
    blob = _zip(members)
    target = Path(path)
    try:
        with whole_file(target) as file:
            file.write(blob)
    except OSError as error:
        raise BundleError(f"cannot write {target}", got=error.strerror, hint="another --out") from None
    return hashlib.sha256(blob).digest()


def pack_params(params: Mapping[str, NDArray[np.floating]]) -> bytes:
    """The bytes of `params.safetensors`: always the same for the same tensors. What is not float16 becomes float32."""
    from safetensors.numpy import save

    kinds = {name: np.float16 if params[name].dtype == np.float16 else np.float32 for name in params}
    return save({name: np.ascontiguousarray(params[name], dtype=kinds[name]) for name in sorted(params)})


def read_bundle(path: str | os.PathLike[str], *, public_key: bytes | Collection[bytes] | None = None) -> Bundle:
    """Read and check a bundle.

    Args:
        public_key: 32 bytes, or several keys; when given, a bundle that none of them signed is refused (extra
            `security`).

    Raises:
        BundleError: naming the member that is wrong, what was expected and what was found.
    """
    blob = _read_file(path)
    members = _unzip(blob, path)
    manifest = _parse_manifest(members["manifest.json"], path)
    if public_key is not None:
        _verify(members, (public_key,) if isinstance(public_key, bytes) else public_key, path)
    _check_members(manifest, members, path)
    params = _load_params(members["params.safetensors"], path)
    _check_params(manifest, params, path)
    _check_graphs(manifest, members, path)
    raw = members.get(VECTORS)
    return Bundle(
        manifest=manifest,
        sha256=hashlib.sha256(blob).digest(),
        features=members["features.onnx"],
        train_step=members["train_step.onnx"] if manifest.trainable else None,
        params=params,
        signed="manifest.sig" in members,
        vectors=None if raw is None else read_vectors(raw, manifest.input_shape, manifest.features, path),
        trunk=members["trunk.onnx"] if manifest.cut else None,
        tail=members["tail.onnx"] if manifest.cut else None,
        forms={form: members[name] for form, name in _forms(manifest).items()},
        micro=(members[_MICRO[0]], members[_MICRO[1]]) if manifest.micro_batch else None,
    )


def _read_file(path: str | os.PathLike[str]) -> bytes:
    expected, hint = "a .bundle file", f"ls -l {os.fspath(path)}"
    try:
        if not Path(path).is_file() and Path(path).exists():  # a directory, or a device that never ends
            raise BundleError(f"cannot read bundle {path}", expected=expected, got="something else", hint=hint)
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or error
        raise BundleError(f"cannot read bundle {path}", expected=expected, got=got, hint=hint) from None


def _zip(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, date_time=_EPOCH)
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def _unzip(blob: bytes, path: object) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            for info in archive.infolist():
                if not _MEMBER_NAME.fullmatch(info.filename) or info.filename in members:
                    raise BundleError(f"{path}: unexpected member", expected="plain names, once", got=info.filename)
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_MEMBER_BYTES:
                    raise BundleError(f"{path}: {info.filename}", expected="a stored member under 2 GiB", got="another")
                members[info.filename] = archive.read(info)
                if sum(map(len, members.values())) > len(blob):
                    raise BundleError(f"{path}", expected="members that fit the file", got="overlapping ones")
            if not _fills(blob, archive.infolist()):
                got, hint = "bytes before, between or after its members", "copying it again"
                raise BundleError(f"{path}", expected="a zip archive and nothing else", got=got, hint=hint)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise BundleError(
            f"{path} is not a whole bundle", expected="a zip archive", got=error, hint="copying it again"
        ) from None
    if "manifest.json" not in members:
        raise BundleError(f"{path} is not a bundle", expected="a member manifest.json", got="none")
    return members


def _fills(blob: bytes, members: list[zipfile.ZipInfo]) -> bool:
    """Whether an archive consists of its members, one after the other, then its directory, and of nothing else.

    The module zipfile skips other bytes without an error. No member may have an extra field or a comment, because these
    can hold any bytes. See APPNOTE.TXT 4.3.7 (a local header of 30 bytes, with the lengths of name and extra field at
    26), 4.3.12 and 4.3.16.
    """
    position = 0
    for info in sorted(members, key=lambda info: info.header_offset):
        name = len(info.filename)
        if info.header_offset != position or struct.unpack_from("<HH", blob, position + 26) != (name, 0):
            return False
        position += 30 + name + info.file_size
    listed = sum(46 + len(info.filename) for info in members)  # and so no extra fields and comments
    signature, size, offset, comment = struct.unpack("<4s8xIIH", blob[-22:])
    ends_here = position + listed + 22 == len(blob)
    return signature == b"PK\5\6" and (offset, size, comment) == (position, listed, 0) and ends_here


# made once, here: msgspec 0.22 ends the process where two threads are the first to decode a type at the same time
_MANIFESTS = msgspec.json.Decoder(Manifest)


def _parse_manifest(raw: bytes, path: object) -> Manifest:
    try:
        schema = msgspec.json.decode(raw, type=dict[str, Any]).get("schema")
        if schema != SCHEMA:
            newer = type(schema) is int and schema > SCHEMA
            raise BundleError(
                f"{path}: manifest.json",
                expected=f"schema {SCHEMA}",
                got=f"schema {schema}",
                hint="a newer Protofleet" if newer else "exporting it anew: it is of Protofleet 0.1",
            )
        manifest = _MANIFESTS.decode(raw)
    except (ValueError, RecursionError) as error:  # malformed, of other fields, not UTF-8, nested without end
        raise BundleError(f"{path}: manifest.json", expected=f"a manifest of schema {SCHEMA}", got=error) from None
    try:  # a hyper-parameter that came after the bundle has its default; one that we do not know must not be left out
        if ":" in manifest.method:  # code is named by a person, never by a file
            raise MethodError("unknown method", expected="a method's name", got=manifest.method[:80])
        settled = method(manifest.method).resolve(manifest.hyper)
    except MethodError as error:
        stranger = manifest.method not in METHODS
        raise BundleError(
            f"{path}: manifest.json",
            expected="a method and hyper-parameters that this version knows",
            got=error,
            hint="a newer Protofleet" + ", or --method package.module:Class for one of your own" * stranger,
        ) from None
    manifest = msgspec.structs.replace(manifest, hyper=settled)
    _check_manifest(manifest, path)
    return manifest


def _check_manifest(manifest: Manifest, path: object) -> None:
    channels = manifest.input_shape[2]
    rule = method(manifest.method)
    names = [tensor.name for tensor in manifest.state]
    shapes = {tensor.name: tensor.shape for tensor in manifest.state}
    momenta = [tensor for tensor in manifest.state if tensor.role == "optimizer"]
    rules = (
        (manifest.head in rule.heads, f"a head of {rule.heads} for {manifest.method}", manifest.head),
        (len(shapes) == len(names), "state tensors that differ in name", "a repeated name"),
        (
            all(tensor.shape == _optimizer_shape(tensor.name, shapes) for tensor in momenta),
            "optimizer state shaped as its parameter",
            "another shape",
        ),
        (1 <= manifest.classes <= 65_535, "1 to 65535 labels", manifest.classes),
        (len(set(manifest.labels)) == manifest.classes, "labels that differ", "a repeated label"),
        (manifest.features >= 1, "a positive feature width", manifest.features),
        (min(manifest.input_shape) >= 1, "a positive input shape", manifest.input_shape),
        (all(map(is_readable, manifest.labels)), "labels without control characters",
            next((repr(label) for label in manifest.labels if not is_readable(label)), None)),
        (len(manifest.mean) == len(manifest.std) == channels, f"mean and std for {channels} channels", manifest.mean),
        (all(map(isfinite, manifest.mean)) and all(0 < std < float("inf") for std in manifest.std),
            "numbers as mean and positive ones as std", (manifest.mean, manifest.std)),
        (manifest.opset in _OPSETS, f"opset {_OPSETS[0]} to {_OPSETS[-1]}", manifest.opset),
        (re.fullmatch("([0-9a-f]{64})?", manifest.extractor), "a sha256 of the extractor", manifest.extractor[:80]),
        (
            len({activation.name for activation in manifest.cut} - set(STEP_INPUTS)) == len(manifest.cut)
            and all(min(activation.shape, default=1) >= 1 for activation in manifest.cut),
            "activations that differ in name, of positive size",
            manifest.cut,
        ),
        (
            bool(manifest.cut) or not manifest.names("trunk"),
            "a cut where tensors are the trunk's",
            "none",
        ),
        (
            manifest.micro_batch == 0 or 0 < manifest.micro_batch < manifest.batch,
            "a micro-batch below the batch",
            manifest.micro_batch,
        ),
        (_is_extension(manifest), "shorter bundles, ever shorter, in `extends`", manifest.extends),
        (manifest.batch >= 1 and manifest.version >= 0, "a positive batch and version", manifest.batch),
        (max(_sizes(manifest)) <= MAX_MEMBER_BYTES, "sizes of which a batch, or a row for each class, is under 2 GiB",
            f"batch {manifest.batch}, images {manifest.input_shape}, width {manifest.features}"
            + "".join(f", {activation.name} {activation.shape}" for activation in manifest.cut)),
    )  # fmt: skip
    for holds, expected, got in rules:
        if not holds:
            raise BundleError(f"{path}: manifest.json", expected=expected, got=got)


def _is_extension(manifest: Manifest) -> bool:
    """Whether the list `extends` is possible: each bundle has a sha256, and fewer classes than the one before."""
    sizes = (manifest.classes, *(shorter.classes for shorter in manifest.extends))
    named = all(re.fullmatch("[0-9a-f]{64}", shorter.sha256) for shorter in manifest.extends)
    return named and sizes[-1] >= 1 and all(more > fewer for more, fewer in pairwise(sizes))


def _sizes(manifest: Manifest) -> Iterator[int]:
    """Bytes that a device allocates because of the manifest alone, however small the bundle itself is."""
    yield manifest.batch * prod(manifest.input_shape)
    yield from (4 * manifest.batch * prod(activation.shape) for activation in manifest.cut)
    yield 4 * manifest.features * max(manifest.batch, manifest.classes)


def _optimizer_shape(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """What an optimizer's tensor must be shaped as: its parameter, or a scalar for Adam's count of steps."""
    if name == "adam.steps":
        return ()
    prefixes = ("momentum.", "adam.mean.", "adam.square.")
    return next((shapes.get(name.removeprefix(prefix)) for prefix in prefixes if name.startswith(prefix)), None)


def _check_members(manifest: Manifest, members: Mapping[str, bytes], path: object) -> None:
    for name, expected in manifest.members.items():
        if name not in members:
            raise BundleError(f"{path}: {name} is missing", expected=f"sha256 {expected[:12]}…", got="no such member")
        actual = hashlib.sha256(members[name]).hexdigest()
        if actual != expected:
            raise BundleError(
                f"{path}: {name} was changed",
                expected=f"sha256 {expected[:12]}…",
                got=f"{actual[:12]}…",
                hint="copying the bundle again",
            )
    of_cut = ("train_step.onnx", "trunk.onnx", "tail.onnx") if manifest.cut else ()
    of_micro = ("train_step.onnx", *_MICRO) if manifest.micro_batch else ()
    for name in ("features.onnx", "params.safetensors", *of_cut, *of_micro):
        if name not in manifest.members:
            raise BundleError(
                f"{path}: {name} is missing", expected="it in manifest.json's members", got="no such entry"
            )
    for name in members:
        if name not in manifest.members and name not in ("manifest.json", "manifest.sig"):
            raise BundleError(f"{path}: unexpected member", expected="the members of manifest.json", got=name)


def _load_params(raw: bytes, path: object) -> dict[str, NDArray[np.float32]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(raw)
    except (SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"{path}: params.safetensors", expected="safetensors", got=error) from None


def _check_params(manifest: Manifest, params: Mapping[str, NDArray[np.float32]], path: object) -> None:
    stored = {t.name: t.shape for t in manifest.state if t.role != "optimizer"}
    if set(stored) != set(params):
        odd = sorted(set(stored) ^ set(params))[0]
        raise BundleError(
            f"{path}: params.safetensors", expected="exactly the manifest's tensors", got=f"a difference at {odd}"
        )
    trains = method(manifest.method).trains
    for name, shape in stored.items():
        value = params[name]
        is_half = value.dtype == np.float16 and not trains
        if value.shape != shape or not (value.dtype == np.float32 or is_half):
            raise BundleError(f"{path}: {name}", expected=f"float32 {shape}", got=f"{value.dtype} {value.shape}")
        if not np.isfinite(value).all():
            raise BundleError(f"{path}: {name}", expected="finite weights", got="NaN or infinity")


def _check_graphs(manifest: Manifest, members: Mapping[str, bytes], path: object) -> None:
    """Check that a graph reads nothing outside but the backbone's weights, which a device supplies to the session."""
    places = weight_places(members["params.safetensors"])
    backbone = {name: places[name] for name in manifest.weights}
    for name, allowed in {"features.onnx": backbone, "trunk.onnx": backbone, "tail.onnx": backbone}.items():
        if name in members:
            check_graph(members[name], f"{path}: {name}", allowed)
    for name in members:
        if name in ("train_step.onnx", *_MICRO) or _FORM.fullmatch(name):
            check_graph(members[name], f"{path}: {name}", {})


def _forms(manifest: Manifest) -> dict[str, str]:
    """Names of the further forms of the training step, and their members."""
    matches = ((_FORM.fullmatch(name), name) for name in manifest.members if manifest.trainable)
    return {match[1]: name for match, name in matches if match}


def _verify(members: Mapping[str, bytes], public_keys: Collection[bytes], path: object) -> None:
    ed25519.library("checking a signature")
    expected = "an Ed25519 signature of the trusted key"
    if "manifest.sig" not in members:
        raise BundleError(f"{path}: manifest.sig is missing", expected=expected, got="an unsigned bundle")
    signed_bytes, signature = members["manifest.json"], members["manifest.sig"]
    if not any(ed25519.holds(key, signature, signed_bytes) for key in public_keys):
        raise BundleError(f"{path}: manifest.sig", expected=expected, got="another signature")
