"""The helper: which sets it opens, what it refuses by name, and that nothing finer than k devices ever comes of it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from blinded_samples import (
    FLEET,
    KEY,
    METHOD,
    PUBLIC,
    RUN,
    WORDS,
    ask,
    contributed,
    enrolled,
    helper,
    ledger,
    names,
    opening,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protofleet.aggregator.helper import opening as opening_module
from protofleet.aggregator.helper.ledger import KEPT_SUMS, Ledger, Share
from protofleet.aggregator.helper.opening import Answer, Helper
from protofleet.aggregator.helper.process import HelperServer
from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.errors import InUseError, UsageError, WireError
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.mqtt.link import Address, Received
from protofleet.contract.privacy.openable_sets import allowed, breach, refined, smaller
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import Signed
from protofleet.contract.wire.helper_messages import MAX_REFUSED, set_digest

VALUES = {device: np.arange(WORDS, dtype=np.uint64) + np.uint64(10 * n) for n, device in enumerate(names(40))}


def gathered(devices, *, round=1):
    """Shares and signed seeds of these devices, by name."""
    made = {device: contributed(device, VALUES[device], round=round) for device in devices}
    return {d: share for d, (share, _) in made.items()}, {d: seed for d, (_, seed) in made.items()}


# ── which sets ──────────────────────────────────────────────────────────────────────────────────────────────────────

DEVICES = names(12)
_NUMBERS = itertools.count()
HEX = "ab" * 32


def smallest_shown(opened: list[frozenset[str]]) -> int:
    """The fewest devices in any sum or difference of opened sets, with factors -2 to 2: by trying them all."""
    fewest = len(DEVICES)
    rows = np.array([[device in each for device in DEVICES] for each in opened])  # (sets, devices)
    for factors in itertools.product(range(-2, 3), repeat=len(opened)):
        support = int(np.count_nonzero(np.array(factors) @ rows))
        fewest = min(fewest, support) if support else fewest
    return fewest


@settings(max_examples=80, deadline=None)
@given(sets=st.lists(st.frozensets(st.sampled_from(DEVICES), min_size=1), max_size=14), least=st.integers(2, 5))
def test_no_sums_or_differences_of_opened_sets_are_over_fewer_than_k_devices(sets, least):
    blocks, opened = {}, []
    for chosen in sets:
        if not breach(blocks, chosen, least):
            blocks = refined(blocks, chosen)
            opened.append(chosen)
    assert smallest_shown(list(dict.fromkeys(opened))[:5]) >= least
    for one, other in itertools.combinations(opened, 2):
        assert one == other or len(one ^ other) >= least


@settings(max_examples=80, deadline=None)
@given(
    sets=st.lists(st.frozensets(st.sampled_from(DEVICES), min_size=1), max_size=8),
    present=st.frozensets(st.sampled_from(DEVICES)),
    least=st.integers(2, 4),
    most=st.integers(4, 12),
)
def test_what_is_allowed_may_be_opened_and_nothing_larger_of_those_present_may(sets, present, least, most):
    blocks = {}
    for chosen in sets:
        able = allowed(blocks, chosen, least, len(DEVICES))
        assert able <= chosen
        if able:
            assert not breach(blocks, able, least)
            blocks = refined(blocks, able)
    found = allowed(blocks, present, least, len(DEVICES))
    for size in range(len(found) + 1, len(present) + 1):
        assert all(breach(blocks, each, least) for each in itertools.combinations(sorted(present), size))
    assert len(allowed(blocks, present, least, most)) <= most


def test_a_fleet_in_which_some_sleep_is_opened_in_blocks():
    fleet = names(30)
    blocks = refined({}, fleet)
    assert breach(blocks, fleet[1:], 5)  # all but one: that one would be shown
    assert len(allowed(blocks, fleet[1:], 5, 1000)) == 25
    blocks = refined(blocks, fleet[:25])
    assert not breach(blocks, fleet, 5)
    assert not breach(blocks, fleet[25:], 5)
    assert not allowed(blocks, fleet[26:], 5, 1000)  # a block of five of which one sleeps


def test_where_k_was_raised_no_set_has_a_block_of_fewer():
    blocks = refined(refined({}, names(6)), names(3))  # two blocks of three, opened for k = 3
    assert not breach(blocks, names(6), 3)
    wrong = breach(blocks, [*names(6), "n1", "n2", "n3", "n4"], 4)
    assert set(wrong) == set(names(6))
    assert not breach(blocks, ["n1", "n2", "n3", "n4"], 4)
    assert smaller(blocks, 4) == 6
    assert smaller(blocks, 3) == 0


class Sets(RuleBasedStateMachine):
    """Anyone asks for anything, the helper is killed between any two: what was ever opened stays sums of k."""

    @initialize(least=st.integers(2, 4))
    def begin(self, least):
        self.path = Path(self.folder) / str(next(_NUMBERS)) / "ledger"
        self.path.parent.mkdir()
        self.least, self.opened, self.answers, self.round = least, [], {}, 0
        self.ledger = ledger(self.path)

    @rule(chosen=st.sets(st.sampled_from(DEVICES), min_size=1), again=st.integers(0, 2))
    def asks(self, chosen, again):
        """For a new round of some devices, or for shares of an earlier one together with them."""
        self.round += 1
        rounds = {device: max(1, self.round - again) for device in chosen}
        shares = [Share(RUN, rounds[d], METHOD, d, f"{d} {rounds[d]}".encode().ljust(32)) for d in sorted(chosen)]
        digest = set_digest({d: str(rounds[d]).encode() for d in chosen})
        able = not breach(self.ledger.blocks, chosen, self.least)
        new = not any(self.ledger.why_used(share) for share in shares)
        total = np.full(3, self.round, np.uint64)
        try:
            self.ledger.open(digest, shares, total, least=self.least, at=0.0)
        except WireError:
            assert not (able and new)  # liveness: what may be opened is
            assert digest in self.answers or not self.ledger.is_open(digest)
            return
        assert able
        assert new
        self.opened.append((frozenset(chosen), shares))
        self.answers[digest] = total

    @rule()
    def is_killed(self):
        self.ledger.close()
        self.ledger = ledger(self.path)

    @invariant()
    def every_share_is_opened_once_and_sets_are_identical_or_k_apart(self):
        if not hasattr(self, "opened"):
            return
        used = [share for _, shares in self.opened for share in shares]
        assert len(used) == len(set(used))
        for (one, _), (other, _) in itertools.combinations(self.opened, 2):
            assert one == other or len(one ^ other) >= self.least
        blocks = self.ledger.blocks
        for number in set(blocks.values()):
            assert list(blocks.values()).count(number) >= self.least

    @invariant()
    def the_newest_answers_are_the_same_again(self):
        if hasattr(self, "answers"):
            for digest, total in list(self.answers.items())[-KEPT_SUMS:]:
                assert np.array_equal(self.ledger.sum(digest), total)

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()


def test_the_ledger_as_a_state_machine(tmp_path):
    from hypothesis.stateful import run_state_machine_as_test

    Sets.folder = tmp_path
    run_state_machine_as_test(Sets, settings=settings(max_examples=10, stateful_step_count=12, deadline=None))


# ── what is opened ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_set_is_opened_once_all_its_parts_are_here_and_its_sum_is_exact(tmp_path):
    devices = names(6)
    shares, seeds = gathered(devices)
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*devices), 5)
        parts = opening(seeds, parts=3)
        assert served.take(parts[2], 0.0) is None
        assert served.take(parts[2], 0.0) is None
        assert served.take(parts[0], 0.0) is None
        answer = served.take(parts[1], 0.0)
        total = answer.total + sum(shares.values())
        assert total.tolist() == sum(VALUES[d] for d in devices).tolist()
        again = served.take(parts[0], 9.0)  # one part is enough to be told again
        assert again.again
        assert again.total.tolist() == answer.total.tolist()


# ── what is refused, by name ────────────────────────────────────────────────────────────────────────────────────────


def _forged(seeds):
    seeds["d1"] = contributed("d1", VALUES["d1"], by="d2")[1]


def _of_another_device(seeds):
    seeds["d1"] = seeds["d2"]


def _invented(seeds):
    seeds["zz"] = contributed("zz", VALUES["d1"])[1]


def _of_another_round(seeds):
    seeds["d1"] = contributed("d1", VALUES["d1"], round=2)[1]


def _of_another_run(seeds):
    seeds["d1"] = contributed("d1", VALUES["d1"], run=b"run2")[1]


def _of_another_method(seeds):
    seeds["d1"] = contributed("d1", VALUES["d1"], method="ffc")[1]


def _tampered(seeds):
    changed = bytearray(seeds["d1"])
    changed[-1] ^= 1
    seeds["d1"] = bytes(changed)


def _sealed_for_another_share(seeds):
    """Signed by the device, but sealed as it was for another share."""
    from dataclasses import replace

    from blinded_samples import signer

    from protofleet.contract.wire import topics
    from protofleet.contract.wire.codec import decode, encode

    inner = decode(decode(seeds["d1"]).payload)
    seeds["d1"] = signer("d1").sign(topics.up(FLEET, "d1"), encode(replace(inner, share=bytes(32))))


def _same_share(seeds):
    first = contributed("d0", VALUES["d0"])[0]
    from protofleet.contract.privacy.blinding import share_digest

    seeds["d1"] = contributed("d1", VALUES["d1"], share=share_digest(first))[1]


def _other_terms(seeds):
    seeds["d1"] = contributed("d1", VALUES["d1"], terms=bytes([1]) * 32)[1]


def _other_length(seeds):
    seeds["d1"] = contributed("d1", VALUES["d1"], words=WORDS + 1)[1]


def _unsigned(seeds):
    from protofleet.contract.wire.codec import decode

    seeds["d1"] = decode(seeds["d1"]).payload


def _nonsense(seeds):
    seeds["d1"] = b"nonsense"


WRONG = {
    _forged: "signature",
    _of_another_device: "signature",
    _invented: "the helper's own list",
    _of_another_round: "for this round",
    _of_another_run: "for this round",
    _of_another_method: "for this round",
    _tampered: "signature",
    _sealed_for_another_share: "this share",
    _same_share: "the very share of d0",
    _other_terms: "something else than the others",
    _other_length: "something else than the others",
    _unsigned: "a signed one",
    _nonsense: "CBOR",
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_seed_is_named_nothing_is_opened_and_the_rest_may_be(spoil, tmp_path):
    devices = names(5)
    shares, seeds = gathered(devices)
    spoil(seeds)
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*devices), 4)
        answer = ask(served, seeds)
        (bad,) = answer.refused
        assert answer.total is None
        assert bad == ("zz" if spoil is _invented else "d1")
        assert WRONG[spoil] in answer.refused[bad]
        assert not kept.blocks
        rest = {device: seed for device, seed in seeds.items() if device != bad}
        told = ask(served, rest).total + sum(shares[device] for device in rest)
        assert told.tolist() == sum(VALUES[device] for device in rest).tolist()


def test_invented_devices_do_not_make_a_set_of_one(tmp_path):
    """Who gathers has k - 1 keys of its own, and one device's seed."""
    invented = {name: contributed(name, VALUES["d0"])[1] for name in ("x1", "x2", "x3")}
    with ledger(tmp_path / "ledger") as kept:
        answer = ask(helper(kept, enrolled(*names(5)), 4), gathered(["d0"])[1] | invented)
        assert answer.total is None
        assert set(answer.refused) == set(invented)
        assert ask(helper(kept, enrolled(*names(5)), 4), gathered(["d0"])[1]).total is None


