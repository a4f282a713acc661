"""`protofleet inspect`: a bundle and a message as a person, or a program, wants to read them."""

from __future__ import annotations

import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from commands import one_error_line, run, run_process
from contract_samples import ENCODINGS, readable_messages, small_parts
from dp_accounting import get_epsilon_gaussian

from protofleet import cli
from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.methods import METHODS
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.fields import table_of
from protofleet.contract.wire.messages import Signed
from protofleet.edge_client.privacy import accountant
from protofleet.export.cli import _parts_note
from tests.contract.wire.test_hostile import VALID, mutate


@pytest.fixture
def bundle(tmp_path):
    write_bundle(tmp_path / "small.bundle", **small_parts())
    return tmp_path / "small.bundle"


def facts(file) -> dict:
    done = run("inspect", str(file), "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_bundle_is_shown_with_all_that_a_person_asks_of_it(bundle):
    text = run("inspect", str(bundle)).stdout
    whole = read_bundle(bundle)
    for expected in (
        whole.sha256.hex(),
        "small_cnn",
        "FedProto (Tan et al., AAAI 2022), eq. 1, 2, 4, 5, 6",
        "random initialisation, seed 7",
        "4 x 4 x 1",
        "cat, dog, bird",
        "changed from 0.01",  # lr was set to 0.05
        "12 trained, 0 frozen, 2 running statistics, 6 optimizer state",
        whole.manifest.members["features.onnx"][:16],
        "fedavg",
    ):
        assert expected in text


def test_what_one_release_of_noise_costs_is_told(tmp_path, monkeypatch, capsys):
    parts, noised = small_parts(trainable=False), tmp_path / "n.bundle"
    hyper = METHODS["ncm-dp"].resolve({"noise_multiplier": 1.5})
    state = tuple(tensor for tensor in parts["manifest"].state if tensor.name.startswith("backbone."))
    changed = {"method": "ncm-dp", "head": "none", "hyper": hyper, "state": state}
    parts["manifest"] = msgspec.structs.replace(parts["manifest"], **changed)
    write_bundle(noised, **parts | {"params": {tensor.name: parts["params"][tensor.name] for tensor in state}})
    found = facts(noised)["release"]
    assert found["delta"] == 1e-5
    assert found["add-remove"] == pytest.approx(get_epsilon_gaussian(1.5, 1e-5), rel=1e-4)
    assert found["replace"] > found["add-remove"]
    monkeypatch.setattr(accountant, "_epsilons", lambda delta, costs: [2.0 for _ in costs])
    assert cli.main(["inspect", str(noised)]) == 0
    assert "ε = 2 for one photo more or fewer, ε = 2 for one replaced" in " ".join(capsys.readouterr().out.split())


def test_the_json_holds_the_same_facts_exactly(bundle):
    got, whole = facts(bundle), read_bundle(bundle)
    assert (got["schema"], got["kind"], got["sha256"]) == ("protofleet.inspect/1", "bundle", whole.sha256.hex())
    assert got["bytes"] == bundle.stat().st_size
    assert got["hyper"]["lr"] == {
        "value": 0.05,
        "default": 0.01,
        "changed": True,
        "source": "FedProto (Tan et al., AAAI 2022), setting",
    }
    assert not got["hyper"]["momentum"]["changed"]
    assert got["release"] is None
    assert got["parameters"] == {"param": 12, "buffer": 2, "frozen": 0, "trunk": 0, "optimizer": 6}
    assert {m["name"]: m["sha256"] for m in got["members"]} == whole.manifest.members
    assert sum(m["bytes"] for m in got["members"]) < got["bytes"]


def test_the_bytes_up_are_those_of_a_real_contribution_and_fedavgs_of_all_parameters(bundle):
    from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
    from protofleet.contract.wire.messages import Contribution

    up = facts(bundle)["uplink_bytes_per_round"]
    features, labels = np.random.default_rng(0).random((3000, 2)), np.arange(3000) % 3
    for kind, method, encoding, extractor in (
        (ClassMeans, "fedproto", "f32", b""),
        (FeatureGram, "ffc", "f64", bytes(32)),
    ):
        origin = {"run": bytes(4), "round": 1, "bundle": bytes(32), "extractor": extractor}
        message = Contribution.of(kind.of(features, labels, 3), method=method, **origin)
        assert up[method] == len(encode(message, encoding))
    assert up["fedavg"] == 4 * (12 + 2)


def test_a_signed_bundle_says_so(tmp_path):
    write_bundle(tmp_path / "s.bundle", **small_parts(), private_key=b"k" * 32)
    assert facts(tmp_path / "s.bundle")["signed"] is True
    assert "signed" in run("inspect", str(tmp_path / "s.bundle")).stdout


@pytest.mark.parametrize("name", readable_messages())
def test_a_message_is_shown_field_by_field(tmp_path, name):
    message = readable_messages()[name]
    (tmp_path / "message.cbor").write_bytes(encode(message))
    got = facts(tmp_path / "message.cbor")
    assert got["bytes"] == len(encode(message))
    if isinstance(message, Signed):  # what is inside is shown, and whose it is said to be
        assert got["fields"]["signed_with"] == message.key_id.hex()
        message = decode(message.payload)
    assert (got["kind"], got["type"]) == ("message", type(message).__name__)
    if hasattr(message, "body"):
        whole = message.body.rows.dtype.kind == "i"  # a gateway's sums are numbers of units
        rows = message.body.rows if whole else message.body.rows.astype(np.float32)
        numbers, dtype = message.body.classes, "int64" if whole else "float32"
        low, high = (float(rows.min()), float(rows.max())) if rows.size else (None, None)
        assert got["fields"]["rows"] == {"shape": list(rows.shape), "dtype": dtype, "min": low, "max": high}
        assert got["fields"]["classes"]["max"] == (int(numbers.max()) if numbers.size else None)
    if getattr(message, "further", ()):
        assert [each["shape"] for each in got["fields"]["further"]] == [list(each.shape) for each in message.further]
    for field in ("run", "round", "method", "status", "profile"):
        if hasattr(message, field):
            value = getattr(message, field)
            assert got["fields"][field] == (value.hex() if isinstance(value, bytes) else value)
    for field in ("offer", "helper", "rival"):  # maps within the message
        if part := getattr(message, field, None):
            assert set(got["fields"][field]) == {slot.name for slot in table_of(type(part)).slots}
    shown = run("inspect", str(tmp_path / "message.cbor"))
    assert shown.returncode == 0
    assert type(message).__name__ in shown.stdout


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_can_be_inspected(tmp_path, encoding):
    (tmp_path / "m").write_bytes(encode(readable_messages()["contribution-gram"], encoding))
    assert facts(tmp_path / "m")["fields"]["triangle"]["shape"] == [3]


@pytest.mark.parametrize("kind", ["absent", "directory", "text", "empty", "truncated", "edited", "cut message"])
def test_a_wrong_file_is_one_line_and_exit_2(tmp_path, bundle, kind):
    file = tmp_path / "file"
    blob = bundle.read_bytes()
    contents = {
        "text": b"hello, world",
        "empty": b"",
        "truncated": blob[:-30],
        "edited": blob.replace(b"a features graph", b"a features grape"),
        "cut message": encode(readable_messages()["contribution-means"])[:-3],
    }
    if kind == "directory":
        file.mkdir()
    elif kind in contents:
        file.write_bytes(contents[kind])
    done = run("inspect", str(file))
    assert done.returncode == 2
    assert "expected" in one_error_line(done)
    assert str(file) in one_error_line(done)
    assert done.stdout == ""


def test_text_in_a_bundle_cannot_style_or_move_the_terminal(tmp_path):
    import msgspec

    parts = small_parts()
    parts["manifest"] = msgspec.structs.replace(parts["manifest"], provenance="\x1b[31mred[/bold][link=x]\x07\r")
    write_bundle(tmp_path / "b.bundle", **parts)
    done = run("inspect", str(tmp_path / "b.bundle"))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "[/bold][link=x]" in done.stdout


def test_a_bundle_for_parts_of_a_batch_says_so_and_what_batch_normalisation_makes_of_it(tmp_path):
    parts = small_parts()
    whole = msgspec.structs.replace(parts["manifest"], micro_batch=1)
    write_bundle(tmp_path / "parts.bundle", **{**parts, "manifest": whole}, micro=(parts["train_step"],) * 2)
    text = " ".join(run("inspect", str(tmp_path / "parts.bundle")).stdout.split())
    assert f"B = {whole.batch}, or 1 at a time" in text
    assert "another step than that of a whole batch" in text
    assert facts(tmp_path / "parts.bundle")["micro_batch"] == 1
    unmoved = msgspec.structs.replace(whole, state=tuple(t for t in whole.state if t.role != "buffer"))
    assert [each.parts_note for each in (parts["manifest"], unmoved)] == ["", ""]
    assert "--norm group" in _parts_note(whole, None)
    assert _parts_note(whole, "pretrained") == whole.parts_note, "--norm is refused beside pretrained weights"


def test_inspecting_needs_neither_torch_nor_onnx(bundle):
    blocked = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('torch', 'onnx', 'onnxruntime', 'onnxscript'), name\n"
        "sys.meta_path.insert(0, Blocked())"
    )
    done = run_process("inspect", str(bundle), code=blocked)
    assert done.returncode == 0, done.stderr


