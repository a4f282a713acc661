"""FFC: a linear head in closed form over frozen features, from sums that add up to those of the pooled data.

Dong et al., "SphereFed: Hyperspherical Federated Learning", ECCV 2022, eq. 6 to 12. It runs over the bundle's own
extractor. Every device shares that extractor, whatever it has trained locally, and sums of features add up only over
one extractor.

    statistic   A_i = Σ z zᵀ, b_i = Σ z yᵀ over unit features z = f(x)/‖f(x)‖, projected where that is agreed   eq. 10
    merged      A = Σ_i A_i, b = Σ_i b_i                                                                        eq. 11
    head        W = ((A + λI)⁻¹ b)ᵀ, λ = ridge · trace(A)/D, `auto`: chosen from the sums (contract/heads/ridge.py)
                eq. 12
    answer      arg max_j (W z)_j

With `form=even`, each row of W is divided by the root of its class's share of the samples (`contract/heads/ridge.py`,
`evened`). So labels that came mostly of a few classes do not draw the answers about all others to these. `form=auto`
does so where one class has twice the samples of another; `form=ridge` is eq. 12 always.

With `form=discriminant`, the same sums make another head: the nearest class mean by the covariance within classes, as
GH-OFL (Turazza et al., ICLR 2026) makes it. This head does not prefer the classes of which devices have most samples.

The aggregator chooses form and ridge (`solved_with`); devices send and answer in the same way for every choice.

A device's own sums make a personal head of the same form (`personal_head`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError
from protofleet.contract.heads.answers import Answer, linear_answer
from protofleet.contract.heads.covariance import within_gram
from protofleet.contract.heads.discriminant import chosen_in_words, discriminant_head, doubted_choice, without_bias
from protofleet.contract.heads.ridge import Ridge, doubt, evened, is_uneven, scarce, scarce_or_uneven, solve, solve_in
from protofleet.contract.heads.spectrum import Spectrum, repeated
from protofleet.contract.heads.sphere import projection, unit_rows
from protofleet.contract.methods.base import Extractor, Hyper, Local, Merged, Method, RowWidth, Solves, Value
from protofleet.contract.sums.statistics import FactoredGram, FeatureGram, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = [
    "CALIBRATION",
    "FFC",
    "agreed_projection",
    "closed_form",
    "of_one_device",
    "personal_head",
    "prepared",
    "ridge_of",
]

NARROW = 256  # columns that wide features are projected to, where that is compared (docs/methods.md)
_PAPER = "SphereFed (Dong et al., ECCV 2022)"
CALIBRATION: Mapping[str, Hyper] = MappingProxyType(
    {
        "ridge": Hyper(
            "auto",
            "decision 092: of trace/D, chosen from the sums; the paper's 0 is the limit",
            ("auto",),
            high=1e6,
            number=True,
        ),
        "form": Hyper(
            "auto",
            "decision 261: ridge is eq. 12, even divides its rows by the root of the class's share, auto does so where "
            "classes are unequal; decision 100: discriminant is GH-OFL's of the same sums",
            ("auto", "ridge", "even", "discriminant"),
        ),
        "project": Hyper(
            0, "ours: D' of an agreed random projection, to cut the Gram's bytes; 0 for none", high=65_536
        ),
        "project_seed": Hyper(0, "ours: of that projection", high=2**32 - 1),
    }
)


class FFC(Method):
    name = "ffc"
    title = "FFC"
    source = f"{_PAPER}, eq. 6 to 12"
    summary = "closed-form calibration of the shared backbone"
    sends = "FFC sums"
    inference = "linear head"
    way = "linear"
    statistic = FeatureGram
    extractor: ClassVar[Extractor] = "bundle"
    unit_features = True
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({"head": "features"})
    privacy = "sums of all samples' features and of their products, without noise"
    encoding: ClassVar[Literal["f64", "f32", "f16", "int8", "int32"]] = "f64"
    solves: ClassVar[Solves] = "ridge"
    solved_with: ClassVar[tuple[str, ...]] = ("ridge", "form")
    closes_runs = True
    rounds = 1
    stands = True
    hyper: ClassVar[Mapping[str, Hyper]] = CALIBRATION

    def check(self, hyper: Mapping[str, Value], classes: int, width: int) -> None:
        if int(hyper["project"]) > width:
            raise MethodError("project", expected=f"at most D = {width}", got=hyper["project"])

    def row_width(self, hyper: Mapping[str, Value], width: int) -> int:
        return int(hyper["project"]) or width

    def variants(self, width: int) -> tuple[Mapping[str, Value], ...]:
        """Each head, of whole features and, where these are wide, of projected ones. Of ridge heads `auto` is one."""
        usual = {"form": self.hyper["form"].default}
        heads = [{**usual, **head} for head in super().variants(width) if head.get("form") not in ("ridge", "even")]
        widths = (0, NARROW) if width >= 2 * NARROW else (0,)
        return tuple({**head, "project": project} for project in widths for head in heads)

    def preparation(self, hyper: Mapping[str, Value]) -> dict[str, Value]:
        return {name: hyper[name] for name in ("project", "project_seed") if hyper["project"]}

    def agreement(self, hyper: Mapping[str, Value]) -> dict[str, object]:
        """All but `form`: the aggregator alone makes heads of devices' sums, by that of its own bundle."""
        return {name: hyper[name] for name in CALIBRATION if name != "form"}

    def summarise(self, local: Local) -> Statistic:
        """The sums; of few samples, with a factor in place of the triangle, where the round takes it."""
        blocks = ((prepared(z, local.hyper), labels) for z, labels in local.features(self.extractor))
        width = self.row_width(local.hyper, local.width)
        if not 0 < local.counts.sum() <= local.factor_rows:
            return FeatureGram.over(blocks, local.classes, width)
        features, labels = (np.concatenate(part) for part in zip(*blocks, strict=True))
        factored = FactoredGram.of(features, labels, local.classes, local.noise())
        return FeatureGram.of(features, labels, local.classes) if factored is None else factored

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """The head alone: prototypes stay as they are beside it. A device makes a head of its own factor."""
        assert isinstance(merged, FeatureGram | FactoredGram)
        return {"head": ClassRows.of(closed_form(merged, hyper), merged.present)}

    def told(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        assert isinstance(merged, FeatureGram)
        return _solved(merged, hyper).words

    def doubt(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        assert isinstance(merged, FeatureGram)
        near = doubt(merged, ridge_of(hyper)) or _solved(merged, hyper).doubt
        if near or hyper["form"] == "discriminant":
            return near
        return scarce_or_uneven(merged.counts) if hyper["form"] == "ridge" else scarce(merged.counts)

    def shared_answers(
        self, state: GlobalState, classes: int, width: int, hyper: Mapping[str, Value]
    ) -> dict[str, Answer]:
        """`linear`: the closed-form head on unit features of the bundle's extractor (eq. 12)."""
        if state.head is None or not len(state.head.classes):  # nobody is left who sent any sums
            return {}
        head, present = state.head.dense(classes, self.row_width(hyper, width))
        return {"linear": linear_answer(head, present=present, unit=True, project=agreed_projection(width, hyper))}


def prepared(features: NDArray[np.floating], hyper: Mapping[str, Value]) -> NDArray[np.float64]:
    """Features (N, D) as FFC sums and classifies them: float64 on the unit sphere, projected to (N, D') if agreed."""
    z = np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float64)
    agreed = agreed_projection(z.shape[1], hyper)
    return z if agreed is None else np.asarray(z @ agreed, dtype=np.float64)


def agreed_projection(width: int, hyper: Mapping[str, Value]) -> NDArray[np.float64] | None:
    """The projection (D, D') that the bundle's devices agree on; None for none."""
    return projection(width, int(hyper["project"]), int(hyper["project_seed"])) if hyper["project"] else None


def personal_head(local: Local) -> NDArray[np.float64]:
    """SphereFed's personalised FFC: the closed-form head (C, D) of a device's own samples and features, unprojected.

    A device asks about its classes as often as it has them, so `auto` is eq. 12 here.
    """
    blocks = (
        (np.asarray(unit_rows(z.astype(np.float64)), dtype=np.float64), labels) for z, labels in local.features("local")
    )
    return closed_form(FeatureGram.over(blocks, local.classes, local.width), of_one_device(local.hyper))


def of_one_device(hyper: Mapping[str, Value]) -> Mapping[str, Value]:
    """FFC's hyper-parameters for a head of one device's samples that only this device answers by."""
    return {**hyper, "form": "ridge"} if hyper["form"] == "auto" else hyper


def closed_form(gram: FeatureGram | FactoredGram, hyper: Mapping[str, Value]) -> NDArray[np.float64]:
    """The head (C, D) of these sums, by the `form` and `ridge` among resolved hyper-parameters; W z is its answer."""
    return _solved(gram, hyper).weights


@dataclass(frozen=True, eq=False)
class _Solved:
    """A head (C, D), the choices made for it in words, and why they may be bad."""

    weights: NDArray[np.float64]
    words: str
    doubt: str = ""


_solutions: weakref.WeakKeyDictionary[FeatureGram | FactoredGram, dict[tuple[Value, Value], _Solved]] = (
    weakref.WeakKeyDictionary()
)


def _solved(gram: FeatureGram | FactoredGram, hyper: Mapping[str, Value]) -> _Solved:
    """The head of these sums, solved once and kept: an eigendecomposition of 1,280 columns takes half a second."""
    of_gram, settings = _solutions.setdefault(gram, {}), (hyper["form"], hyper["ridge"])
    if settings not in of_gram:
        if hyper["form"] == "discriminant":
            whole = gram.whole if isinstance(gram, FactoredGram) else gram
            of_gram[settings] = _discriminant(whole, ridge_of(hyper))
        elif hyper["form"] == "ridge":
            of_gram[settings] = _regression(gram, ridge_of(hyper))
        else:
            of_gram[settings] = _evened(_solved(gram, {**hyper, "form": "ridge"}), gram, hyper["form"])
    return of_gram[settings]


def _regression(gram: FeatureGram | FactoredGram, ridge: Ridge) -> _Solved:
    if isinstance(gram, FactoredGram):
        spectrum = Spectrum.of_rows(gram.products.values, np.zeros((0, gram.width)))
        solution = solve_in(spectrum, gram.cross, gram.counts, ridge)
    else:
        solution = solve(gram.matrix, gram.cross, gram.counts, ridge)
    if solution.choice is None:
        return _Solved(solution.weights, f"ridge {solution.ridge:g}, as given")
    why = {"gcv": "by cross-validation on the sums", "noised": "since the sums are noised", "flat": "as no other"}
    doubted = repeated(solution.ridge) if solution.choice.is_limited else ""
    return _Solved(solution.weights, f"ridge {solution.ridge:.2g}, {why[solution.choice.by]}", doubted)


def _evened(head: _Solved, gram: FeatureGram | FactoredGram, form: Value) -> _Solved:
    if form == "auto" and not is_uneven(gram.counts):
        return head
    positive = gram.counts[gram.counts > 0]
    between = f"{positive.min():,} to {positive.max():,}" if len(positive) else "no"
    return replace(
        head,
        weights=evened(head.weights, gram.counts),
        words=f"{head.words}, rows evened: classes have {between} samples",
    )


def _discriminant(gram: FeatureGram, ridge: Ridge) -> _Solved:
    within = within_gram(gram.matrix, gram.cross, gram.counts)
    head = discriminant_head(within, None if ridge == "auto" else ridge)
    words = chosen_in_words(within, None if ridge == "auto" else ridge)
    return _Solved(without_bias(head, within), words, doubted_choice(within) if ridge == "auto" else "")


def ridge_of(hyper: Mapping[str, Value]) -> Ridge:
    """FFC's ridge among resolved hyper-parameters: a number, or `auto`."""
    return "auto" if hyper["ridge"] == "auto" else float(hyper["ridge"])