def test_a_helper_of_another_fleet_with_the_same_key_and_list_opens_nothing(tmp_path):
    with Ledger(
        tmp_path / "ledger", fleet="cows", key=PUBLIC.seal, witness=Witness(tmp_path / "key", "cows", PUBLIC.seal)
    ) as kept:
        answer = ask(Helper(kept, KEY, "cows", lambda: enrolled(*names(4)), 3), gathered(names(4))[1])
        assert set(answer.refused) == set(names(4))
        assert "for pf/v2/cows/up/d0" in answer.refused["d0"]


def test_a_share_is_opened_once_also_in_another_set(tmp_path):
    _, seeds = gathered(names(10))
    first = {device: seeds[device] for device in names(5)}
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(10)), 2)
        assert ask(served, first).total is not None
        answer = ask(served, seeds)
        assert set(answer.refused) == set(names(5))
        assert "was opened before" in answer.refused["d0"]
        second = contributed("d0", VALUES["d0"], seed=bytes([9]) * 32)[1]
        answer = ask(served, {**seeds, "d0": second})
        assert "another share of it was opened for round 1" in answer.refused["d0"]


def test_a_set_that_lacks_one_of_an_earlier_one_is_cut_to_what_may_be_opened(tmp_path):
    devices = names(12)
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*devices), 4)
        assert ask(served, gathered(devices)[1]).total is not None
        _, seeds = gathered(devices[1:], round=2)
        answer = ask(served, seeds, round=2)
        assert answer.total is None
        assert len(answer.refused) == 3
        assert "waits for 1 of the 12 it was summed with" in next(iter(answer.refused.values()))
        rest = {device: seed for device, seed in seeds.items() if device not in answer.refused}
        assert ask(served, rest, round=2).total is not None


