"""What presets change: which weights prototypes are of, a bound on gradients, distances, scaling, whose accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from lab_samples import shares, shipped, some

from protofleet.contract.errors import UsageError
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.lab.algorithms import ALGORITHMS
from protofleet.lab.engine.experiment import _scaling
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.paper_tables.config import Settings
from protofleet.lab.training.local_training import train_eager
from tests.lab.engine.test_federation import _federation, _model, _run


def test_prototypes_by_the_merged_weights_are_those_of_the_model_that_everyone_has() -> None:
    federation = _federation("fedpr-averaged", prototypes="merged")
    gathered = federation.run_round(1)
    model, found = federation.model, federation.algorithm.state()
    own = [ClassMeans.of(model.features(share.x), share.y, 10) for share in shares()]
    holders = np.maximum(sum(each.present.astype(float) for each in own), 1.0)[:, None]
    expected = sum(each.means for each in own) / holders
    means = found["sums"].numpy() / np.maximum(found["counts"].numpy(), 1)[:, None]
    assert np.allclose(means, expected, atol=1e-5)
    assert gathered.uplink_bytes == _federation("fedpr-averaged").run_round(1).uplink_bytes


def test_a_step_moves_no_further_than_the_bound_of_its_gradients() -> None:
    share = some(shipped().train, 8)
    before = {name: tensor.clone() for name, tensor in _model().floats().items()}
    moved = []
    for bound in (0.0, 0.01):
        model, hyper = _model(), ALGORITHMS["fedavg"].resolve({"lr": 1.0, "momentum": 0.0, "clip_norm": bound})
        train_eager(model, share, "fedproto", hyper, epochs=1, batch=1000, lr=1.0, seed=0)
        squares = [float(((tensor - before[name]) ** 2).sum()) for name, tensor in model.floats().items()]
        moved.append(sum(squares) ** 0.5)
    assert moved[1] == pytest.approx(0.01, rel=1e-3)
    assert moved[0] > 0.02


def test_fresh_asks_the_model_that_was_just_trained_about_its_clients_classes() -> None:
    first, last = _run("fedavg", Measures(fresh=True), held=False)
    assert set(last.fresh) == {"head"}
    assert "fresh/head" in last.spread
    assert first.fresh
    assert not _run("fedavg", held=False)[-1].fresh


def test_fedhkds_features_may_be_pulled_by_the_mean_of_squares() -> None:
    losses = [
        _run("fedhkd-averaged", optimizer="sgd", gamma=1.0, feature_loss=kind)[-1].loss for kind in ("l2", "squared")
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_inputs_are_normalised_or_left_between_0_and_1() -> None:
    plain, unit = (Settings(method="fedavg", scaling=kind).experiment("d", 0) for kind in ("normalised", "unit"))
    assert _scaling(unit, shipped()) == ((0.0,), (1.0,))
    mean, std = _scaling(plain, shipped())
    assert mean[0] == pytest.approx(float((shipped().train.x / 255.0).mean()), abs=1e-3)
    assert 0 < std[0] < 1
    with pytest.raises(UsageError, match="scaling, expected normalised or unit, got 255"):
        Settings(method="fedavg", scaling="255").experiment("d", 0)
