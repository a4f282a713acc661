"""Which leader a device heeds."""

from __future__ import annotations

from protofleet.edge_client.rounds.leader_epochs import OUTLIVES_S, Epochs

RUN, OTHER = b"run1", b"run2"


def test_a_leader_that_was_followed_by_another_is_not_heeded_while_that_one_speaks() -> None:
    epochs = Epochs()
    assert [epochs.counts(RUN, epoch, 0.0) for epoch in (0, 3, 3, 2, 0, 4, 3)] == [
        True, True, True, False, False, True, False
    ]  # fmt: skip
    assert epochs.counts(OTHER, 1, 0.0)  # another run has leaders of its own


def test_a_forged_epoch_silences_nobody_for_good() -> None:
    epochs = Epochs()
    assert epochs.counts(RUN, 2**32 - 1, 0.0)
    assert not epochs.counts(RUN, 3, OUTLIVES_S - 1.0)
    assert epochs.counts(RUN, 3, OUTLIVES_S + 1.0)
    assert not epochs.counts(RUN, 2, OUTLIVES_S + 2.0)


def test_no_number_of_runs_fills_it() -> None:
    epochs = Epochs()
    for number in range(100):
        assert epochs.counts(number.to_bytes(4, "big"), 1, 0.0)
    assert len(epochs._newest) == 4
