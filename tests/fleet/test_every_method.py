"""Every method in `aggregate` and `client`, as a real fleet of processes over a broker; one is not Protofleet's.

By default three that no other fleet of processes has: a method that adds noise, one that weighs devices one by one,
and the one that is not ours.
"""

from __future__ import annotations

import json

import fleets
import pytest
from every_method import EVERY, EXAMPLE, exported, folder, package, told  # noqa: F401

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.uplink_bytes import payload_bytes
from protofleet.contract.methods import closing_method, method

BY_DEFAULT = ("ncm-dp", "fedcof", EXAMPLE)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in EVERY])
def test_a_fleet_of_processes_learns_by_it(name, folder, tmp_path):  # noqa: F811
    """A round, and a closing one: what is sent is as long as was said, is committed, and devices answer by it."""
    found, path = method(name), exported(folder, name)
    rounds = 1
    with fleets.fleet_in(tmp_path) as fleet:
        fleet.aggregator([path], *told(name), "--rounds", rounds, "--min-clients", 2)
        for index in range(2):
            data = fleets.share(index, range(fleets.CLASSES))
            test = tmp_path / f"d{index}.npz"
            fleet.client(f"d{index}", path, data, "--test", test, *told(name))
        assert set(fleet.finish(120).values()) == {0}
        assert fleet.told("summary")["totals"]["committed"] == 2 * (rounds + found.trains)
        sizes = {len(payload) for payload in fleet.payloads(1).values()}
        kinds = {message.method for message in fleet.messages(1)}
    wanted = payload_bytes(read_bundle(path).manifest, found)
    assert kinds == {found.name}
    assert max(sizes) <= wanted
    if not found.statistic.takes_factor():  # a few samples are less than the triangle that was said
        assert (
            min(sizes) >= wanted - 3 * fleets.CLASSES * found.statistic.GROUPS
        )  # counts are shorter than a thousand's
    lines = (tmp_path / "state-d0" / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [line["method"] for line in history] == [found.name] + [closing_method().name] * found.trains
    assert found.way in history[0]["accuracy"]["all_classes"]
