"""A device outlives a global state that cannot be true, and training that diverges, also after a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from brokers import TestBroker
from edge_peer import Peer
from edge_samples import RUN, announcement, fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DivergedError
from protofleet.contract.methods import method
from protofleet.contract.sums.plausibility import LARGEST_NORM
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.global_state_check import FOREIGN, GlobalStateCheck
from tests.edge_client.run.test_client import Start, bundle, ended, files, finish, history, mosquitto, path, start  # noqa: F401

OWN = (0, 3, 8)
DIVERGES = {"lr": 100.0, "epochs": 5}


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> LocalData:  # noqa: F811
    return fashion(bundle, 45, OWN)


def _state(rows: np.ndarray, version: int = 2, soft: np.ndarray | None = None) -> GlobalState:
    numbers = np.arange(len(rows), dtype=np.uint16)
    kinds = {"prototypes": rows} | ({} if soft is None else {"soft": soft})
    return GlobalState(RUN, version, version, {kind: ClassRows(numbers, given) for kind, given in kinds.items()})


def _caution(**hyper: object) -> GlobalStateCheck:
    fedhkd = method("fedhkd")
    return GlobalStateCheck(fedhkd, fedhkd.resolve(hyper))


def _good(sent: Contribution, factor: float = 1.0, version: int = 1) -> GlobalState:
    return GlobalState(RUN, version, version, {"prototypes": ClassRows(sent.body.classes, factor * sent.body.rows)})


@pytest.mark.parametrize("factor", [1e15, 1e6, -2e3])
def test_a_state_that_cannot_be_true_is_put_aside_for_the_last_good_one(
    bundle: Bundle,  # noqa: F811
    data: LocalData,
    factor: float,
) -> None:
    asked, beside = Device(bundle, data, "pi-1"), Device(bundle, data, "pi-1")
    first = asked.run_round(announcement(bundle), None).contribution
    beside.run_round(announcement(bundle), None)
    good, bad = _good(first), _good(first, factor, version=2)
    for device in (asked, beside):
        assert device.run_round(announcement(bundle, 2), good).refused == ""
    found, expected = (d.run_round(announcement(bundle, 3), s) for d, s in ((asked, bad), (beside, good)))
    assert "global version 2 refused: a prototype of norm" in found.refused
    assert "going on with version 1" in found.refused
    assert encode(found.contribution) == encode(expected.contribution)
    again = asked.run_round(announcement(bundle, 4), _good(first, 1.0, version=3))
    assert again.refused == ""


def test_after_a_restart_it_goes_on_alone(bundle: Bundle, data: LocalData) -> None:  # noqa: F811
    before = Device(bundle, data, "pi-1")
    first = before.run_round(announcement(bundle), None).contribution
    restarted, alone = Device(bundle, data, "pi-1"), Device(bundle, data, "pi-1")
    for device in (restarted, alone):
        device.restore(before.state())
    found = restarted.run_round(announcement(bundle, 2), _good(first, 1e15, version=2))
    assert found.refused.endswith("going on alone")
    assert encode(found.contribution) == encode(alone.run_round(announcement(bundle, 2), None).contribution)


def test_an_evaluation_uses_the_last_good_state(bundle: Bundle, data: LocalData) -> None:  # noqa: F811
    device = Device(bundle, data, "pi-1", test=fashion(bundle, 60, tuple(range(10)), purpose="test"))
    first = device.run_round(announcement(bundle), None).contribution
    good = device.evaluate(_good(first))
    assert good is not None
    assert device.evaluate(_good(first, -1e9, version=2)).all_classes == good.all_classes  # type: ignore[union-attr]


def test_learned_prototypes_are_compared_with_learned_ones(mnist_like_bundle: Callable[..., Path]) -> None:
    made = read_bundle(mnist_like_bundle("fedhp"))
    device = Device(made, fashion(made, 45, OWN), "pi-1")
    rows = 50.0 * made.params["prototypes.learned"].astype(np.float64)
    assert device.run_round(announcement(made), _state(rows)).refused == ""
    assert "refused" in device.run_round(announcement(made, 2), _state(1e5 * rows)).refused


def test_what_is_plausible_follows_from_the_devices_own_means() -> None:
    caution, rows = _caution(), np.ones((3, 4))  # norm 2
    limit = FOREIGN * 0.5 / 2.0
    assert caution.judge(_state(rows * limit * 0.99), lambda: 0.5).refused == ""
    assert caution.judge(_state(rows * limit * 1.01), lambda: 0.5).refused
    assert caution.judge(_state(rows * 1e4), lambda: 0.0).refused == ""  # dead features say nothing of length
    assert caution.judge(_state(rows * LARGEST_NORM), lambda: 0.0).refused
    assert caution.judge(_state(rows * LARGEST_NORM), lambda: 1e30).refused
    for soft, fine in ((np.full((3, 3), 1 / 3), True), (np.full((3, 3), -1e20), False), (np.eye(3) * 3, False)):
        assert (caution.judge(_state(rows, soft=soft), lambda: 1.0).refused == "") == fine
    noised = _state(rows, soft=np.full((3, 3), -2.0))  # what noise makes of few samples is taken where it is declared
    assert _caution(noise=1.0).judge(noised, lambda: 1.0).state is noised
    assert _caution(noise=1.0, noise_on="features").judge(noised, lambda: 1.0).refused
    last = _state(rows)
    assert caution.judge(last, lambda: 1.0).state is last
    assert caution.judge(_state(rows * 1e9), lambda: 1.0).state is last
    another_run = dataclasses.replace(_state(rows * 1e9), run=b"new!")  # whose versions have nothing to do with it
    assert caution.judge(another_run, lambda: 1.0).state is None
    empty = GlobalState(RUN, 1, 1, {"prototypes": ClassRows(np.zeros(0, np.uint16), np.zeros((0, 4)))})
    assert caution.judge(empty, lambda: 1.0).state is empty


def _diverging(bundle: Bundle) -> Bundle:  # noqa: F811
    hyper = {**bundle.manifest.hyper, **DIVERGES}
    return dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, hyper=hyper))


def test_a_diverged_round_changes_nothing_and_can_be_sat_out(bundle: Bundle, data: LocalData) -> None:  # noqa: F811
    device = Device(_diverging(bundle), data, "pi-1")
    device.restore({name: bundle.params[name] for name in bundle.manifest.names("param", "buffer")})
    before = device.state()
    with pytest.raises(DivergedError, match="training diverged"):
        device.run_round(announcement(bundle), None)
    assert all(device.state()[name] is before[name] for name in before)
    sent = device.sit_out(announcement(bundle)).contribution
    assert (len(sent.body.classes), sent.round, sent.method) == (0, 1, "fedproto")


def test_weights_that_are_no_numbers_after_the_last_step_are_a_divergence(bundle: Bundle) -> None:  # noqa: F811
    """One batch, one epoch: the loss was taken before the step that ruined the weights."""
    hyper = {**bundle.manifest.hyper, "lr": 1e38, "epochs": 1}
    made = dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, hyper=hyper))
    device = Device(made, fashion(bundle, 12, OWN), "pi-1")
    with pytest.raises(DivergedError):
        device.run_round(announcement(bundle), None)
    assert device.state() == {}


def test_features_that_are_no_numbers_are_a_divergence(bundle: Bundle, data: LocalData) -> None:  # noqa: F811
    """Weights that are still numbers, and features that are none."""
    device = Device(bundle, data, "pi-1")
    train = device._train

    def ruined(*given: object) -> tuple[float, int]:
        result = train(*given)  # type: ignore[arg-type]
        device._trained = {name: np.full_like(value, 1e30) for name, value in device._trained.items()}
        return result

    device._train = ruined  # type: ignore[method-assign, assignment]
    with pytest.raises(DivergedError):
        device.run_round(announcement(bundle), None)
    assert device.state() == {}


def test_features_longer_than_any_networks_are_a_divergence(bundle, data, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("protofleet.edge_client.device.device.LARGEST_NORM", 1e-3)
    device = Device(bundle, data, "pi-1")
    with pytest.raises(DivergedError, match=r"expected class means of norm 0\.001 at most"):
        device.run_round(announcement(bundle), None)
    assert device.state() == {}


def test_a_client_lives_through_a_bad_state_and_a_restart_with_it_retained(
    mosquitto: TestBroker,  # noqa: F811
    bundle: Bundle,  # noqa: F811
    start: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)
        peer.announce(1)
        sent = peer.contribution(1)
        peer.answer(1)
        peer.give(1, dataclasses.replace(sent, body=ClassRows(sent.body.classes, 1e15 * sent.body.rows)))
        peer.announce(2)
        assert np.linalg.norm(peer.contribution(2).body.rows, axis=1).max() < 1e3
        peer.answer(2)
        client.terminate()
        said = ended(client, 143)
        assert "round 2 (fedproto): global version 1 refused: a prototype of norm" in said
        again = start(mosquitto.url)
        peer.announce(3)
        assert len(peer.contribution(3).body.classes) == len(OWN)
        peer.answer(2)  # the first process may have ended before it heard
        peer.answer(3)
        peer.give(3, sent)
        peer.announce(4)
        peer.contribution(4)
        peer.answer(4)
        finish(peer, 4)
        said = ended(again, 0)
        assert "round 3 (fedproto): global version 1 refused" in said
        assert "round 4 (fedproto): global" not in said


def test_a_client_whose_training_diverges_goes_on(
    mosquitto: TestBroker,  # noqa: F811
    mnist_like_bundle: Callable[..., Path],
    start: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    made = mnist_like_bundle(hyper=DIVERGES)
    with Peer(mosquitto.url, read_bundle(made)) as peer:
        client = start(mosquitto.url, bundle=made)
        for number in (1, 2):
            peer.announce(number)
            assert len(peer.contribution(number).body.classes) == 0
            peer.answer(number)
        peer.announce(3, "ffc", encoding="f64")
        assert peer.contribution(3).triangle is not None
        peer.answer(3, "ffc")
        finish(peer, 3, "ffc")
        said = ended(client, 0)
    assert "round 1 (fedproto): training diverged" in said
    assert "weights as before the round, which is left out" in said
    assert [line["loss"] for line in history(tmp_path)] == [None, None, None]
