"""Blinded rounds without a network: device, aggregator and helper in one process, killed between any two steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, contribution, gram, manifest
from aggregator_samples import extractor as extractor_bytes
from blinded_samples import FLEET, KEY, PUBLIC, enrolled, helper, signer
from blinded_world import DEVICES, LEAST, PLAIN, SETTINGS, World, abstention, blinding, pooled

from protofleet.aggregator.blinded.helper_line import HelperLine
from protofleet.aggregator.commands.solve_again import solve_again
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.helper.opening import Answer
from protofleet.aggregator.rounds.round_machine import AwaitingSum, Closed, Extended, Opened
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import PrivacyError, UsageError
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES, Signed
from protofleet.contract.wire.messages import Announcement, Contribution, HelperTerms, Status
from protofleet.contract.wire.messages import Opened as HelperOpened
from protofleet.edge_client.privacy.blinded_shares import Blinding


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.store.close()
    made.ledger.close()


def test_a_round_comes_to_the_pooled_head_and_nobody_holds_anything_else(world):
    made = world.round(*DEVICES)
    assert [type(step) for step in made][:3] == [Opened, AwaitingSum, Closed]
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    assert "one sum of 5 devices" in world.core.told
    assert not list(world.store.contributions(1, "ffc"))  # its shares are gone
    again = solve_again(world.folder / "store", PLAIN, {"ridge": 1e-3})
    np.testing.assert_allclose(again.state.head.rows, world.head(), atol=1e-12, rtol=0)


def test_a_sum_of_fewer_samples_than_features_says_what_it_shows(world, monkeypatch):
    world.round(*DEVICES)
    assert "features" not in world.core.told
    few = {device: gram(index, samples=1) for index, device in enumerate(DEVICES[:3])}
    nothing = FeatureGram.zero(CLASSES, PLAIN.features)
    monkeypatch.setattr(world, "statistic", lambda device: few.get(device, nothing))
    world.send(*DEVICES)
    world.steps()
    world.answered(world.ask())
    world.steps()
    assert "of 3 samples, fewer than 4 features: who has it and a photo can tell" in world.core.told


def test_what_a_device_sends_has_one_size_and_neither_counts_nor_classes(world):
    world.steps()
    whole, some = world.message("d0"), world.message("d0", FeatureGram.zero(CLASSES, PLAIN.features))
    assert len(whole) == len(some)
    message = decode(whole)
    assert not len(message.body.classes)
    assert not len(message.counts)
    assert message.triangle is None
    assert message.samples == 0


@pytest.mark.parametrize("at", range(6))
def test_whoever_is_killed_anywhere_nothing_is_lost_or_doubled(world, at):
    """Killed before the round, after some shares, when the set stands, when it is open, with half an answer, after."""
    world.steps()
    if at == 0:
        world.kill()
        world.steps()
    assert world.send("d0", "d1") == ["committed"] * 2
    if at == 1:
        world.kill()
        assert world.send("d0") == ["duplicate"]
    world.send(*DEVICES[2:])
    world.now += 1.0
    assert isinstance(world.steps()[-1], AwaitingSum)
    assert world.core.announcement().phase == "closed"
    if at == 2:
        world.kill()
        assert world.send("d0") == ["duplicate"]
    first = world.ask()
    if at == 3:
        world.kill()
    if at == 4:
        world.core.helper.hear(HelperOpened(*_key(first), 0, 9, "opened", first.total[:2]))
        world.kill()
    answer = world.ask()
    assert answer.again
    assert answer.total.tolist() == first.total.tolist()
    world.answered(answer)
    assert any(isinstance(step, Closed) for step in world.steps())
    if at == 5:
        world.kill()
        assert world.core.helper.asked is None
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    assert world.store.record(1).closed


def test_an_answer_that_is_cut_anew_is_put_together_of_one_cut(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    answer = world.ask()
    total = answer.total
    count = -(-len(total) // 10)
    assert -(-len(total) // 11) == count  # as many parts, of other sizes
    world.core.helper.hear(HelperOpened(*_key(answer), 0, count, "opened", total[:10]))
    for _ in range(2):  # what the old cut spoils is asked for again
        world.answered(answer, each=11)
        world.steps()
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)


def _key(answer: Answer) -> tuple[bytes, int, str, bytes]:
    a = answer.asked
    return a.run, a.round, a.method, a.digest


def test_a_device_that_the_helper_does_not_know_is_left_out_and_named(world):
    world.helper = helper(world.ledger, enrolled(*DEVICES[1:]), LEAST)
    made = world.round(*DEVICES)
    assert sum(isinstance(step, AwaitingSum) for step in made) >= 2  # asked once more without it
    assert [(found.device, found.left_out) for found in world.core.findings] == [("d0", True)]
    assert "the helper's own list" in world.core.findings[0].reason
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[1:]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_device_that_says_nothing_is_not_awaited_and_in_no_set(world, is_killed):
    world.steps()
    (decision,) = world.core.take([("d0", abstention(world))], world.now)
    assert (decision.outcome, decision.reason) == ("committed", "")
    assert world.send("d1", "d2") == ["committed"] * 2
    if is_killed:
        world.kill()
    assert "d0" not in world.core.rounds.awaited
    world.send("d3", "d4")
    world.steps()
    assert world.core.helper.asked.devices == ("d1", "d2", "d3", "d4")
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    assert world.ledger.blocks
    assert [(found.device, found.verdict) for found in world.core.findings] == [("d0", "left out")]
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[1:]), atol=1e-9, rtol=0)


def test_devices_that_say_nothing_do_not_make_up_k(world):
    world.steps()
    world.core.take([(device, abstention(world)) for device in DEVICES[:3]], world.now)
    world.send(*DEVICES[3:])
    assert isinstance(world.steps()[-1], Extended)
    assert world.core.helper.asked is None


def test_too_few_that_can_be_summed_let_the_round_go_on_until_others_come(world):
    world.helper = helper(world.ledger, enrolled(*DEVICES[2:]), LEAST)
    made = world.round(*DEVICES[:4])  # two of four are known
    assert isinstance(made[-1], Extended)
    assert world.core.helper.asked is None
    assert not world.steps()  # nothing is asked again before something has changed
    assert world.core.announcement().phase == "open"
    assert world.send("d4") == ["committed"]
    assert isinstance(world.steps()[-1], AwaitingSum)
    world.answered(world.ask())
    assert isinstance(world.steps()[0], AwaitingSum)
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[2:]), atol=1e-9, rtol=0)


def test_fewer_than_k_at_the_deadline_extend_the_round_and_an_order_ends_it_without_a_result(world):
    world.steps()
    world.send("d0", "d1")
    world.now += 61.0
    assert isinstance(world.steps()[0], Extended)
    give(world.folder / "store", "close-round", "", "op")
    world.now += 1.0
    made = world.steps()
    assert any(isinstance(step, Closed) for step in made)
    assert world.core.state.version == 0
    assert "closed without a result" in world.core.doubt
    assert not world.ledger.blocks


def test_a_set_that_differs_by_one_from_the_last_is_not_opened(world):
    world.round(*DEVICES)
    made = world.round(*DEVICES[:4])
    assert isinstance(made[-1], Extended)
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    world.send("d4")
    world.steps()
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())


def test_a_sum_that_no_data_can_have_closes_its_round_without_a_result(world):
    world.steps()
    lie = gram(9)
    liar = FeatureGram(lie.gram * 1000, lie.cross, lie.counts)
    world.core.take([("d0", world.message("d0", liar))], world.now)
    world.send(*DEVICES[1:])
    world.steps()
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    assert "one of them lies" in world.core.doubt
    assert world.core.state.version == 0


def test_a_helpers_sum_of_another_length_closes_its_round_without_a_result(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    answer = world.ask()
    world.answered(replace(answer, total=answer.total[:-1]))
    assert any(isinstance(step, Closed) for step in world.steps())
    assert "the helper's sum" in world.core.doubt
    assert world.core.state.version == 0


def test_what_comes_while_the_set_stands_is_late_and_in_no_sum(world):
    world.steps()
    late = world.message("d4")
    world.send(*DEVICES[:4])
    world.core.status("d4", encode(Status(False, b"instance", 1)), world.now)
    assert isinstance(world.steps()[-1], AwaitingSum)
    (decision,) = world.core.take([("d4", late)], world.now)
    assert decision.outcome == "late"
    world.answered(world.ask())
    world.steps()
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[:4]), atol=1e-9, rtol=0)


def test_a_sum_may_have_as_many_samples_as_all_its_devices_may(tmp_path):
    world = World(tmp_path, replace(SETTINGS, max_samples=40))
    world.round(*DEVICES)
    assert "150" not in world.core.doubt
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    world.store.close()
    world.ledger.close()


def test_what_the_helper_is_asked_fits_in_the_brokers_messages(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    for limit in range(1_000, 3_000, 40):
        parts = world.core.helper.asks(limit)
        assert max(len(encode(part)) for part in parts) + ENVELOPE_BYTES <= limit
        assert sum(len(part.seeds) for part in parts) == len(DEVICES)


def test_an_answer_about_another_set_is_left(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    answer = world.ask()
    run, number, name, digest = _key(answer)
    for key in ((run, number, name, bytes(32)), (b"run9", number, name, digest), (run, number + 1, name, digest)):
        world.core.helper.hear(HelperOpened(*key, 0, 1, "opened", np.zeros_like(answer.total)))
        assert not world.steps()
    world.answered(answer)
    world.steps()
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    assert not world.store.blinded.holds_shares(1)  # neither shares nor seeds are of use any more


def test_an_order_closes_a_round_for_which_the_helper_is_waited_for(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    give(world.folder / "store", "close-round", "", "op")
    world.now += 1.0
    assert any(isinstance(step, Closed) for step in world.steps())
    assert "closed by order before the helper answered" in world.core.doubt


class Sent:
    """In place of a link: what is published on it, as long as there is a connection."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.is_up = True

    def publish(self, topic: str, payload: bytes) -> bool:
        assert topic == topics.helper_ask(FLEET)
        self.payloads += [payload] if self.is_up else []
        return self.is_up


