"""The figures of a device's accuracy through a status message: the same on the other side, or nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.accuracy import COUNTS, SHARES, Accuracy, read_accuracy
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import MAX_ENTRIES, Status

RUN = b"\xff\x00run"[:4]
share = st.floats(0, 1)
figures = {name: st.none() | share for name in SHARES if name != "all_classes"}
figures |= {name: st.none() | st.integers(0, 1 if name == "own_samples" else 65_535) for name in COUNTS}
accuracies = st.builds(Accuracy, st.integers(1, 1000), share, **figures)


@given(accuracies, st.integers(1, 2**32 - 1), st.binary(min_size=4, max_size=4))
def test_what_was_measured_is_what_is_read(found: Accuracy, round: int, run: bytes) -> None:
    sent = decode(encode(Status(True, b"instance", 1, metrics={"rss_bytes": 1.0, **found.metrics(run, round)})))
    assert isinstance(sent, Status)
    assert len(sent.metrics) <= MAX_ENTRIES
    assert read_accuracy(sent.metrics, run, max_samples=1000) == (round, found)
    assert read_accuracy(sent.metrics, bytes(b ^ 255 for b in run), max_samples=1000) is None  # of another run


@pytest.mark.parametrize(
    "changed",
    [
        *({f"accuracy_{name}": value} for name in SHARES for value in (-1e-9, 1.0000001, 1e300)),
        *({f"accuracy_{name}": value} for name in ("samples", "round") for value in (0.0, -1.0, 1.5, 1e12)),
        {"accuracy_samples": 1001.0},
        *({f"accuracy_{name}": value} for name in COUNTS for value in (-1.0, 0.5, 1e300)),
        {"accuracy_own_samples": 11.0},  # of 10
        {"accuracy_classes": 65_536.0},
        *({f"accuracy_{name}": None} for name in ("run", "round", "samples", "all_classes")),
    ],
)
def test_what_cannot_be_true_is_nothing(changed: dict[str, float | None]) -> None:
    metrics = Accuracy(10, 0.5, 0.5, shipped=0.5, alone=0.5).metrics(RUN, 3)
    assert read_accuracy(metrics, RUN, max_samples=1000) is not None
    wrong = {name: value for name, value in (metrics | changed).items() if value is not None}
    assert read_accuracy(wrong, RUN, max_samples=1000) is None


@given(
    st.dictionaries(
        st.sampled_from([f"accuracy_{n}" for n in ("run", "round", "samples", *SHARES, *COUNTS)]), st.floats()
    )
)
def test_whatever_is_said_is_read_in_its_bounds_or_not_at_all(metrics: dict[str, float]) -> None:
    metrics["accuracy_run"] = float(int.from_bytes(RUN, "big"))
    found = read_accuracy(metrics, RUN, max_samples=1000)
    if found is not None:
        round, told = found
        assert 1 <= round < 2**32
        assert 1 <= told.samples <= 1000
        shares = [getattr(told, name) for name in SHARES]
        assert all(value is None or (0 <= value <= 1 and not math.isnan(value)) for value in shares)
