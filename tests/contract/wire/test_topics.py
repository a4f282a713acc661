"""Topics: ids that may stand in one, and no wildcard gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.wire import topics

ids = st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True)


def test_the_five_topics_are_those_of_the_specification():
    assert topics.round_("shop") == "pf/v2/shop/round"
    assert topics.global_part("shop", 3) == "pf/v2/shop/global/3"
    assert topics.up("shop", "pi-7") == "pf/v2/shop/up/pi-7"
    assert topics.down("shop", "pi-7") == "pf/v2/shop/down/pi-7"
    assert topics.status("shop", "pi-7") == "pf/v2/shop/status/pi-7"
    filters = [topics.global_all("shop"), topics.up("shop"), topics.down("shop"), topics.status("shop")]
    assert filters == [f"pf/v2/shop/{kind}/+" for kind in ("global", "up", "down", "status")]


@given(fleet=ids, device=ids)
def test_the_device_is_found_again_in_its_topics(fleet, device):
    assert topics.device_of(topics.up(fleet, device)) == device
    assert topics.device_of(topics.status(fleet, device)) == device


WRONG = ["", "+", "#", "a/b", "a+", "-a", "A", "a b", "ä", "a\n", "a\0", "a" * 65, "../x", "$sys", "a_b", "٣"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("of", [topics.up, topics.down, topics.status])
def test_an_id_with_a_wildcard_a_slash_or_worse_is_refused_by_us(of, wrong):
    with pytest.raises(UsageError, match="device, expected 1 to 64 of a-z"):
        of("shop", wrong)
    for name in (topics.round_, topics.global_all, topics.up):
        with pytest.raises(UsageError, match="fleet, expected 1 to 64 of a-z"):
            name(wrong)


def test_no_device_is_called_as_the_aggregator_is():
    assert topics.check_device("aggregator-2") == "aggregator-2"
    with pytest.raises(
        UsageError, match="--id, expected a device's id, got aggregator, which is reserved, try aggregator-1"
    ):
        topics.check_device(topics.AGGREGATOR, "--id")
    with pytest.raises(UsageError, match="device, expected 1 to 64"):
        topics.check_device("a/b")


@pytest.mark.parametrize(
    "topic",
    ["", "pf/v2/shop/up", "pf/v1/shop/up/a", "pf/v2/shop/up/a/b", "pf/v2/shop/up/+", "pf/v2/shop/up/A", "x" * 9000],
)
def test_a_topic_that_is_none_of_ours_names_no_device(topic):
    with pytest.raises(WireError, match="topic, expected"):
        topics.device_of(topic)


def test_the_aggregators_id_is_refused_where_a_device_is_meant():
    for name in (topics.up, topics.down):
        with pytest.raises(UsageError, match="device, expected a device's id, got aggregator, which is reserved"):
            name("shop", topics.AGGREGATOR)
    with pytest.raises(WireError):
        topics.device_of("pf/v2/shop/up/aggregator")
    assert topics.device_of(topics.status("shop", topics.AGGREGATOR)) == topics.AGGREGATOR


@given(topic=st.text(max_size=40))
def test_any_topic_gives_a_valid_id_or_a_wire_error(topic):
    try:
        topics.check_id(topics.device_of(topic))
    except WireError as error:
        assert "topic" in error.message  # noqa: PT017