def test_the_line_hears_the_helpers_key_alone_and_asks_again_later_and_later(world):
    link = Sent()
    line = HelperLine(world.core.helper, link, FLEET)
    world.steps()
    world.send(*DEVICES)
    assert line.wait_s(0.0) is None
    world.steps()
    line.turn(0.0, 1_000)
    asked, link.payloads = link.payloads, []
    assert max(map(len, asked)) + ENVELOPE_BYTES <= 1_000
    times = []
    for now in range(1, 100):
        line.turn(float(now), 1 << 20)
        if link.payloads:
            times.append(now)
            assert max(map(len, link.payloads)) <= 65_536
            link.payloads = []
    assert times == [10, 30, 70]
    line.connected()
    assert line.wait_s(100.0) == 0.0
    a = (answer := world.ask()).asked
    opened = encode(HelperOpened(a.run, a.round, a.method, a.digest, 0, 1, "opened", answer.total))
    topic, own, other = topics.helper_answer(FLEET), Signer(KEY.sign), Signer(bytes(32))
    posing = encode(Signed(own.key_id, opened, other.signature(topic, opened)))
    for payload in (opened, other.sign(topic, opened), posing, own.sign("elsewhere", opened), b"garbage"):
        assert not line.hear(payload)
        assert not world.steps()
    assert line.hear(own.sign(topic, opened))
    assert any(isinstance(step, Closed) for step in world.steps())


