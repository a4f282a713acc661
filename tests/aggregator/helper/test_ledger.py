"""The helper's ledger as a file: what it keeps, whose it is, and that it is the whole of what was opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from blinded_samples import (
    FLEET,
    PUBLIC,
    ask,
    enrolled,
    helper,
    ledger,
    names,
)

from protofleet.aggregator.helper.ledger import KEPT_SUMS, Ledger
from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.errors import InUseError, StoreError, UsageError
from tests.aggregator.helper.test_opening import gathered


def opened_once(path: Path) -> dict[str, bytes]:
    """The signed seeds of the set."""
    _, seeds = gathered(names(4))
    with ledger(path) as kept:
        assert ask(helper(kept, enrolled(*seeds), 3), seeds).total is not None
    return seeds


def test_a_ledger_is_of_one_fleet_one_key_and_one_process(tmp_path):
    with ledger(tmp_path / "ledger"), pytest.raises(InUseError):
        ledger(tmp_path / "ledger")
    with pytest.raises(UsageError, match="of this fleet"):
        Ledger(
            tmp_path / "ledger", fleet="cars", key=PUBLIC.seal, witness=Witness(tmp_path / "key", "cars", PUBLIC.seal)
        )
    with pytest.raises(UsageError, match="of this key"):
        Ledger(tmp_path / "ledger", fleet=FLEET, key=bytes(32), witness=Witness(tmp_path / "other", FLEET, bytes(32)))
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o600


def test_a_ledger_that_was_lost_or_put_back_opens_nothing_more_with_its_key(tmp_path):
    with ledger(tmp_path / "ledger"):
        pass
    with ledger(tmp_path / "first"):  # nothing was opened: any ledger is as good
        pass
    with ledger(tmp_path / "ledger"):
        pass
    before = (tmp_path / "ledger").read_bytes()
    opened_once(tmp_path / "ledger")
    with ledger(tmp_path / "ledger"):  # itself: it goes on
        pass
    now = (tmp_path / "ledger").read_bytes()
    (tmp_path / "ledger").write_bytes(before)
    with pytest.raises(UsageError, match="expected 1 openings, got 0: an older copy"):
        ledger(tmp_path / "ledger")
    with pytest.raises(UsageError, match="the ledger that opened 1 with this key, got a new one"):
        ledger(tmp_path / "new")
    other = Witness(tmp_path / "key", FLEET, bytes(32))  # a new key in a file of the same name begins anew
    other.check(b"", 0, "--store")
    (tmp_path / "elsewhere").mkdir()
    opened_once(tmp_path / "elsewhere" / "ledger")
    (tmp_path / "ledger").write_bytes((tmp_path / "elsewhere" / "ledger").read_bytes())
    with pytest.raises(UsageError, match="got another"):
        ledger(tmp_path / "ledger")
    (tmp_path / "ledger").write_bytes(now)
    with ledger(tmp_path / "ledger") as kept:
        assert len(kept.blocks) == 4


def test_of_two_helpers_at_once_with_one_key_the_first_opens(tmp_path):
    with ledger(tmp_path / "one") as one, ledger(tmp_path / "two") as two:
        assert ask(helper(two, enrolled(*names(4)), 3), gathered(names(4))[1]).total is not None
        with pytest.raises(UsageError, match="the ledger that opened 1 with this key, got another"):
            ask(helper(one, enrolled(*names(4)), 3), gathered(names(3), round=2)[1], round=2)
        assert not one.blocks


def test_a_helper_killed_between_ledger_and_witness_goes_on_and_one_that_cannot_write_it_tells_nothing(tmp_path):
    with ledger(tmp_path / "ledger"):
        early = (tmp_path / "key.pets.opened").read_bytes()
    seeds = opened_once(tmp_path / "ledger")
    (tmp_path / "key.pets.opened").write_bytes(early)
    with ledger(tmp_path / "ledger") as kept:
        assert ask(helper(kept, {}, 3), seeds).again
        assert (tmp_path / "key.pets.opened").read_bytes() != early
        (tmp_path / "key.pets.opened").unlink()
        (tmp_path / "key.pets.opened").mkdir()
        with pytest.raises(StoreError, match=r"key\.pets\.opened"):
            ask(helper(kept, enrolled(*names(4)), 3), gathered(names(4), round=2)[1], round=2)


def test_an_old_sum_is_not_kept_and_never_opened_anew(tmp_path):
    with ledger(tmp_path / "ledger") as kept:
        served = helper(kept, enrolled(*names(2)), 2)
        sets = [gathered(names(2), round=number)[1] for number in range(1, KEPT_SUMS + 2)]
        for number, seeds in enumerate(sets, 1):
            assert ask(served, seeds, round=number).total is not None
        answer = ask(served, sets[0])
        assert answer.total is None
        assert "opened long ago" in answer.reason
        assert ask(served, sets[1], round=2).total is not None


def test_a_killed_helper_gives_the_same_answer(tmp_path):
    _, seeds = gathered(names(4))
    with ledger(tmp_path / "ledger") as kept:
        first = ask(helper(kept, enrolled(*names(4)), 3), seeds)
    with ledger(tmp_path / "ledger") as kept:
        again = ask(helper(kept, {}, 30), seeds)  # whoever is enrolled now: it was opened
    assert again.total.tolist() == first.total.tolist()
