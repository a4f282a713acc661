"""A deployment of Flower's own processes, beside a fleet of ours, on the same bundle and images: the same to the bit.

flwr needs other versions of some libraries than the tests do, so it has an environment of its own: made here from the
package index, or the one whose python `PROTOFLEET_FLOWER_PYTHON` names.
"""

from __future__ import annotations

import os
from pathlib import Path

import fleets
import numpy as np
import pytest

from benchmarks.beside_flower import flower_network
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle

CLIENTS, ROUNDS = 3, 2


@pytest.fixture(scope="module", params=flower_network.TESTED)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("PROTOFLEET_FLOWER_PYTHON")
    if given and request.param != flower_network.TESTED[0]:
        pytest.skip("PROTOFLEET_FLOWER_PYTHON names one environment")
    if given:
        return Path(given)
    try:
        return flower_network.environment(tmp_path_factory.mktemp("flower") / "venv", request.param)
    except SystemExit as error:
        pytest.skip(f"no environment with flwr: {error}")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_superlink_and_supernodes_come_to_what_our_fleet_comes_to(python: Path, tmp_path: Path) -> None:
    """FedProto for two rounds of training, in the second of which the first one's prototypes pull, and FFC after it."""
    (ours := tmp_path / "ours").mkdir()
    (theirs := tmp_path / "theirs").mkdir()
    path = fleets.bundle(theirs / "fleet.bundle", "fedproto", hyper={"epochs": 1})
    data = [fleets.share(number, (number, number + 1), 80) for number in range(CLIENTS)]  # too many for a factor
    with fleets.fleet_in(ours) as fleet:
        fleet.aggregator([path], "--rounds", ROUNDS, "--min-clients", CLIENTS)
        for number, samples in enumerate(data):
            fleet.client(str(number), path, samples)
        assert set(fleet.finish(240).values()) == {0}, fleet.log("aggregator")
        wanted, identity = fleet.state(read_bundle(path).sha256), read_bundle(path).sha256
    with DurableStore(ours / "store.sqlite", identity, fleets.FLEET) as store:
        run = store.run
    for number, (x, y) in enumerate(data):
        np.savez(theirs / f"{number}.npz", x=x, y=y)
    with flower_network.FlowerNetwork(python, theirs, CLIENTS) as network:
        network.wait_connected()
        network.run("own", rounds=ROUNDS, mark="fedproto", run=run)
        network.run("ffc", rounds=1, mark="ffc", run=run)
    for mark, kind in (("fedproto", "prototypes"), ("ffc", "head")):
        with np.load(theirs / f"{mark}.npz") as found:
            np.testing.assert_array_equal(found[f"{kind}.classes"], wanted.rows[kind].classes)
            assert found[kind].dtype == wanted.rows[kind].rows.dtype == np.float64
            assert found[kind].tobytes() == wanted.rows[kind].rows.tobytes(), kind
