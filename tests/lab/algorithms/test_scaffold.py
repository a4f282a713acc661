"""SCAFFOLD: the hooks of `lab/algorithms/base.py` against the paper's algorithm in plain numpy, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab_samples import shares
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError
from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.algorithms import ALGORITHMS, RULES
from protofleet.lab.algorithms.base import Outcome, WeightRule
from protofleet.lab.engine.deployed import Course
from protofleet.lab.engine.weight_averaging import Federation
from protofleet.lab.training.local_training import EagerModel, Fitted

# Three clients with quadratic objectives ½(w − m_i)ᵀ H_i (w − m_i): their optima differ, and so do their curvatures, so
# that an average of clients that have each walked several steps is not the optimum of the sum.
CURVATURE = np.array([[1.0, 4.0], [6.0, 0.5], [2.0, 2.0]])
OPTIMUM = np.array([[3.0, -1.0], [-2.0, 4.0], [0.5, 0.5]])
LR, STEPS = 0.05, 8


def _run(rule: WeightRule, rounds: int, part: tuple[tuple[int, ...], ...] = ((0, 1, 2),)) -> NDArray[np.float64]:
    """The weights after each round, by the hooks as the engine calls them; round r takes `part[r % len(part)]`."""
    start = {"w": torch.zeros(2, dtype=torch.float64)}
    seen = []
    for number in range(rounds):
        outcomes = []
        for client in part[number % len(part)]:
            p = torch.nn.Parameter(start["w"].clone())
            correct = rule.correction(rule.told(client), start)
            for _ in range(STEPS):
                p.grad = torch.from_numpy(CURVATURE[client]) * (p.detach() - torch.from_numpy(OPTIMUM[client]))
                if correct is not None:
                    correct({"w": p})
                p.data.sub_(LR * p.grad)
            state = {"w": p.detach().clone()}
            rule.trained(client, start, state, Fitted(0.0, STEPS, float(STEPS), LR))
            outcomes.append(Outcome(client, state, 10 * (client + 1), float(STEPS), 0.0))  # all count the same
        start = rule.merge(start, outcomes)
        seen.append(start["w"].numpy().copy())
    return np.array(seen)


def _naive(rounds: int, part: tuple[tuple[int, ...], ...], server_lr: float) -> NDArray[np.float64]:
    """Algorithm 1 of the paper, option II, line by line."""
    x, c, own, seen = np.zeros(2), np.zeros(2), np.zeros((3, 2)), []
    for number in range(rounds):
        chosen, moved, changed = part[number % len(part)], [], []
        for i in chosen:
            y = x.copy()
            for _ in range(STEPS):
                y = y - LR * (CURVATURE[i] * (y - OPTIMUM[i]) - own[i] + c)
            plus = own[i] - c + (x - y) / (STEPS * LR)
            moved.append(y - x)
            changed.append(plus - own[i])
            own[i] = plus
        x = x + server_lr * np.mean(moved, axis=0)
        c = c + len(chosen) / 3 * np.mean(changed, axis=0)
        seen.append(x.copy())
    return np.array(seen)


def _rule(name: str, **hyper: object) -> WeightRule:
    return RULES[name](ALGORITHMS[name].resolve(hyper), frozenset({"w"}), 3)


@pytest.mark.parametrize("part", [((0, 1, 2),), ((0, 1), (2,), (1, 2))])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_it_is_the_papers_algorithm(part: tuple[tuple[int, ...], ...], server_lr: float) -> None:
    found = _run(_rule("scaffold", server_lr=server_lr), 7, part)
    np.testing.assert_allclose(found, _naive(7, part, server_lr), rtol=1e-10, atol=1e-12)


def test_it_reaches_the_common_optimum_that_fedavg_misses() -> None:
    best = (CURVATURE * OPTIMUM).sum(axis=0) / CURVATURE.sum(axis=0)
    averaged, corrected = _run(_rule("fedavg"), 300)[-1], _run(_rule("scaffold"), 300)[-1]
    assert np.linalg.norm(averaged - best) > 0.1
    np.testing.assert_allclose(corrected, best, atol=1e-6)


def _federation(**hyper: object) -> Federation:
    algorithm = ALGORITHMS["scaffold"]
    net, width = build_backbone("fedproto_mnist", (28, 28, 1), seed=3)
    model = EagerModel(net, classes=10, features=width, mean=(0.5,), std=(0.5,), seed=3)
    settled = algorithm.resolve({"lr": 0.02, "epochs": 1, **hyper})
    return Federation(algorithm, model, shares(), Course(rounds=3, calibrate=False), settled, batch=8)


def test_a_client_sends_its_control_variate_beside_its_weights() -> None:
    gathered = _federation().run_round(1)
    weights = sum(p.numel() for p in _federation().model.parameters())
    assert set(gathered.uplink_bytes) == {8 * weights}


def test_a_federation_goes_on_from_its_state_with_the_same_control_variates() -> None:
    whole, first, second = _federation(), _federation(), _federation()
    whole.run_round(1)
    whole.run_round(2)
    first.run_round(1)
    second.restore(first.state())
    second.run_round(2)
    for name, tensor in whole.centres[0].items():
        assert torch.equal(tensor, second.centres[0][name]), name


def test_what_it_cannot_do_is_one_line() -> None:
    with pytest.raises(MethodError, match="optimizer, expected sgd, for the base scaffold, got adam"):
        _federation(optimizer="adam")
    settled = ALGORITHMS["fesem"].resolve({"base": "scaffold"})
    with pytest.raises(MethodError, match="base, expected one without a client state of its own"):
        ALGORITHMS["fesem"](10, 50, settled, 3)
