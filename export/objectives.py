"""What a training step minimises: one function per objective, written once, in torch.

The lab calls these eagerly; `export` traces the same functions into the graph that a device runs. Each takes a `Scene`,
everything there is at one step, and the method's settled hyper-parameters (contract/methods.py). Each is a mean over
the batch weighted by `sample_weight`, so that padding with weight 0 adds nothing, and each is zero for a batch of
padding only. Sources are cited with the reading that is the default where paper and public code disagree.

    fedproto    cross-entropy of the head, plus λ times the distance of features to the global prototypes; with
                unlabelled samples, their risk beside. FedPR minimises the same.
    fedhp       cross-entropy of the distances to prototypes that are learned, which fixed anchors hold apart
    fedhkd      cross-entropy of the head, plus the distances of what the head says of the global mean features to the
                global soft predictions, and of features to the global mean features
    spherefed   squared error between a frozen orthonormal head on unit features and the one-hot label
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from contract.methods import Value

__all__ = ["OBJECTIVES", "Objective", "Scene", "fedhkd", "fedhp", "fedproto", "spherefed", "unit_features"]


@dataclass(frozen=True, eq=False)
class Scene:
    """What an objective sees of one step.

    Attributes:
        features: f(x), (B, D) float32.
        y: (B,) int64 in [0, C), or −1 for a sample without a label.
        sample_weight: (B,) float32 ≥ 0; 0 is padding.
        head_weight: (C, D), trained or frozen; None where the method has no head.
        head_bias: (C,), or None for a frozen head.
        prototypes: global prototypes, (C, D); rows whose mask is 0 are not read into the loss.
        prototype_mask: (C,) 1 where a global prototype exists.
        soft_predictions: global soft predictions Q, (C, C), row j for class j (FedHKD).
        class_priors: (C,) share of each class among the labelled samples (FedPU).
        learned: the prototypes that are trained here, (C, D) (FedHP).
        anchors: where they are held, (C, D) unit rows (FedHP).
    """

    features: Tensor
    y: Tensor
    sample_weight: Tensor
    head_weight: Tensor | None
    head_bias: Tensor | None
    prototypes: Tensor
    prototype_mask: Tensor
    soft_predictions: Tensor | None = None
    class_priors: Tensor | None = None
    learned: Tensor | None = None
    anchors: Tensor | None = None

    @classmethod
    def of(cls, features: Tensor, given: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Scene:
        """From the step's inputs and state tensors by their names in the bundle."""
        return cls(
            features=features,
            y=given["y"],
            sample_weight=given["sample_weight"],
            head_weight=state.get("head.weight"),
            head_bias=state.get("head.bias"),
            prototypes=given["prototypes"],
            prototype_mask=given["prototype_mask"],
            soft_predictions=given.get("soft_predictions"),
            class_priors=given.get("class_priors"),
            learned=state.get("prototypes.learned"),
            anchors=state.get("prototypes.anchors"),
        )

    @property
    def logits(self) -> Tensor:
        """The head's answers to the features, (B, C)."""
        return self.answers(self.features)

    def answers(self, features: Tensor) -> Tensor:
        """The head's answers to any features (rows, D) → (rows, C)."""
        assert self.head_weight is not None
        logits = features @ self.head_weight.T
        return logits if self.head_bias is None else logits + self.head_bias

    @property
    def labelled(self) -> Tensor:
        """(B,) the sample weights, 0 for samples without a label."""
        return self.sample_weight * (self.y >= 0).to(self.sample_weight.dtype)

    @property
    def classes(self) -> Tensor:
        """(B,) int64 labels with 0 for samples without one, to index by; `labelled` leaves those out."""
        return torch.clamp(self.y, min=0)

    def onehot(self) -> Tensor:
        """(B, C) float32; a row of zeros for a sample without a label."""
        numbers = torch.arange(self.prototypes.shape[0], device=self.y.device)
        return (self.y.unsqueeze(1) == numbers).to(torch.float32)