def test_the_larger_of_the_helpers_least_and_what_a_device_was_told_holds(tmp_path):
    seeds = {device: contributed(device, VALUES[device], least=6)[1] for device in names(5)}
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(5)), 3)
        answer = ask(served, seeds)
        assert "a sum takes 6 devices" in answer.refused["d0"]
        assert ask(served, gathered(names(2))[1]).total is None
        assert ask(served, gathered(names(3))[1]).total is not None


def test_seeds_that_are_not_those_of_their_digest_are_not_answered(tmp_path):
    """Whoever has seen a set's digest could otherwise have it refused before the aggregator's own asking comes."""
    _, seeds = gathered(names(4))
    (part,) = opening(seeds)
    other = dict(seeds, d0=seeds["d1"])
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(4)), 3)
        with pytest.raises(WireError, match="the seeds of the digest"):
            served.take(type(part)(RUN, 1, METHOD, part.digest, 0, 1, other), 0.0)
        assert ask(served, seeds).total is not None


def test_a_share_of_more_words_than_any_aggregator_takes_is_refused_before_room_is_made_for_it(tmp_path):
    seeds = {device: contributed(device, VALUES[device], words=2**32 - 1)[1] for device in names(4)}
    with ledger(tmp_path / "ledger") as kept:
        answer = ask(helper(kept, enrolled(*names(4)), 3), seeds)
        assert "expected at most 16,777,216 words" in answer.refused["d0"]


