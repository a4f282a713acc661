"""What our methods are compared with, as their papers have it. None of these is a method of the wire.

- `fedavg`: the classifier is trained with the rest, all weights go up;
- `published_spherefed`: the classifier is frozen, the backbone's weights go up (SphereFed eq. 4, 5, and its averaging);
- `without_classifier`: no classifier at all, only the distance to prototypes: the most that skipping one can save;
- `published_ffc` and `ccvr`: the two calibrations of SphereFed's section 5.4, over a network whose features are on the
  unit sphere already. CCVR's device sends class means and a covariance (D x D) for each class; its server takes a
  square root of each, draws V virtual features of each class, and trains the classifier on the C*V of them.

The papers' numbers are counted in float32 where they are weights, and in float64 where they are sums, as ours travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protofleet.contract.methods.optimizers import Update
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.hw_profiles.workload.calibration_step import (
    Calibrating,
    Sheet,
    cholesky,
    ridge_solve,
    statistic_work,
    triangle_numbers,
)
from protofleet.hw_profiles.workload.model import Gemm, Workload
from protofleet.hw_profiles.workload.training import Training

__all__ = [
    "VIRTUAL_PER_CLASS",
    "ccvr",
    "features_width",
    "fedavg",
    "published_ffc",
    "published_spherefed",
    "without_classifier",
]

VIRTUAL_PER_CLASS: Mapping[int, int] = {10: 500, 100: 500, 200: 1000}  # SphereFed Tab. 16; 10 classes as CIFAR-100
_AS_PUBLISHED = Update("sgd", None, momentum=0.9, weight_decay=1e-5)  # SphereFed Tab. 16


def _as_published(name: str) -> Update:
    return _AS_PUBLISHED


def fedavg(
    forward: Workload, classes: int, *, update_of: Callable[[str], Update] = _as_published, bias: bool = False
) -> Training:
    """Cross-entropy with everything trained; weights and head go up.

    Args:
        forward: the features graph.
        update_of: how a tensor is moved; default SGD with momentum and weight decay.
    """
    up = 4 * (forward.parameters + classes * features_width(forward))
    return Training("fedavg", classes, "trained", ("cross-entropy",), update_of, bias=bias, uplink_bytes=up)


def published_spherefed(forward: Workload, classes: int) -> Training:
    """A frozen head on unit features; the backbone's weights go up."""
    return Training(
        "spherefed", classes, "frozen", ("squared-error",), _as_published, unit_features=True,
        uplink_bytes=4 * forward.parameters,
    )  # fmt: skip


def without_classifier(forward: Workload, classes: int) -> Training:
    """The distance to each sample's prototype alone; class means go up."""
    up = 4 * classes * features_width(forward)
    return Training("prototypes", classes, "skipped", ("prototype-distance",), _as_published, uplink_bytes=up)


def features_width(forward: Workload) -> int:
    """D of a features graph."""
    return forward.tensors[forward.outputs[0]].shape[1]


def published_ffc(samples: int, classes: int, width: int) -> Calibrating:
    """SphereFed eq. 9 and 10: the Gram matrix, class sums and counts, then one solve."""
    device = statistic_work(FeatureGram.FIELDS, samples, classes, width)
    up = 8 * (triangle_numbers(width) + classes * width + classes)
    return Calibrating("ffc", FeatureGram.NAME, device, up, ridge_solve(classes, width))


def ccvr(samples: int, classes: int, width: int, *, epochs: int = 1, batch: int = 64) -> Calibrating:
    """CCVR, with as many virtual features as SphereFed draws.

    Args:
        epochs: of its server's training on them; the paper does not say how many.
        batch: of that training.
    """
    virtual = VIRTUAL_PER_CLASS.get(classes, 500)
    up = 8 * classes * (triangle_numbers(width) + width + 1)
    server = _ccvr_server(classes, width, virtual, epochs, batch)
    return Calibrating("ccvr", "class-covariances", _ccvr_device(samples, classes, width), up, server)


def _ccvr_device(samples: int, classes: int, width: int) -> Workload:
    sheet = Sheet()
    features, sums = sheet.tensor("features", samples, width), sheet.tensor("class_sums", classes, width)
    sheet.add("class sums", (features,), (sums,), ops=samples * width)
    covariance = sheet.tensor("covariances", classes, width, width)
    class_gram = Gemm(width, width, max(1, -(-samples // classes)), classes)
    ops = samples * width + classes * width * width  # centre, then scale
    sheet.add("covariances", (features,), (covariance,), (class_gram,), ops)
    return sheet.workload("ccvr statistic", samples, (sums, covariance))


def _ccvr_server(classes: int, width: int, virtual: int, epochs: int, batch: int) -> Workload:
    sheet, drawn = Sheet(), classes * virtual
    covariance = sheet.tensor("covariances", classes, width, width)
    noise, features = sheet.tensor("noise", drawn, width), sheet.tensor("virtual", drawn, width)
    roots = tuple(Gemm(g.m, g.n, g.k, g.count * classes) for g in cholesky(width))
    sheet.add("roots", (covariance,), (covariance,), roots, classes * width * width)
    draws = (Gemm(virtual, width, width, classes),)
    ops = 9 * drawn * width  # a normal number takes about 8 operations, the mean one
    sheet.add("draw", (covariance, noise), (features,), draws, ops)
    steps = epochs * -(-drawn // batch)
    head, logits = sheet.tensor("head", classes, width), sheet.tensor("logits", batch, classes)
    products = (Gemm(batch, classes, width, steps), Gemm(width, classes, batch, steps))
    ops = steps * (10 * batch * classes + 4 * classes * width)
    sheet.add("fine-tune", (features, head), (logits, head), products, ops)
    return sheet.workload("ccvr server", 1)