# ── hostile files ──


def inspected(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """`inspect FILE` in this process: 0 and something shown, or 2 and one line."""
    code = cli.main(["inspect", str(file)])
    out, err = capsys.readouterr()
    if code == 0:
        assert out
        assert err == ""
    else:
        assert code == 2, err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert out == ""
    return out + err


def with_manifest(bundle: Path, changed: Callable[[dict], object], out: Path) -> Path:
    """The bundle with its manifest changed; the manifest holds the hashes, so none of them tells."""
    with zipfile.ZipFile(bundle) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    manifest = changed(manifest) or manifest
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (members | {"manifest.json": json.dumps(manifest).encode()}).items():
            archive.writestr(name, content)
    return out


@pytest.mark.parametrize("method", ["fedproto", "fedhkd", "ffc"])
@pytest.mark.parametrize(
    "changed",
    [
        {"features": 10**9},
        {"features": 65_535},
        {"features": 2**63 - 1},
        {"labels": [f"class {j}" for j in range(65_535)]},
        {"batch": 2**62},
        {"input_shape": [2**40, 2**40, 1]},
    ],
    ids=lambda changed: "-".join(f"{key}" for key in changed),
)
def test_a_crafted_width_allocates_nothing(bundle, tmp_path, capsys, changed, method):
    row = METHODS[method]
    hyper = row.resolve({})
    file = with_manifest(
        bundle, lambda m: m | {"method": method, "hyper": hyper, "head": row.heads[0]} | changed, tmp_path / "b.bundle"
    )
    tracemalloc.start()
    inspected(file, capsys)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300e6


ODD = [0, -1, 10**6, 2**31, 2**63 - 1, 2**64, 10**400, 1e308, "", "x" * 5000, "\x1b[2J", [], {}, None, True, [[]], [0]]


def test_a_bundle_with_an_odd_manifest_is_shown_or_refused_in_one_line(bundle, tmp_path, capsys):
    with zipfile.ZipFile(bundle) as archive:
        keys = list(json.loads(archive.read("manifest.json")))
    shown = 0
    for key in keys:
        for odd in ODD:
            text = inspected(with_manifest(bundle, lambda m, k=key, o=odd: m | {k: o}, tmp_path / "odd"), capsys)
            shown += not text.startswith("error: ")
            assert "\x1b" not in text
    for key in ("state", "labels", "mean", "std", "input_shape"):
        for odd in ODD:

            def change(m, key=key, odd=odd):
                m[key][0] = odd

            inspected(with_manifest(bundle, change, tmp_path / "odd"), capsys)
    assert shown > 10


def test_mutated_messages_are_shown_or_refused_in_one_line(tmp_path, capsys):
    rng, file, shown = random.Random(3), tmp_path / "m", 0
    for _ in range(400):
        file.write_bytes(mutate(rng.choice(VALID), rng))
        shown += not inspected(file, capsys).startswith("error: ")
    assert shown > 10


def test_mutated_bundles_are_shown_or_refused_in_one_line(bundle, tmp_path, capsys):
    rng, file, blob = random.Random(4), tmp_path / "m.bundle", bundle.read_bytes()
    for _ in range(400):
        file.write_bytes(mutate(blob, rng))
        inspected(file, capsys)
