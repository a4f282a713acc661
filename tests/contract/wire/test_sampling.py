"""Stateless sampling: the same answer everywhere, and as many devices as the fraction says."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.wire.sampling import place, sampled

# Frozen for other implementations: sha256("device|round|seed"), first 8 bytes big-endian over 2^64.
SHARES = {("pi-1", 1, 0): 0.79241, ("pi-1", 2, 0): 0.99599, ("pi-2", 1, 0): 0.88735, ("a", 4_294_967_295, 42): 0.39113}


@pytest.mark.parametrize(("key", "share"), SHARES.items())
def test_a_fixed_device_round_and_seed_always_draws_the_same_number(key, share):
    assert sampled(*key, share + 1e-5)
    assert not sampled(*key, share - 1e-5)


@given(
    device=st.text("abc-019", min_size=1),
    round_number=st.integers(1, 2**32 - 1),
    seed=st.integers(0, 2**32 - 1),
    fraction=st.floats(0, 1),
)
def test_it_is_the_hash_that_the_specification_says(device, round_number, seed, fraction):
    number = int(hashlib.sha256(f"{device}|{round_number}|{seed}".encode()).hexdigest()[:16], 16)
    assert sampled(device, round_number, seed, fraction) == (number < fraction * 2**64)


@given(device=st.text("abc", min_size=1), round_number=st.integers(1, 1000))
def test_a_fraction_of_one_takes_everyone(device, round_number):
    assert sampled(device, round_number, 7, 1.0)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_share_of_a_fleet_and_of_a_devices_rounds_is_the_fraction(fraction):
    devices = sum(sampled(f"device-{n}", 3, 11, fraction) for n in range(10_000)) / 10_000
    rounds = sum(sampled("device-1", n, 11, fraction) for n in range(1, 10_001)) / 10_000
    assert devices == pytest.approx(fraction, abs=0.02)  # four standard deviations
    assert rounds == pytest.approx(fraction, abs=0.02)


def test_another_seed_draws_other_devices():
    draws = [tuple(sampled(f"d-{n}", 1, seed, 0.5) for n in range(64)) for seed in range(20)]
    assert len(set(draws)) == 20


def test_a_place_in_a_roll_out_is_drawn_with_the_first_four_bytes_of_the_bundles_hash():
    """Frozen as above: devices and aggregator have to agree on it, whatever their releases."""
    number = int(hashlib.sha256(b"pi-1|7|66051").hexdigest()[:16], 16)  # 0x00010203
    assert place("pi-1", 7, bytes(range(32))) == number / 2**64
