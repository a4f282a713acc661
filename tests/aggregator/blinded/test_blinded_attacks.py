"""Blinded rounds: who abstains, who lies, and stores that say less than was opened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, contribution, gram
from blinded_samples import FLEET, signer
from blinded_world import DEVICES, PLAIN, SETTINGS, World, abstention, pooled

from protofleet.aggregator.commands.solve_again import solve_again
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.rounds.round_machine import AwaitingSum, Closed, Extended
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.bundle.bundle_file import extractor_of
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import method
from protofleet.contract.privacy.blinding import share_digest
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.store.close()
    made.ledger.close()


def test_a_device_that_abstains_is_taken_awaited_no_more_and_of_no_set(world):
    world.steps()
    assert world.send(*DEVICES[1:]) == ["committed"] * 4
    assert world.core.take([("d0", abstention(world))], world.now)[0].outcome == "committed"
    world.kill()  # a round that holds shares and abstentions goes on as a blinded one
    assert world.core.take([("d0", abstention(world))], world.now)[0].outcome == "duplicate"
    assert isinstance(world.steps()[-1], AwaitingSum)
    assert world.core.helper.asked.devices == tuple(DEVICES[1:])
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[1:]), atol=1e-9, rtol=0)
    assert [found.device for found in world.core.findings] == ["d0"]
    assert "policy" in world.store.findings()[1][0]["reason"]
    assert set(world.ledger.blocks) == set(DEVICES[1:])


def test_who_abstains_does_not_help_to_reach_k(world):
    world.steps()
    assert world.send("d0", "d1") == ["committed"] * 2
    world.core.take([(device, abstention(world)) for device in DEVICES[2:4]], world.now)
    world.now += 61.0
    assert isinstance(world.steps()[-1], Extended)
    assert world.core.helper.asked is None
    assert world.send("d4") == ["committed"]
    assert isinstance(world.steps()[-1], AwaitingSum)
    assert world.core.helper.asked.devices == ("d0", "d1", "d4")


def test_numbers_do_not_pass_for_an_abstention(world):
    world.steps()
    zero = FeatureGram.zero(CLASSES, PLAIN.features)
    matrix_alone = FeatureGram(gram(1).gram, zero.cross, zero.counts)
    for numbers in (gram(1), matrix_alone):
        (decision,) = world.core.take([("d0", abstention(world, numbers=numbers))], world.now)
        assert "expected a share, got the numbers" in decision.reason


def test_a_liar_has_no_more_samples_than_all_may_have_together(tmp_path):
    """What bounds how far one device shifts a sum: n times --max-samples, less what the others have."""
    for own, is_taken in ((2, True), (3, False)):  # beside four devices of 30
        (tmp_path / str(own)).mkdir()
        world = World(tmp_path / str(own), replace(SETTINGS, max_samples=30))
        world.steps()
        world.core.take([("d0", world.message("d0", gram(0, samples=15 * own)))], world.now)
        world.send(*DEVICES[1:])
        world.steps()
        world.answered(world.ask())
        world.steps()
        assert ("one of them lies" in world.core.doubt) is not is_taken
        world.store.close()
        world.ledger.close()


def test_a_device_whose_share_is_of_another_pad_than_its_seed_spoils_the_sum_and_nothing_else(world):
    world.steps()
    good = world.message("d0")
    message, other = decode(good), np.arange(len(decode(good).share), dtype=np.uint64)
    sealed = decode(decode(message.seed).payload)
    lie = signer("d0").sign(topics.up(FLEET, "d0"), encode(replace(sealed, share=share_digest(other))))
    world.core.take([("d0", encode(replace(message, share=other, seed=lie)))], world.now)
    world.send(*DEVICES[1:])
    world.steps()
    answer = world.ask()  # what was sealed speaks of another share: the helper names it
    assert "sealed for this helper and this share" in answer.refused["d0"]
    world.answered(answer)
    world.steps()
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[1:]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("at", [3, 5])
def test_a_store_that_was_put_back_gets_the_same_sum_or_none(tmp_path, at):
    """A file that was copied behind the aggregator's back, before some shares came, or before the set was asked for."""
    world = World(tmp_path)
    world.steps()
    world.send(*DEVICES[:at])
    world.store.close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("store")}
    world.ledger.close()
    world.start()
    world.send(*DEVICES[at:])
    world.steps()
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    head, blocks = world.head(), dict(world.ledger.blocks)
    world.store.close()
    world.ledger.close()
    for path, content in before.items():
        path.write_bytes(content)
    world.start(online=())
    give(tmp_path / "store", "close-round", "", "op")
    world.now += 1.0
    made = world.steps()
    if world.core.helper.asked is not None:
        world.answered(world.ask())
        made += world.steps()
    assert any(isinstance(step, Closed) for step in made)
    assert world.core.state.version == (1 if at == 5 else 0)
    if at == 5:
        np.testing.assert_array_equal(world.head(), head)
    assert world.ledger.blocks == blocks
    world.store.close()
    world.ledger.close()


def test_a_sum_that_is_taken_back_is_gone_and_an_open_round_takes_the_place_of_one(world):
    world.round(*DEVICES)
    assert world.store.blinded.sums() == {"ffc": 1}
    give(world.folder / "store", "rollback", "", "op", detail="1")
    world.now += 1.0
    (obeyed, *_) = world.steps()
    assert obeyed.outcome.startswith("done")
    assert not world.store.blinded.sums()
    with pytest.raises(UsageError, match="contributions were dropped"):  # not the poisoned sum again
        solve_again(world.folder / "store", PLAIN, {"ridge": 1e-3})


def test_open_rounds_after_blinded_ones_forget_no_class_before_they_have_replaced_the_sum(world):
    world.round(*DEVICES)
    world.store.close()
    plain = replace(SETTINGS, helper=None, least=None, min_clients=1, deadline=60.0)
    world.store = DurableStore(world.folder / "store", BUNDLE, FLEET)
    core = rounds_of(world.store, PLAIN, BUNDLE, plain, now=0.0)
    give(world.folder / "store", "forget class", "", "op", detail=PLAIN.labels[0])
    obeyed = core.advance(10.0, 2000.0)
    assert "refused: a class cannot be taken out of a blinded round's sum" in obeyed.outcome
    told = {"run": core.parts.run, "round": 2, "method": "ffc", "extractor": extractor_of(PLAIN, BUNDLE, method("ffc"))}
    core.take([("d0", encode(contribution(gram(1), **told)))], 12.0)
    assert isinstance(core.advance(13.0, 2000.0), Closed)
    assert not world.store.blinded.sums()
