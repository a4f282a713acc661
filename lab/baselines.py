"""Federations that average weights, in torch: what prototypes are compared with. They exist in the lab only.

On Protofleet's wire no message can carry weights, so these run here and nowhere else:

- `fedavg` (McMahan et al., AISTATS 2017): clients minimise cross-entropy from the global weights, the server averages
  the results by sample counts, running statistics of BatchNorm included;
- `spherefed` (Dong et al., ECCV 2022): the same averaging, but the head is a frozen orthonormal frame and the
  objective the squared error of unit features, eq. 5.

Either may end in an FFC calibration, eq. 6 to 12: every client's Gram and cross sums over the averaged extractor, and
the closed-form head that the fleet would get over the air.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.methods import METHODS, Value, method
from contract.ridge import solve_head
from contract.sampling import sampled
from contract.sphere import unit_rows
from contract.statistics import FeatureGram
from edge_client.data import LocalData
from edge_client.device import round_seed
from lab.eager import EagerModel, train_eager
from lab.simulate import Course, OnDevice, OnRound, RoundRecord, run_id

__all__ = ["BASELINES", "Baseline", "average", "calibrated_head", "run_baseline"]


@dataclass(frozen=True)
class Baseline:
    """A federation that averages weights.

    Attributes:
        method: the row of the methods table whose objective and hyper-parameters are used.
        fixed: hyper-parameters that make that row this baseline.
    """

    method: str
    head: str
    summary: str
    fixed: Mapping[str, Value] = field(default_factory=dict)

    def settle(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Every hyper-parameter, checked."""
        return {**method(self.method).settle({**given, **self.fixed})}


BASELINES = {
    "fedavg": Baseline("fedproto", "local", "cross-entropy, all weights averaged each round", {"lambda": 0.0}),
    "spherefed": Baseline("spherefed", "frozen", "unit features against a frozen head, backbones averaged each round"),
}


def run_baseline(
    baseline: Baseline,
    model: EagerModel,
    shares: Sequence[LocalData],
    test: LocalData,
    course: Course,
    hyper: Mapping[str, Value],
    *,
    batch: int,
    on_round: OnRound | None = None,
    on_device: OnDevice | None = None,
) -> list[RoundRecord]:
    """Train `model` in place by rounds of local training and averaging.

    Args:
        shares: each client's samples.
        course: rounds, sampling and seed; with `calibrate`, the last record carries `linear`, the FFC head's accuracy.
        hyper: settled hyper-parameters.
        batch: B.

    Raises:
        MethodError: when training diverges.
    """
    records = []
    for number in range(1, course.rounds + 1):
        record = _round(baseline, model, shares, course, hyper, number, batch, on_device)
        last = number == course.rounds
        if last or number % course.evaluate_every == 0:
            answers = {"head": model.predict(test.x)}
            if last and course.calibrate:
                head = calibrated_head(model, shares, float(METHODS["ffc"].hyper["ridge"].default))
                answers["linear"] = np.asarray((model.features(test.x) @ head.T).argmax(axis=1), dtype=np.int64)
            record.own_classes.update(_mean_own(answers, test, shares))
            record.all_classes.update({way: float((found == test.y).mean()) for way, found in answers.items()})
        records.append(record)
        if on_round is not None:
            on_round(record)
    return records


def average(states: Sequence[Mapping[str, Tensor]], samples: Sequence[int]) -> dict[str, Tensor]:
    """FedAvg: Σ n_i w_i / Σ n_i for each tensor, summed in float64, in the tensors' own dtype."""
    shares = [n / sum(samples) for n in samples]
    averaged = {}
    for name, like in states[0].items():
        stacked = torch.stack(
            [state[name].to(torch.float64) * share for state, share in zip(states, shares, strict=True)]
        )
        averaged[name] = stacked.sum(dim=0).to(like.dtype)
    return averaged


def calibrated_head(model: EagerModel, shares: Sequence[LocalData], ridge: float) -> NDArray[np.float64]:
    """FFC over the model's extractor: the head (C, D) from the clients' summed Gram and cross sums."""
    classes, width = model.head_weight.shape
    total = FeatureGram.zero(classes, width)
    for share in shares:
        total = total.merge(FeatureGram.of(unit_rows(model.features(share.x).astype(np.float64)), share.y, classes))
    return solve_head(total, ridge)


def _round(
    baseline: Baseline,
    model: EagerModel,
    shares: Sequence[LocalData],
    course: Course,
    hyper: Mapping[str, Value],
    number: int,
    batch: int,
    on_device: OnDevice | None,
) -> RoundRecord:
    start = copy.deepcopy(model.state_dict())
    states, samples, losses = [], [], []
    for turn, share in enumerate(shares):
        name = f"device-{turn + 1}"
        if on_device is not None:
            on_device(number, turn)
        if not sampled(name, number, course.seed, course.fraction):
            continue
        model.load_state_dict(start)
        losses.append(
            train_eager(
                model,
                share,
                METHODS[baseline.method].objective or "",
                hyper,
                epochs=int(hyper["epochs"]),
                batch=batch,
                lr=float(hyper["lr"]),
                seed=round_seed(name, run_id(course.seed), number),
            )
        )
        states.append({key: tensor.clone() for key, tensor in model.floats().items()})
        samples.append(len(share))
    model.load_state_dict({**start, **(average(states, samples) if states else {})})
    sent = sum(tensor.numel() * 4 for tensor in model.floats().values())
    loss = float(np.average(losses, weights=samples)) if losses else None
    return RoundRecord(number, "average", len(states), loss, float(sent))


def _mean_own(
    answers: Mapping[str, NDArray[np.int64]], test: LocalData, shares: Sequence[LocalData]
) -> dict[str, float]:
    """By way of answering: accuracy on the test images of each client's own classes, mean over clients."""
    own = [np.isin(test.y, np.unique(share.y)) for share in shares]
    return {way: float(np.mean([(found == test.y)[rows].mean() for rows in own])) for way, found in answers.items()}