def test_a_share_is_opened_once_also_for_another_round(tmp_path):
    seed = bytes([9]) * 32
    first = {device: contributed(device, VALUES[device], seed=seed)[1] for device in names(3)}
    again = {device: contributed(device, VALUES[device], seed=seed, round=2)[1] for device in names(3)}
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(3)), 3)
        assert ask(served, first).total is not None
        answer = ask(served, again, round=2)
        assert answer.total is None
        assert "this share was opened before" in answer.refused["d0"]


def test_a_set_of_more_than_can_be_summed_is_cut_and_one_too_long_refused(tmp_path, monkeypatch):
    _, seeds = gathered(names(6))
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(6)), 2)
        monkeypatch.setattr(opening_module, "MOST_DEVICES", 4)
        answer = ask(served, seeds)
        assert answer.total is None
        assert len(answer.refused) == 2
        monkeypatch.setattr(opening_module, "_LONGEST_SET_BYTES", 3 * len(seeds["d0"]))
        with pytest.raises(WireError, match="a set, expected at most"):
            ask(served, seeds)
        assert ask(served, {device: seeds[device] for device in names(3)}).total is not None


def test_of_a_block_it_is_not_the_names_that_decide_who_is_left_out():
    fleet = sorted(names(30))
    assert allowed({}, fleet, 2, 10) not in (set(fleet[:10]), set(fleet[-10:]))


