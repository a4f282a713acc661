"""Shares: exact sums, words that tell nothing, numbers that are refused, and seeds that only their helper can read."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import StatisticError, UsageError, WireError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.privacy.blinding import (
    LARGEST,
    MOST_DEVICES,
    RANDOM_WORDS,
    SCALE_BITS,
    add_pad,
    blind,
    share_digest,
    share_words,
    statistic_of,
    words_of,
)
from protofleet.contract.privacy.sealing import (
    make_helper_key,
    read_helper_key,
    read_helper_public,
    round_terms,
    seal,
    unseal,
)
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.contract.wire.helper_messages import Opened, set_digest
from protofleet.contract.wire.messages import Announcement, HelperTerms, SealedSeed

CLASSES, WIDTH = 3, 4
WORD = st.integers(0, 2**64 - 1)
SEED = st.binary(min_size=32, max_size=32)


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def gram(seed: int, samples: int = 20) -> FeatureGram:
    rng = np.random.default_rng(seed)
    return FeatureGram.of(unit_rows(rng.normal(size=(samples, WIDTH))), rng.integers(0, CLASSES, samples), CLASSES)


def stream(seed: bytes, size: int) -> bytes:
    return Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(size))


# ── arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(rows=st.lists(st.tuples(st.lists(WORD, min_size=5, max_size=5), SEED), min_size=1, max_size=6))
def test_shares_and_pads_sum_exactly_to_the_words_whatever_these_are(rows):
    total, plain = np.zeros(5, np.uint64), [0] * 5
    for values, seed in rows:
        np.add(total, blind(words(*values), seed), out=total)
        add_pad(total, seed)
        plain = [(p + v) % 2**64 for p, v in zip(plain, values, strict=True)]  # Python's integers, the naive way
    assert total.tolist() == plain


@pytest.mark.parametrize("count", [1, 2, 8191, 8192, 8193, 20_000])
def test_a_pad_is_the_stream_of_chacha20_cut_in_words(count):
    seed = bytes(range(32))
    pad = np.zeros(count, np.uint64)
    add_pad(pad, seed)
    assert pad.astype("<u8").tobytes() == stream(seed, 8 * count)


def test_the_stream_is_that_of_rfc_8439():
    """Appendix A.1, test vectors 1 and 2: key and nonce zero, counters 0 and 1."""
    pad = np.zeros(16, np.uint64)
    add_pad(pad, bytes(32))
    told = pad.astype("<u8").tobytes()
    assert told[:16].hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert told[64:80].hex() == "9f07e7be5551387a98ba977c732d080d"


@given(seed=SEED)
@settings(max_examples=20)
def test_a_share_says_nothing_of_its_words(seed):
    """Of words that are all alike, any bit of the share is set about half of the time, and both shares are so."""
    share = blind(np.full(4096, 3 << SCALE_BITS, np.uint64), seed)
    pad = np.zeros(4096, np.uint64)
    add_pad(pad, seed)
    for side in (share, pad):
        bits = np.unpackbits(side.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)  # (64,)
        assert np.abs(bits - 0.5).max() < 6 * 0.5 / 64  # six standard deviations of 4,096 coins
        assert len(np.unique(side)) == 4096


def test_who_knows_the_seed_and_the_digest_cannot_try_what_a_device_has():
    """The helper knows both: a digest of nothing but the numbers would be that of the right guess alone."""
    seed, sent = bytes(range(32)), gram(1)
    one, other = (blind(words_of(sent), seed) for _ in range(2))
    assert share_digest(one) != share_digest(other)
    assert np.array_equal(one[:-RANDOM_WORDS], other[:-RANDOM_WORDS])
    for share in (one, other):
        add_pad(share, seed)
        assert statistic_of(FeatureGram, CLASSES, WIDTH, share).counts.tolist() == sent.counts.tolist()


@given(
    devices=st.lists(
        st.lists(st.floats(-LARGEST, LARGEST, exclude_min=True, exclude_max=True), min_size=6, max_size=6), max_size=5
    )
)
def test_a_sum_is_off_by_half_a_step_of_each_device_at_most(devices):
    kind, total = ClassMeans, np.zeros(share_words(ClassMeans, 2, 3), np.uint64)
    for number, values in enumerate(devices):
        rows = np.array(values).reshape(2, 3)
        made = words_of(kind(rows, np.array([number + 1, 2])))
        np.add(total, blind(made, bytes([number]) * 32), out=total)
        add_pad(total, bytes([number]) * 32)
    found = statistic_of(kind, 2, 3, total)
    expected = np.array(devices).reshape(-1, 2, 3).sum(axis=0)
    step = len(devices) * 2.0 ** -(SCALE_BITS + 1)
    rounding = 2.0**-52 * LARGEST * max(1, len(devices))  # of the float64 sums that it is compared with
    np.testing.assert_allclose(found.sums, expected if devices else 0, atol=step + rounding, rtol=0)
    assert found.counts.tolist() == ([sum(range(1, len(devices) + 1)), 2 * len(devices)] if devices else [0, 0])


@pytest.mark.parametrize("kind", [FeatureGram, UnitMeans])
def test_a_statistic_comes_back_whole_with_its_counts_and_absent_classes(kind):
    rng = np.random.default_rng(1)
    features, labels = unit_rows(rng.normal(size=(30, WIDTH))), rng.integers(0, 2, 30)  # nothing of class 2
    sent = kind.of(features, labels, CLASSES)
    made = words_of(sent)
    assert len(made) == share_words(kind, CLASSES, WIDTH)
    back = statistic_of(kind, CLASSES, WIDTH, made)
    assert back.counts.tolist() == sent.counts.tolist()
    for one, other in zip(back.arrays(), sent.arrays(), strict=True):
        assert np.abs(one - other).max() <= 2.0 ** -(SCALE_BITS + 1)


def test_the_most_devices_with_the_largest_numbers_do_not_wrap_and_one_more_might():
    largest = int(np.nextafter(LARGEST, 0) * 2**SCALE_BITS)
    assert MOST_DEVICES * largest < 2**63
    assert MOST_DEVICES * int(LARGEST * 2**SCALE_BITS) == 2**63


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, np.inf, np.nan, 1e300])
def test_a_number_too_large_to_be_summed_is_refused_in_one_line(value):
    made = object.__new__(ClassMeans)  # past its own checks, which know NaN
    object.__setattr__(made, "sums", np.array([[1.0, value]]))
    object.__setattr__(made, "counts", np.array([1]))
    with pytest.raises(StatisticError, match="numbers below 131,072"):
        words_of(made)


def test_counts_that_are_no_whole_numbers_show_that_some_device_lied():
    total = words_of(gram(1))
    total[-1 - RANDOM_WORDS] += np.uint64(1)
    with pytest.raises(StatisticError, match="some device lied"):
        statistic_of(FeatureGram, CLASSES, WIDTH, total)
    for other in (total[1:], np.append(total, np.uint64(0))):
        with pytest.raises(StatisticError, match="words"):
            statistic_of(FeatureGram, CLASSES, WIDTH, other)


# ── sealing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    made = []
    for name in ("one", "two"):
        make_helper_key(folder / name)
        made.append((read_helper_key(folder / name), read_helper_public(folder / f"{name}.pub", "--helper")))
    assert (folder / "one").stat().st_mode & 0o777 == 0o600
    return made


BOUND = SealedSeed(b"run1", 3, "ffc", 9, hashlib.sha256(b"share").digest(), 10, bytes(32), bytes(80))
CHANGED = {
    "run": b"run2",
    "round": 4,
    "method": "ncm",
    "words": 10,
    "share": bytes(32),
    "least": 2,
    "terms": bytes([1]) * 32,
}


def test_a_seed_opens_for_its_helper_and_for_what_it_was_sealed_for_alone(keys):
    (mine, public), (other, _) = keys
    assert mine.public == public
    seed = bytes(range(32))
    sealed = dataclasses.replace(BOUND, sealed=seal(seed, public.seal, "pets", "cam-1", BOUND))
    assert unseal(mine, "pets", "cam-1", sealed) == seed
    assert seed not in sealed.sealed
    wrong = [(other, "pets", "cam-1", sealed), (mine, "pets2", "cam-1", sealed), (mine, "pets", "cam-2", sealed)]
    wrong += [(mine, "pets", "cam-1", dataclasses.replace(sealed, **{name: to})) for name, to in CHANGED.items()]
    assert {f.name for f in dataclasses.fields(SealedSeed)} == {*CHANGED, "sealed"}
    for bit in (0, 255, 300, 639):
        flipped = bytearray(sealed.sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        wrong.append((mine, "pets", "cam-1", dataclasses.replace(sealed, sealed=bytes(flipped))))
    for each in wrong:
        with pytest.raises(WireError, match="for this helper and this share"):
            unseal(*each)


def test_what_was_sealed_before_still_opens(tmp_path):
    """Wire 2 fixes what is made of a key file, and what stands beside the seed."""
    (tmp_path / "key").write_text(bytes(range(32)).hex() + "\n")
    key = read_helper_key(tmp_path / "key")
    assert key.public.sign.hex() == "71dbb69f472c3645e4ab71b5008bbfeed7854a8d9e5252beb663e056edab699d"
    sealed = (
        "87f9fba38efbf191a16a9a4727c2ce6b58e913c133568c115352f6f4a3778176c5d57f5d09f5a3c9633bfbb5255828a3"
        "05095406898ff80cd93c48230ca1e910d0e3d3d49d087b9726e528d17caa94cc"
    )
    bound = dataclasses.replace(BOUND, sealed=bytes.fromhex(sealed))
    assert unseal(key, "pets", "cam-1", bound) == bytes(range(32))


def test_a_seed_has_32_bytes_and_a_sum_two_devices_or_more():
    for size in (0, 16, 31, 33):
        with pytest.raises(StatisticError, match="a seed of 32 bytes"):
            blind(words(1), bytes(size))
    with pytest.raises(WireError, match="2 to 4294967295 devices"):
        HelperTerms(bytes(32), 1, 36)
    with pytest.raises(WireError, match="2 to 4294967295 devices"):
        dataclasses.replace(BOUND, least=1)


def test_an_answer_has_words_where_it_is_open_and_none_where_it_is_not():
    key = (b"run1", 3, "ffc", bytes(32), 0, 1)
    for status, told in (("opened", words()), ("refused", words(1))):
        with pytest.raises(WireError, match="some of a sum that is open"):
            Opened(*key, status, told)


def test_no_two_sets_have_one_digest():
    assert set_digest({"a": b"bc"}) != set_digest({"ab": b"c"})
    assert set_digest({"a": b"1", "b": b"2"}) == set_digest({"b": b"2", "a": b"1"})


def test_what_a_device_is_told_to_sum_is_in_the_terms_and_nothing_else_is():
    helper = HelperTerms(bytes(32), 10, 36)
    plain = Announcement(b"run1", 3, "open", "ffc", bytes(32), extractor=bytes(32), helper=helper)
    told = {"method": "ncm", "extractor": bytes([1]) * 32, "class_lists": (b"12345678",), "withheld": (1,)}
    told |= {"min_samples": 2, "helper": HelperTerms(bytes(32), 10, 35)}
    for name, value in told.items():
        assert round_terms(dataclasses.replace(plain, **{name: value})) != round_terms(plain), name
    same = {"round": 4, "phase": "closed", "seed": 9, "deadline_s": 3.0, "global_version": 2, "limit_bytes": 2048}
    for name, value in same.items():
        assert round_terms(dataclasses.replace(plain, **{name: value})) == round_terms(plain), name


def test_a_key_file_is_never_overwritten_and_a_wrong_one_is_one_line(tmp_path):
    make_helper_key(tmp_path / "key")
    with pytest.raises(UsageError, match="File exists"):
        make_helper_key(tmp_path / "key")
    with pytest.raises(UsageError, match="32 bytes in hex"):
        read_helper_key(tmp_path / "key.pub")
    with pytest.raises(UsageError, match="64 bytes in hex"):
        read_helper_public(tmp_path / "key", "--helper")
    with pytest.raises(UsageError, match="No such file"):
        read_helper_public(tmp_path / "none", "--helper")
    (tmp_path / "zeros").write_text("00" * 32)
    with pytest.raises(UsageError, match="got 32 bytes, all of them zero, which everybody has"):
        read_helper_key(tmp_path / "zeros")
    public = (tmp_path / "key.pub").read_text().strip()
    prime = (2**255 - 19).to_bytes(32, "little").hex()
    for weak in (bytes(32).hex(), f"01{bytes(31).hex()}", prime):
        for pair in (weak + public[64:], public[:64] + weak):
            (tmp_path / "weak.pub").write_text(pair)
            with pytest.raises(UsageError, match="got a point for which everybody has the other half"):
                read_helper_public(tmp_path / "weak.pub", "--helper-key")


def test_the_digest_of_a_share_is_that_of_its_bytes():
    assert share_digest(words(1, 2)) == hashlib.sha256(bytes([1, *[0] * 7, 2, *[0] * 7])).digest()
