"""FFC-DP: FFC with noise on what a device sends, which makes it (ε, δ)-differentially private for each of its samples.

The result is a linear head in closed form over frozen unit features (`ffc.py`), from sums and counts that each device
has noised. AdaSSP (Wang, UAI 2018) noises such sums once for all samples; here each device noises its own.

    statistic   A = Σ z zᵀ, B = Σ e_y zᵀ and n = Σ e_y over unit features z, projected where that is agreed and then on
                the unit sphere again, all three with normal noise: contract/privacy/noised_sums.py
    merged      sums of all three: K devices have √K times the noise of one
    head        W = B (Â + λI)⁻¹, λ from the noise: contract/privacy/noised_heads.py; `ridge=adassp`: as the paper
                chooses it
    answer      arg max_j (W z)_j

Guarantee: the choice of what is sent tells nothing of the samples. Every class is always sent, whatever the device has,
and `min_samples` withholds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError
from protofleet.contract.heads.answers import Answer, linear_answer
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.base import Extractor, Hyper, Local, Merged, Method, RowWidth, Solves, Value, noised
from protofleet.contract.methods.ffc import CALIBRATION, agreed_projection, prepared
from protofleet.contract.privacy.noised_heads import noised_head, told_apart
from protofleet.contract.privacy.noised_sums import SumNoise, feature_sums, on_grid
from protofleet.contract.sums.statistics import Field, Rows, Statistic, Triangle
from protofleet.contract.sums.triangle import add_products, pack_triangle, unpack_triangle
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["FFCDP", "NoisedGram"]


@dataclass(frozen=True, eq=False)
class NoisedGram(Statistic):
    """FFC's sums over one shared extractor and numbers of samples, all noised.

    Attributes:
        gram: (D(D+1)/2,) float64, the upper triangle of Σ z zᵀ, row by row.
        cross: (C, D) float64, row j is Σ z over class j.
        sizes: (C, 1) float64, signed fractions.
        counts: (C,) int64, 1 of each class for each device.
    """

    NAME: ClassVar[str] = "noised-gram"
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Triangle("gram", noised=True),
        Rows("cross", travels="sums", holds="noised"),
        Rows("sizes", "one", travels="sums", holds="noised"),
    )
    COUNTED: ClassVar[bool] = False

    gram: NDArray[np.float64]
    cross: NDArray[np.float64]
    sizes: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def matrix(self) -> NDArray[np.float64]:
        """(D, D) A, symmetric."""
        return unpack_triangle(self.gram, self.width)


class FFCDP(Method):
    name = "ffc-dp"
    title = "FFC-DP"
    source = "SphereFed (Dong et al., ECCV 2022), eq. 6 to 12, by the Gaussian mechanism as in AdaSSP (Wang, UAI 2018)"
    summary = "closed-form calibration, with noise for ε"
    sends = "FFC sums and counts, noised"
    inference = "linear head"
    way = "linear"
    statistic = NoisedGram
    extractor: ClassVar[Extractor] = "bundle"
    unit_features = True
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({"head": "features"})
    privacy = "sums of features, of their products and the number of samples of each class, with noise for a stated ε"
    solves: ClassVar[Solves] = "ridge"
    solved_with: ClassVar[tuple[str, ...]] = ("ridge",)
    rounds = 1
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            **noised(),
            "gram_share": Hyper(0.2, "decision 146: of the budget, for A; AdaSSP: a third", low=1e-6, high=0.999),
            "count_share": Hyper(0.05, "decision 146: of the budget, for the counts", low=1e-6, high=0.999),
            "ridge": Hyper(
                "auto",
                "decision 146: of trace/D, from the noise; adassp: Wang, UAI 2018",
                ("auto", "adassp"),
                high=1e6,
                number=True,
            ),
            "project": CALIBRATION["project"],
            "project_seed": CALIBRATION["project_seed"],
        }
    )

    def check(self, hyper: Mapping[str, Value], classes: int, width: int) -> None:
        if int(hyper["project"]) > width:
            raise MethodError("project", expected=f"at most D = {width}", got=hyper["project"])
        self.mechanism(hyper)

    def row_width(self, hyper: Mapping[str, Value], width: int) -> int:
        return int(hyper["project"]) or width

    def preparation(self, hyper: Mapping[str, Value]) -> dict[str, Value]:
        return {name: hyper[name] for name in ("project", "project_seed") if hyper["project"]}

    def agreement(self, hyper: Mapping[str, Value]) -> dict[str, object]:
        return {name: hyper[name] for name in self.hyper if name != "delta"}

    def mechanism(self, hyper: Mapping[str, Value]) -> SumNoise:
        return SumNoise(float(hyper["noise_multiplier"]), float(hyper["gram_share"]), float(hyper["count_share"]))

    def summarise(self, local: Local) -> Statistic:
        """Exact sums of what `local` has, with the noise; of a class that is withheld, nothing."""
        width = self.row_width(local.hyper, local.width)
        gram, sums = np.zeros((width, width)), np.zeros((local.classes, width))
        sizes = np.zeros(local.classes, np.int64)
        for features, labels in local.features(self.extractor):
            z = on_grid(unit_rows(prepared(features, local.hyper)))
            add_products(gram, z)
            sums += feature_sums(z, labels, local.classes)
            sizes += np.bincount(labels, minlength=local.classes)
        mechanism, released = self.mechanism(local.hyper), local.asked
        packed = pack_triangle(gram)
        normal = local.secret_noise(repr(mechanism).encode(), packed, sums, sizes, released)
        triangle = mechanism.noised_triangle(packed, width, normal)
        rows, counts = mechanism.noised_rows(sums, normal), mechanism.noised_counts(sizes, normal)
        return NoisedGram(triangle, rows * released[:, None], counts * released[:, None], released.astype(np.int64))

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """A head for each class that has samples, as far as noise lets see."""
        assert isinstance(merged, NoisedGram)
        return {"head": ClassRows.of(self._head(merged, hyper)[0], self._present(merged, hyper))}

    def told(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        assert isinstance(merged, NoisedGram)
        return self._head(merged, hyper)[1]

    def shared_answers(
        self, state: GlobalState, classes: int, width: int, hyper: Mapping[str, Value]
    ) -> dict[str, Answer]:
        """`linear`: the closed-form head on unit features of the bundle's extractor."""
        if state.head is None or not len(state.head.classes):
            return {}
        head, present = state.head.dense(classes, self.row_width(hyper, width))
        return {self.way: linear_answer(head, present=present, unit=True, project=agreed_projection(width, hyper))}

    def _present(self, merged: NoisedGram, hyper: Mapping[str, Value]) -> NDArray[np.bool_]:
        deviation = np.sqrt(merged.counts) * self.mechanism(hyper).count_deviation
        return np.asarray(merged.present & told_apart(merged.sizes[:, 0], deviation))

    def _head(self, merged: NoisedGram, hyper: Mapping[str, Value]) -> tuple[NDArray[np.float64], str]:
        deviation = math.sqrt(int(merged.counts.max())) * self.mechanism(hyper).gram_deviation
        ridge = hyper["ridge"]
        return noised_head(merged.matrix, merged.cross, deviation, ridge if isinstance(ridge, str) else float(ridge))
