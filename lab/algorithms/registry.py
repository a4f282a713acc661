"""Federations that average weights: the papers' baselines, and the papers' own methods as published. Lab only.

On Protofleet's wire no message can carry weights, so these exist here, to be compared with. A baseline is one row of
`BASELINES`, put together from parts: an objective, a head, what stays with each client, what travels beside weights
(`lab/algorithms/shared_knowledge.py`), and hyper-parameters with their sources. Every row takes every base algorithm
(`lab/algorithms/server_rules.py`) as its `base`, so SphereFed on FedNova is `spherefed` with `base=fednova`.
`lab/engine/weight_averaging.py` runs a row.

CCVR and FFC are no rows: they replace the head of whatever was trained, once, at the end
(`lab/algorithms/head_calibration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from contract.errors import MethodError, near_names
from contract.methods import METHODS, Hyper, Value
from lab.algorithms.server_rules import BASES
from lab.engine.local_training import LabHead

__all__ = ["BASELINES", "Baseline"]

_PAPERS = {
    "fedavg": "McMahan et al., AISTATS 2017",
    "fedprox": "Li et al., MLSys 2020",
    "fednova": "Wang et al., NeurIPS 2020",
    "fedopt": "Reddi et al., ICLR 2021",
    "fedper": "Arivazhagan et al., 2019",
    "fedbabu": "Oh et al., ICLR 2022",
    "fednh": "Dai et al., AAAI 2023",
    "fesem": "Xie et al., 2021",
    "fedpr": "Qiao et al., eq. 2 to 4",
    "fedhkd": "Chen, Wang, Vikalo, ICLR 2023",
    "spherefed": "Dong et al., ECCV 2022, eq. 4 and 5",
}

_TRAINING = {
    "lr": Hyper(0.01, "common setting", low=1e-9, high=100.0),
    "momentum": Hyper(0.5, "common setting", high=0.9999),
    "weight_decay": Hyper(0.0, "common setting"),
    "epochs": Hyper(1, "common setting", low=1, high=10_000),
    "optimizer": Hyper("sgd", "of the clients", ("sgd", "adam")),
    "schedule": Hyper("constant", "of lr over rounds; cosine: SphereFed, Tab. 16", ("constant", "cosine")),
    "halve_every": Hyper(0, "steps of a round after which lr halves, again and again; 0: never. FedHKD's public code"),
}
# What only rounds over the air have: how prototypes are weighted, and FFC's projection.
_ON_THE_WIRE = ("aggregation", "project", "project_seed", "delta")
_SERVER = {
    "base": Hyper("fedavg", "lab/algorithms/server_rules.py", BASES),
    "mu": Hyper(0.0, f"proximal term, {_PAPERS['fedprox']}"),
    "server_lr": Hyper(1.0, f"for fedavgm and fedadam, {_PAPERS['fedopt']}", low=1e-9),
    "server_momentum": Hyper(0.9, f"β of fedavgm, β₁ of fedadam, {_PAPERS['fedopt']}", high=0.9999),
    "server_beta": Hyper(0.99, f"β₂ of fedadam, {_PAPERS['fedopt']}", high=0.999999),
    "server_epsilon": Hyper(1e-3, f"τ of fedadam, {_PAPERS['fedopt']}", low=1e-12),
}
_CLOSING = {
    "ridge": METHODS["ffc"].hyper["ridge"],
    "ccvr_virtual": Hyper(2000, "virtual features of a class, Luo et al., NeurIPS 2021; SphereFed: 500", low=1),
    "ccvr_lr": Hyper(0.01, "ours; SphereFed, Tab. 16: 0.00001", low=1e-9),
    "ccvr_epochs": Hyper(10, "ours", low=1),
}
COMMON: Mapping[str, Hyper] = MappingProxyType({**_TRAINING, **_SERVER, **_CLOSING})


@dataclass(frozen=True)
class Baseline:
    """A federation that averages weights.

    Attributes:
        method: the row of the methods table whose objective and hyper-parameters are used; `fednh` has its own.
        head: see `lab.engine.local_training.EagerModel`.
        kept: tensors whose names begin so stay with each client and are never averaged.
        side: what travels beside weights, of `lab.algorithms.shared_knowledge.SIDES`.
        clusters: whether there are several models, and each client belongs to one.
        fixed: hyper-parameters of the objective that make it this baseline's.
        hyper: hyper-parameters that are only this row's, or have another default here.
    """

    summary: str
    source: str
    method: str = "fedproto"
    head: LabHead = "local"
    kept: str | None = None
    side: str | None = None
    clusters: bool = False
    fixed: Mapping[str, Value] = field(default_factory=dict)
    hyper: Mapping[str, Hyper] = field(default_factory=dict)

    @property
    def objective(self) -> str:
        """What clients minimise: of `export.objectives.OBJECTIVES`, or `fednh`."""
        return (METHODS[self.method].objective or "") if self.method in METHODS else self.method

    @property
    def options(self) -> dict[str, Hyper]:
        """Every hyper-parameter that may be given: how clients train, how the server merges, the objective's own."""
        row = METHODS[self.method].hyper if self.method in METHODS else {}
        own = {name: hyper for name, hyper in row.items() if name not in (*_TRAINING, *_ON_THE_WIRE)}
        return {**COMMON, **own, **self.hyper}

    def settle(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Every hyper-parameter: the defaults, overridden by `given` and checked.

        Raises:
            MethodError: for a name this row does not have, or a value out of range.
        """
        free = {name: hyper for name, hyper in self.options.items() if name not in self.fixed}
        for name in given:
            if name not in free:
                raise MethodError(f"this baseline has no hyper-parameter {name!r}", hint=near_names(name, free))
        settled = {name: hyper.check(name, given.get(name, hyper.default)) for name, hyper in free.items()}
        if settled["base"] == "fedprox" and not settled["mu"]:
            raise MethodError("mu", expected="above 0 for the base fedprox", got=0, hint="mu=0.01")
        return {**settled, **self.fixed}


def _cross_entropy(summary: str, paper: str, **parts: object) -> Baseline:
    """A row whose clients minimise the plain cross-entropy of the head."""
    fixed = {"lambda": 0.0, "distance": "squared", "reading": "sample"}
    return Baseline(summary, _PAPERS[paper], fixed=fixed, **parts)  # type: ignore[arg-type]


def _base(name: str, paper: str) -> dict[str, Hyper]:
    return {"base": Hyper(name, _PAPERS[paper], BASES)}


_SPHERE = METHODS["spherefed"].hyper
BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "fedavg": _cross_entropy("cross-entropy, all weights averaged each round", "fedavg"),
        "fedprox": _cross_entropy(
            "FedAvg with a proximal term",
            "fedprox",
            hyper={**_base("fedprox", "fedprox"), "mu": Hyper(0.01, _PAPERS["fedprox"], low=1e-12)},
        ),
        "fednova": _cross_entropy("FedAvg, normalised by local steps", "fednova", hyper=_base("fednova", "fednova")),
        "fedavgm": _cross_entropy("FedAvg, momentum at the server", "fedopt", hyper=_base("fedavgm", "fedopt")),
        "fedadam": _cross_entropy(
            "FedAvg, Adam at the server",
            "fedopt",
            hyper={**_base("fedadam", "fedopt"), "server_lr": Hyper(0.01, _PAPERS["fedopt"], low=1e-9)},
        ),
        "fedper": _cross_entropy("backbones averaged, each client keeps its head", "fedper", kept="head"),
        "fedbabu": _cross_entropy("backbones averaged, the head stays as drawn", "fedbabu", head="initial"),
        "fesem": _cross_entropy(
            "several models, each client in the nearest one's cluster",
            "fesem",
            clusters=True,
            hyper={"clusters": Hyper(3, "the paper tries 2 to 6", low=1, high=1000)},
        ),
        "fednh": Baseline(
            "backbones averaged, a head of unit prototypes moved by the server",
            _PAPERS["fednh"],
            "fednh",
            "normalised",
            side="normalised-head",
            hyper={"smoothing": Hyper(0.9, f"ρ, {_PAPERS['fednh']}", high=1.0)},
        ),
        "fedpr-averaged": Baseline(
            "FedPR as published: weights averaged, prototypes beside",
            _PAPERS["fedpr"],
            "fedpr",
            side="prototypes",
        ),
        "fedhkd-averaged": Baseline(
            "FedHKD as published: weights averaged, hyper-knowledge beside",
            _PAPERS["fedhkd"],
            "fedhkd",
            side="knowledge",
            hyper={name: METHODS["fedhkd"].hyper[name] for name in ("lr", "epochs", "optimizer")},
        ),
        "spherefed": Baseline(
            "unit features against a frozen head, backbones averaged",
            _PAPERS["spherefed"],
            "spherefed",
            "frozen",
            hyper={name: _SPHERE[name] for name in ("lr", "momentum", "weight_decay", "epochs")},
        ),
    }
)