# ── what it hears and answers ───────────────────────────────────────────────────────────────────────────────────────


class Sent:
    """In place of a link: what is published on it."""

    def __init__(self):
        self.payloads = []

    def publish(self, topic, payload):
        assert topic == topics.helper_answer(FLEET)
        self.payloads.append(payload)
        return True


@pytest.fixture
def serves(tmp_path):
    """A server of three devices, and what it sends, for whose asking it hears."""
    with ledger(tmp_path / "ledger") as kept:

        def made(trusted, limit_bytes=65_536):
            address = Address.parse("mqtt://127.0.0.1:1")
            options = {"trusted": trusted, "stopping": threading.Event()}
            server = HelperServer(helper(kept, enrolled(*names(3)), 3), Signer(KEY.sign), address, FLEET, **options)
            server._link, server._limit_bytes = Sent(), limit_bytes
            return server

        yield made


def test_only_a_trusted_key_is_heard_where_one_is_named(serves):
    (part,) = opening(gathered(names(3))[1])
    asked, trusted, other = encode(part), Signer(b"t" * 32), Signer(b"o" * 32)
    server = serves(Keyring([trusted.public_key]))
    topic = topics.helper_ask(FLEET)
    posing = encode(Signed(trusted.key_id, asked, other.signature(topic, asked)))
    for payload in (asked, other.sign(topic, asked), posing, trusted.sign("elsewhere", asked), b"garbage"):
        server._hear(Received(topic, payload, False, 1, 1))
        assert not server._link.payloads
    server._hear(Received(topic, trusted.sign(topic, asked), False, 1, 1))
    assert len(server._link.payloads) == 1


def test_an_answer_is_signed_and_no_message_of_it_is_longer_than_the_broker_takes(serves):
    seeds = gathered(names(3))[1]
    (part,) = opening(seeds)
    topic, ring = topics.helper_answer(FLEET), Keyring([PUBLIC.sign])
    for limit in (520, 528, 544, 1_024):
        server = serves(None, limit)
        server._hear(Received(topic, encode(part), False, 1, 1))
        assert all(len(payload) <= limit for payload in server._link.payloads)
        told = [decode(ring.payload(decode(payload), topic)) for payload in server._link.payloads]
        assert [each.status for each in told] == ["opened"] * len(told)
        assert sum(len(each.words) for each in told) == WORDS
    refused = dict.fromkeys(names(40), "x" * 200)
    for limit in (1_024, 4_096):
        server = serves(None, limit)
        server._tell(Answer(part, None, "so", refused))
        (payload,) = server._link.payloads
        assert len(payload) <= limit
        assert decode(ring.payload(decode(payload), topic)).refused