Objective = Callable[[Scene, Mapping[str, Value]], Tensor]


def fedproto(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """FedProto, eq. 5 and 6, and FedPR, eq. 4: CE(head(f(x)), y) + λ·d(f(x), c̄_y).

    Args:
        hyper: `lambda`; `distance` (squared: ‖·‖²/D, l2: ‖·‖, l1: ‖·‖₁/D, sum: ‖·‖²); `reading` (sample: per sample,
            meaned over the batch; class_mean: of the batch's class means, summed over classes); `pu_weight`, of the
            unlabelled samples' risk (FedPU).

    Returns:
        The loss, a scalar.
    """
    logits, onehot = scene.logits, scene.onehot()
    loss = _cross_entropy(logits, onehot, scene.labelled)
    if hyper["lambda"]:
        pull = _class_mean_pull if hyper.get("reading") == "class_mean" else _sample_pull
        loss = loss + float(hyper["lambda"]) * pull(scene, onehot, str(hyper["distance"]))
    if hyper.get("pu_weight"):
        loss = loss + float(hyper["pu_weight"]) * _positive_unlabelled_risk(scene, logits, onehot)
    return loss


def fedhp(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """FedHP, eq. 1, 2 and 4: mean of −log softmax_j(−‖f(x) − π_j‖₂)[y] + λ·(1/C)·Σ_j (1 − cos(π̄_j, π_j)).

    Args:
        hyper: `lambda`; `anchor_pull`, whether the second term is the mean over classes or the printed sum.
    """
    assert scene.learned is not None
    assert scene.anchors is not None
    difference = scene.features.unsqueeze(1) - scene.learned.unsqueeze(0)  # (B, C, D)
    distance = _norms((difference * difference).sum(dim=2))  # (B, C)
    loss = _cross_entropy(-distance, scene.onehot(), scene.labelled)
    cosine = (unit_features(scene.learned) * scene.anchors).sum(dim=1)  # (C,)
    apart = 1.0 - cosine
    pull = apart.mean() if hyper["anchor_pull"] == "mean" else apart.sum()
    real = torch.clamp(scene.labelled.sum(), max=1.0)  # a batch of padding costs nothing
    return loss + float(hyper["lambda"]) * real * pull


def fedhkd(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """FedHKD's local loss: CE + λ·(1/C)·Σ_j ‖softmax(G(H_j)/T) − Q_j‖₂ + γ·mean of ‖f(x) − H_y‖₂.

    H are the global mean features, Q the global soft predictions and G the head. Classes without global knowledge are
    left out of both sums, so that the first round is cross-entropy alone.

    Args:
        hyper: `lambda`, `gamma`, `temperature` T.
    """
    assert scene.soft_predictions is not None
    onehot = scene.onehot()
    loss = _cross_entropy(scene.logits, onehot, scene.labelled)
    soft = torch.softmax(scene.answers(scene.prototypes) / float(hyper["temperature"]), dim=1)  # (C, C)
    difference = soft - scene.soft_predictions
    apart = _norms((difference * difference).sum(dim=1)) * scene.prototype_mask  # (C,)
    real = torch.clamp(scene.labelled.sum(), max=1.0)
    return (
        loss + float(hyper["lambda"]) * real * apart.mean() + float(hyper["gamma"]) * _sample_pull(scene, onehot, "l2")
    )


def spherefed(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """SphereFed, eq. 4 and 5: mean over batch and classes of (W·z − onehot(y))², z = f(x)/‖f(x)‖, W W ᵀ = I."""
    assert scene.head_weight is not None
    error = unit_features(scene.features) @ scene.head_weight.T - scene.onehot()  # (B, C)
    return _weighted_mean((error * error).mean(dim=1), scene.labelled)


OBJECTIVES: dict[str, Objective] = {"fedproto": fedproto, "fedhp": fedhp, "fedhkd": fedhkd, "spherefed": spherefed}


def unit_features(features: Tensor) -> Tensor:
    """Each row of (B, D) divided by its Euclidean norm, with a floor of 1e-12."""
    return torch.nn.functional.normalize(features, dim=1, eps=1e-12)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Σ w v / Σ w, and 0 where all weights are 0."""
    total = weight.sum()
    return (values * weight).sum() / torch.where(total > 0, total, torch.ones_like(total))


def _cross_entropy(logits: Tensor, onehot: Tensor, weight: Tensor) -> Tensor:
    return _weighted_mean(-(torch.log_softmax(logits, dim=1) * onehot).sum(dim=1), weight)


def _norms(squares: Tensor) -> Tensor:
    """Square roots; the root has no gradient at 0, and gets the gradient 0 there."""
    away = squares > 0
    roots = torch.sqrt(torch.where(away, squares, torch.ones_like(squares)))
    return torch.where(away, roots, torch.zeros_like(squares))


def _distance(difference: Tensor, kind: str) -> Tensor:
    """d of FedProto's eq. 6 for rows of differences (rows, D) → (rows,)."""
    if kind == "squared":
        return (difference * difference).mean(dim=1)
    if kind == "l1":
        return difference.abs().mean(dim=1)
    squares = (difference * difference).sum(dim=1)
    return squares if kind == "sum" else _norms(squares)


def _sample_pull(scene: Scene, onehot: Tensor, kind: str) -> Tensor:
    """Mean over the batch of each sample's distance to its class's prototype; 0 where there is none."""
    target = torch.index_select(scene.prototypes, 0, scene.classes)  # (B, D)
    held = torch.index_select(scene.prototype_mask, 0, scene.classes)  # (B,)
    return _weighted_mean(_distance(scene.features - target, kind) * held, scene.labelled)


def _class_mean_pull(scene: Scene, onehot: Tensor, kind: str) -> Tensor:
    """Sum over classes in the batch of the distance between the class's mean feature and its prototype."""
    members = (onehot * scene.labelled.unsqueeze(1)).T  # (C, B)
    count = members.sum(dim=1)  # (C,)
    present = count > 0
    mean = (members @ scene.features) / torch.where(present, count, torch.ones_like(count)).unsqueeze(1)  # (C, D)
    return (_distance(mean - scene.prototypes, kind) * scene.prototype_mask * present.to(torch.float32)).sum()


def _positive_unlabelled_risk(scene: Scene, logits: Tensor, onehot: Tensor) -> Tensor:
    """The non-negative risk of one-vs-rest classifiers on labelled and unlabelled samples, mean over classes held.

    For class j with prior π_j and logit g_j, under the logistic loss ℓ: π_j·E_j[ℓ(g_j)] + max(0, E_u[ℓ(−g_j)] −
    π_j·E_j[ℓ(−g_j)]), E_j over the batch's samples labelled j and E_u over its unlabelled ones (Kiryo et al., NeurIPS
    2017; over classes as in FedPU, Lin et al., ICML 2022). A class or a batch without such samples adds nothing.
    """
    assert scene.class_priors is not None
    members = onehot * scene.labelled.unsqueeze(1)  # (B, C)
    unlabelled = (scene.sample_weight - scene.labelled).unsqueeze(1)  # (B, 1)
    positive, negative = _softplus(-logits), _softplus(logits)  # (B, C): ℓ(g), ℓ(−g)
    of_class = [_column_mean(loss, members) for loss in (positive, negative)]
    rest = _column_mean(negative, unlabelled.expand_as(negative)) - scene.class_priors * of_class[1]
    risk = scene.class_priors * of_class[0] + torch.relu(rest)  # (C,)
    held = (scene.class_priors > 0).to(torch.float32)
    return (risk * held).sum() / torch.clamp(held.sum(), min=1.0)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ), of plain operators."""
    return torch.relu(x) + torch.log(1.0 + torch.exp(-x.abs()))


def _column_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Σ w v / Σ w for each column of (B, C), and 0 where all weights are 0."""
    total = weight.sum(dim=0)
    return (values * weight).sum(dim=0) / torch.where(total > 0, total, torch.ones_like(total))