def test_no_class_is_forgotten_in_blinded_rounds(world):
    world.steps()
    give(world.folder / "store", "forget class", "", "op", detail="class-1")
    world.now += 1.0
    (obeyed,) = (step for step in world.steps() if isinstance(step, Obeyed))
    assert "in blinded rounds a class cannot be taken out of a sum" in obeyed.outcome


def test_a_store_without_a_class_has_no_blinded_rounds(world):
    core = rounds_of(world.store, PLAIN, BUNDLE, replace(SETTINGS, helper=None, least=None), now=0.0)
    give(world.folder / "store", "forget class", "", "op", detail="class-1")
    while core.advance(10.0, 1010.0) is not None:
        pass
    with pytest.raises(UsageError, match="a store of all classes"):
        rounds_of(world.store, PLAIN, BUNDLE, SETTINGS, now=0.0)


def test_to_forget_a_device_waits_for_the_helper_and_says_what_stays(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    give(world.folder / "store", "forget", "d0", "op")
    world.now += 1.0
    assert not world.steps()  # the helper may have opened the set with it
    world.answered(world.ask())
    made = world.steps()
    (obeyed,) = (step for step in made if isinstance(step, Obeyed))
    assert "the sum of round 1 has it until one without it is opened" in obeyed.outcome
    assert world.core.take([("d0", world.message("d0"))], world.now)[0].outcome == "rejected"


def test_a_round_whose_helper_is_gone_can_be_ended_also_behind_an_order_that_waits_for_it(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    for what, device in (("forget", "d0"), ("pause", ""), ("close-round", "")):
        give(world.folder / "store", what, device, "op")
    world.now += 1.0
    made = [step.order.what for step in world.steps() if isinstance(step, Obeyed)]
    assert made[0] == "close-round"
    world.now += 10.0
    made += [step.order.what for step in world.steps() if isinstance(step, Obeyed)]
    assert made == ["close-round", "forget", "pause"]
    assert world.store.record(1).closed
    assert world.core.state.version == 0


def test_who_was_in_a_round_without_a_result_can_be_forgotten(world):
    world.round(*DEVICES)
    world.now += 10.0
    world.steps()
    world.send(*DEVICES)
    world.steps()
    give(world.folder / "store", "close-round", "", "op")
    world.now += 10.0
    world.steps()
    give(world.folder / "store", "forget", "d0", "op")
    world.now += 10.0
    (outcome,) = (step.outcome for step in world.steps() if isinstance(step, Obeyed))
    assert outcome == "done; the sum of round 1 has it until one without it is opened"


def test_a_new_run_takes_no_share_of_the_old_one(world):
    world.steps()
    world.send(*DEVICES)
    world.steps()
    assert world.core.helper.asked is not None
    world.store.begin_new_run()
    world.kill()
    assert world.core.helper.asked is None
    world.core.rounds.contributions.clear()
    assert world.send(*DEVICES) == ["committed"] * 5


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def rejected(world: World, **changed: object) -> str:
    message = replace(decode(world.message("d0")), **changed)
    (decision,) = world.core.take([("d0", encode(message))], world.now)
    assert decision.outcome == "rejected"
    return decision.reason


def test_what_is_no_share_of_this_round_is_refused_when_it_comes(world):
    world.steps()
    good, other = decode(world.message("d0")), decode(world.message("d1"))
    assert "words" in rejected(world, share=good.share[1:])
    assert "one of this share" in rejected(world, seed=other.seed)
    assert "one of this share" in rejected(world, share=good.share + np.uint64(1))
    assert "a signed sealed seed" in rejected(world, seed=encode(Status(True, bytes(8), 1)))
    other = replace(world.core._view().terms.blinded, terms=bytes(32))
    for changed in ({"least": LEAST - 1}, {"words": 9}, {"terms": bytes(32)}):
        sealed = replace(decode(decode(good.seed).payload), **changed)
        seed = signer("d0").sign("topic", encode(sealed))
        assert "one made as announced now" in rejected(world, seed=seed)
    late = replace(decode(decode(good.seed).payload), round=2)
    assert "one of the same round" in rejected(world, seed=signer("d0").sign("topic", encode(late)))
    plain = contribution(gram(1), run=world.core.parts.run, method="ffc", extractor=extractor_bytes("ffc"))
    (decision,) = world.core.take([("d0", encode(replace(plain, extractor=good.extractor)))], world.now)
    assert "expected a share, got the numbers" in decision.reason


def announced(**changed: object) -> Announcement:
    lists, terms = (list_digest(PLAIN.labels),), HelperTerms(PUBLIC.seal, LEAST, 36)
    told = Announcement(b"run1", 1, "open", "ffc", BUNDLE, extractor=bytes(32), class_lists=lists, helper=terms)
    return replace(told, **changed)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"helper": HelperTerms(bytes(32), LEAST, 36)}, "the round's helper, expected .* of another"),
        ({"helper": None}, "got an open one"),
        ({"helper": HelperTerms(PUBLIC.seal, LEAST, 35)}, "a scale of 36 bits"),
        ({"method": "fedproto"}, "a method whose sums add up"),
        ({"min_samples": 2}, "who has how many"),
        ({"withheld": (1,)}, "samples of all classes"),
        ({"class_lists": (b"12345678",)}, "a shorter list"),
    ],
)
def test_a_device_takes_part_in_no_round_that_could_show_it(changed, line):
    told = replace(announced(), **changed)
    with pytest.raises(PrivacyError, match=line):
        blinding("d0").check(told)
    blinding("d0").check(announced())