# ── who is enrolled with it ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'[devices]\n"a b" = "{HEX}"', "device"),
        (f'[devices]\na = "{HEX}"\n[more]', r"a table \[devices\]"),
        (f'a = "{HEX}"', r"a table \[devices\]"),
        (f'[devices]\na = "{HEX[2:]}"', "64 hex digits"),
        ("[devices]\na = 5", "64 hex digits"),
        (f'[devices]\na = "{HEX}"\nb = "{HEX.upper()}"', "a key of its own for each device"),
        ("[devices", "TOML"),
    ],
)
def test_what_is_wrong_with_a_list_of_devices_is_one_line(text, words, tmp_path):
    (tmp_path / "devices.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_allowlist(tmp_path / "devices.toml")
    (tmp_path / "devices.toml").write_text(f'[devices]\na = "{HEX}"')
    assert read_allowlist(tmp_path / "devices.toml") == {"a": b"\xab" * 32}


# ── the ledger's file ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_ledger_is_of_one_fleet_one_key_and_one_process(tmp_path):
    with ledger(tmp_path / "ledger"), pytest.raises(InUseError):
        ledger(tmp_path / "ledger")
    witness = Witness(tmp_path / "key", FLEET, PUBLIC.seal)
    with pytest.raises(UsageError, match="of this fleet"):
        Ledger(tmp_path / "ledger", fleet="cars", key=PUBLIC.seal, witness=witness)
    with pytest.raises(UsageError, match="of this key"):
        Ledger(tmp_path / "ledger", fleet=FLEET, key=bytes(32), witness=witness)
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o600


def test_a_ledger_opens_no_share_twice_whoever_asks(tmp_path):
    """Past all checks of who asks: within a set, in another set, in another round."""
    one, two, other = (Share(RUN, 1, METHOD, name, name.encode() * 32) for name in "abc")
    later = Share(RUN, 2, METHOD, "b", two.digest)
    doubled = Share(RUN, 1, METHOD, "b", one.digest)
    total = np.zeros(WORDS, np.uint64)
    with ledger(tmp_path / "ledger") as kept:
        for wrong in ([one, doubled], [one, two, two], [one, Share(RUN, 2, METHOD, "b", bytes(32))]):
            with pytest.raises(WireError, match="one that may be opened"):
                kept.open(b"x" * 32, wrong, total, least=2, at=0.0)
        kept.open(b"1" * 32, [one, two], total, least=2, at=0.0)
        new = Share(RUN, 2, METHOD, "a", b"new".ljust(32))
        for wrong in ([one, two], [one, two, other], [new, later]):
            with pytest.raises(WireError, match="one that may be opened"):
                kept.open(b"2" * 32, wrong, total, least=2, at=0.0)


def test_parts_of_a_few_sets_wait_and_words_are_short(tmp_path):
    sets = [opening(gathered(names(2), round=number)[1], round=number, parts=2) for number in range(1, 6)]
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(2)), 2)
        assert [served.take(parts[0], 0.0) for parts in sets] == [None] * 5
        assert served.take(sets[1][1], 0.0).total is not None
        assert served.take(sets[0][1], 0.0) is None  # its first part has made room for the fifth set's
        assert len(served._refusal(sets[0][0], {"d0": "x" * 300}, 1).refused["d0"]) == 200
        assert len(served._refusal(sets[0][0], dict.fromkeys(names(100), "no"), 100).refused) == MAX_REFUSED


def test_what_was_opened_bounds_what_is_opened_after_a_restart_too(tmp_path):
    with ledger(tmp_path / "ledger") as kept:
        assert ask(helper(kept, enrolled(*names(6)), 3), gathered(names(6))[1]).total is not None
        blocks = dict(kept.blocks)
    with ledger(tmp_path / "ledger") as kept:
        assert kept.blocks == blocks
        assert set(blocks) == set(names(6))
        answer = ask(helper(kept, enrolled(*names(6)), 3), gathered(names(5), round=2)[1], round=2)
        assert answer.total is None


def test_the_helpers_secrets_are_not_in_its_ledger(tmp_path):
    shares, seeds = gathered(names(3))
    with ledger(tmp_path / "ledger") as kept:
        ask(helper(kept, enrolled(*names(3)), 3), seeds)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert KEY.seal not in content
    assert not any(share.tobytes() in content for share in shares.values())
