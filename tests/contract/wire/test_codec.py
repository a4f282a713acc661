"""The wire: every message comes back as it was, its bytes are fixed within a version, little is spent on the way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import cbor2
import numpy as np
import pytest
from contract_samples import (
    ENCODINGS,
    announcements,
    chunks,
    enrolments,
    messages,
    pieces,
    readable_messages,
    receipts,
    requests,
    signed_messages,
    statuses,
)
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.errors import WireError
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, GlobalPart, Offer, Status
from protofleet.contract.wire.sampling import in_stage, sampled

GOLDEN = Path(__file__).parents[2] / "golden" / "wire_v2.json"
DTYPES = {"f64": np.float64, "f32": np.float32, "f16": np.float16}


def expected_rows(rows, encoding):
    """What a tensor (K, D) must come back as: the same number in that float type, or within half a step for int8."""
    if encoding in DTYPES:
        return rows.astype(DTYPES[encoding]), 0.0
    steps = np.abs(rows).max(axis=-1, keepdims=True, initial=0.0) / (127 if encoding == "int8" else 2**31 - 1)
    return rows, steps * 0.5001 + 1e-30


def assert_rows(got, sent, encoding):
    expected, tolerance = expected_rows(np.atleast_2d(sent), encoding)
    assert np.atleast_2d(got).shape == expected.shape
    assert (np.abs(np.atleast_2d(got).astype(np.float64) - expected.astype(np.float64)) <= tolerance).all()


@given(message=st.one_of(announcements, chunks(), receipts, statuses, requests, pieces, enrolments, signed_messages))
def test_a_message_without_tensors_comes_back_equal(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(message=messages)
def test_every_message_comes_back_in_every_encoding(encoding, message):
    back = decode(encode(message, encoding))
    assert type(back) is type(message)
    for name in message.__dataclass_fields__:
        sent, got = getattr(message, name), getattr(back, name)
        if isinstance(sent, ClassRows):
            np.testing.assert_array_equal(got.classes, sent.classes)
            assert_rows(got.rows, sent.rows, encoding)
        elif name == "triangle" and sent is not None:
            assert_rows(got, sent, encoding)
        elif name == "further":
            for one, other in zip(got, sent, strict=True):
                assert_rows(one, other, encoding)
        elif isinstance(sent, np.ndarray):
            np.testing.assert_array_equal(got, sent)
        else:
            assert got == sent


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(message=messages)
def test_a_message_has_one_encoding_and_decoding_then_encoding_gives_it_again(encoding, message):
    payload = encode(message, encoding)
    assert encode(message, encoding) == payload
    if encoding in DTYPES:  # quantising twice may move a last step
        assert encode(decode(payload), encoding) == payload


@given(message=messages)
def test_the_encoding_is_deterministic_cbor(message):
    payload = encode(message)
    assert cbor2.dumps(cbor2.loads(payload), canonical=True) == payload
    assert list(cbor2.loads(payload)) == sorted(cbor2.loads(payload))


@pytest.mark.parametrize("name", readable_messages())
def test_the_golden_bytes_of_wire_version_2_have_not_changed(name):
    frozen = json.loads(GOLDEN.read_text())["messages"][name]["bytes"]
    message = readable_messages()[name]
    assert {encoding: encode(message, encoding).hex() for encoding in frozen} == frozen
    for encoding, payload in frozen.items():
        assert encode(decode(bytes.fromhex(payload)), encoding).hex() == payload


def test_every_message_type_has_golden_bytes():
    golden = json.loads(GOLDEN.read_text())
    assert set(golden["messages"]) == set(readable_messages())
    types = {cbor2.loads(bytes.fromhex(b))[0] for m in golden["messages"].values() for b in m["bytes"].values()}
    assert types == set(range(1, 14))


def test_the_golden_samplings_are_ours_and_what_the_words_say():
    for row in json.loads(GOLDEN.read_text())["sampling"]:
        digest = hashlib.sha256(f"{row['device']}|{row['round']}|{row['seed']}".encode("ascii")).digest()
        assert digest[:8].hex() == row["first_8_bytes"]
        assert int(row["first_8_bytes"], 16) / 2**64 == row["number"]
        for fraction in (0.01, row["number"], np.nextafter(row["number"], 1), 0.5, 1.0):
            assert sampled(row["device"], row["round"], row["seed"], fraction) == (row["number"] < fraction)
        assert row["sampled_at_half"] == (row["number"] < 0.5)


def test_the_golden_stages_are_ours_and_what_the_words_say():
    for row in json.loads(GOLDEN.read_text())["stages"]:
        sha256 = bytes.fromhex(row["sha256"])
        seed = int.from_bytes(sha256[:4], "big")
        digest = hashlib.sha256(f"{row['device']}|{row['version']}|{seed}".encode("ascii")).digest()
        assert int.from_bytes(digest[:8], "big") / 2**64 == row["number"]
        for fraction in (0.01, row["number"], np.nextafter(row["number"], 1), 0.5, 1.0):
            assert in_stage(Offer(sha256, row["version"], 1, fraction), row["device"]) == (row["number"] < fraction)
        assert row["in_the_first_tenth"] == (row["number"] < 0.1)


@pytest.mark.parametrize("kind", [ClassMeans, FeatureGram])
@pytest.mark.parametrize("encoding", ["f64", "f32"])
def test_a_statistic_survives_the_journey(kind, encoding):
    rng = np.random.default_rng(1)
    features, labels = rng.standard_normal((60, 5)), rng.integers(0, 3, 60) * 2  # classes 1, 3 and 5 are absent
    sent = kind.of(features, labels, 6)
    contribution = Contribution.of(sent, run=b"run1", round=1, method="m", bundle=bytes(32))
    got = decode(encode(contribution, encoding)).statistic(kind, 6, 5)
    assert isinstance(got, kind)
    tolerance = 1e-14 if encoding == "f64" else 2e-7
    for one, other in zip(got.arrays(), sent.arrays(), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(got.counts, sent.counts)


@pytest.mark.parametrize(("classes", "width"), [(5, 5), (6, 4)])
def test_a_statistic_of_another_fleet_is_refused(classes, width):
    sent = ClassMeans.of(np.ones((6, 5)), np.arange(6), 6)
    contribution = Contribution.of(sent, run=b"run1", round=1, method="m", bundle=bytes(32))
    with pytest.raises(WireError, match=f"classes below {classes} and width {width}"):
        contribution.statistic(ClassMeans, classes, width)


@pytest.mark.parametrize("encoding", ["f64", "f32", "f16"])
@pytest.mark.parametrize("round_number", [1, 5, 23])
def test_a_prototype_message_costs_at_most_60_bytes_over_its_raw_tensors(encoding, round_number):
    classes, width = 10, 128  # the demo's fleet, and a device that has every class of it
    labels = np.arange(1200) % classes
    means = ClassMeans.of(np.random.default_rng(0).standard_normal((1200, width)), labels, classes)
    message = Contribution.of(means, run=b"run1", round=round_number, method="fedproto", bundle=bytes(32))
    raw_bytes = classes * width * np.dtype(DTYPES[encoding]).itemsize + classes * 1  # means, and counts below 256
    overhead_bytes = len(encode(message, encoding)) - raw_bytes
    print(f"{encoding}, round {round_number}: {overhead_bytes} bytes around {raw_bytes} bytes of means and counts")
    assert overhead_bytes <= 60


def test_int8_costs_a_quarter_of_f32_and_its_error_stays_within_half_a_step():
    rows = np.random.default_rng(2).standard_normal((8, 256))
    part = GlobalPart(b"run1", 1, 1, 0, 1, "prototypes", ClassRows(np.arange(8, dtype=np.uint16), rows))
    assert len(encode(part, "int8")) < 0.28 * len(encode(part, "f32"))
    assert_rows(decode(encode(part, "int8")).body.rows, rows, "int8")


@pytest.mark.parametrize("rows", [[[70_000.0]], [[-1e6]]])
def test_a_number_that_does_not_fit_float16_is_refused_not_sent_as_infinity(rows):
    part = GlobalPart(b"run1", 1, 1, 0, 1, "head", ClassRows(np.zeros(1, np.uint16), np.array(rows)))
    with pytest.raises(WireError, match="try a wider encoding"):
        encode(part, "f16")


def test_a_transposed_tensor_is_sent_as_its_values_not_as_its_memory():
    rows = np.arange(12.0).reshape(4, 3).T
    part = GlobalPart(b"run1", 1, 1, 0, 1, "head", ClassRows(np.arange(3, dtype=np.uint16), rows))
    np.testing.assert_array_equal(decode(encode(part)).body.rows, rows)


def test_a_metric_that_is_a_numpy_float_travels():
    status = Status(True, bytes(8), 1, metrics={"latency_ms": np.float64(1.5)})
    assert decode(encode(status)).metrics == {"latency_ms": 1.5}


def test_an_announcement_names_each_bundle_once():
    with pytest.raises(WireError, match="different ones, got one twice"):
        Announcement(b"run1", 1, "open", "fedproto", bytes(32), others=(bytes(32),))