def test_a_device_without_a_helpers_key_or_its_own_takes_no_part():
    with pytest.raises(PrivacyError, match="client --helper-key"):
        Blinding(PLAIN, fleet=FLEET, device="d0").check(announced())
    Blinding(PLAIN, fleet=FLEET, device="d0").check(announced(helper=None))
    with pytest.raises(PrivacyError, match="a key to sign with"):
        Blinding(PLAIN, fleet=FLEET, device="d0", helper=PUBLIC).check(announced())


def test_an_open_contribution_that_was_left_is_not_sent_once_a_helper_is_asked_for(world):
    world.steps()
    plain = encode(contribution(gram(1), method="ffc"))
    assert not blinding("d0").permits(plain)
    assert not blinding("d0").permits(signer("d0").sign("pf/v2/pets/up/d0", plain))
    assert blinding("d0").permits(world.message("d0"))
    assert blinding("d0").permits(abstention(world))  # or its round would wait for it
    leaves = Contribution.withdrawal(run=b"run1", round=2, method="ffc", bundle=BUNDLE)
    assert blinding("d0").permits(encode(leaves))
    assert Blinding(PLAIN, fleet=FLEET, device="d0").permits(plain)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"rule": "median"}, "--rule with --helper"),
        ({"max_share": 0.6}, "--max-share with --helper"),
        ({"suspects": "name"}, "--suspects with --helper"),
        ({"suspects": "ignore"}, "--suspects with --helper"),
        ({"min_samples": 2}, "--min-samples with --helper"),
        ({"vouch": ("hall",)}, "--vouch with --helper"),
        ({"when_new": 3}, "--when-new with --helper"),
        ({"standing": True}, "--helper with --standing"),
        ({"least": 1}, "--least, expected 2 to 1,024"),
        ({"least": 1_025}, "--least, expected 2 to 1,024"),
    ],
)
def test_what_needs_more_than_a_sum_is_one_line(tmp_path, given, line):
    (tmp_path / "pub").write_text((PUBLIC.seal + PUBLIC.sign).hex())
    with pytest.raises(UsageError, match=line):
        Settings(helper=str(tmp_path / "pub"), **given)
    with pytest.raises(UsageError, match="--helper beside it"):
        Settings(least=3)
    settled = Settings(helper=str(tmp_path / "pub"), least=4)
    assert settled.policy.min_clients == 4
    assert replace(settled, min_clients=6).policy.min_clients == 6
    assert settled.helper == KEY.public


def test_a_round_goes_on_as_it_was_begun_and_only_sums_are_blinded(tmp_path):
    made = World(tmp_path)
    made.steps()
    made.send("d0")
    made.store.close()
    made.ledger.close()
    open_one, other = (
        replace(SETTINGS, helper=None, least=None),
        replace(SETTINGS, method=None, ridge=None),
    )
    with DurableStore(tmp_path / "store", BUNDLE, FLEET) as store:
        line = "expected an open round, got a blinded one"
        with pytest.raises(UsageError, match=line):
            rounds_of(store, PLAIN, BUNDLE, open_one, now=0.0)
    with DurableStore(tmp_path / "other", BUNDLE, FLEET) as store:
        made = manifest()  # of fedproto
        with pytest.raises(UsageError, match="ncm or ffc"):
            rounds_of(store, made, BUNDLE, other, now=0.0)
