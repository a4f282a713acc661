"""The device's core: what happens in a round, as a function of bundle, data, announcement and global state.

No MQTT, no files, no clock: the client drives this class over a broker, the lab drives the very same class in one
process. A round follows the method's row in `contract/methods.py`:

1. a global state that cannot be true is put aside (`edge_client/caution.py`), and the last good one is taken instead;
2. if the method trains, train on the local samples from the device's present weights, given the global state (what
   that does is the objective's, export/objectives.py); prototypes that are learned (FedHP) start as the global ones;
3. extract features with the extractor that the method names: the device's own `local` weights, or the `bundle`'s
   initial ones, which all devices share whatever they trained locally (Gram sums only add up over one extractor);
4. sum them into the method's statistic, small classes withheld, and wrap it as a contribution. FedHP's statistic is the
   learned prototypes; SphereFed's rounds have none; FedHKD's gets noise where its bundle says so.

A round whose training diverges has no result, and leaves the device's weights as they were: `run_round` says so, and
`sit_out` is what may be sent for it, so that nobody waits.

Everything random comes from (device, run, round), and noise from a secret beside, so a round that is repeated after a
crash, from the same weights and the same global state, gives the identical contribution. With an empty global state, a
round is plain local training: that is the lab's local-only baseline.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Bundle
from contract.errors import BundleError, DivergedError, MethodError, StatisticError
from contract.messages import Announcement, Contribution
from contract.methods import Method, calibration, method
from contract.plausible import LARGEST_NORM, DeclaredNoise, largest_norm
from contract.ridge import solve_head
from contract.state import GlobalState
from contract.statistics import ClassMeans, FeatureGram, HyperKnowledge, Statistic
from contract.topics import check_device
from edge_client.caution import Caution
from edge_client.data import LocalData
from edge_client.evaluate import Answer, Evaluation, linear_answer, nearest_answer, score, summary
from edge_client.extractor import Extractor
from edge_client.privacy import Mechanism
from edge_client.summarise import calibrated_features, class_means, feature_gram, hyper_knowledge, withhold
from edge_client.trainer import OnStep, Weights, diverged
from edge_client.workbench import Workbench

__all__ = ["Device", "RoundResult", "round_seed"]

LEARNED = "prototypes.learned"


@dataclass(frozen=True, eq=False)
class RoundResult:
    """What a round gave.

    Attributes:
        contribution: what may be sent; without class rows when the method sends nothing else.
        loss: mean training loss over the round's samples; None when the method trains nothing.
        samples: local samples in the statistic.
        steps: training steps done.
        refused: why the given global state was not trained on; empty when it was.
    """

    contribution: Contribution
    loss: float | None
    samples: int
    steps: int
    refused: str = ""


def round_seed(device_id: str, run: bytes, round_number: int) -> int:
    """The seed of a device's round: the first 8 bytes, big-endian, of SHA-256 over `device|run in hex|round`."""
    digest = hashlib.sha256(f"{device_id}|{run.hex()}|{round_number}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


class Device:
    """One device: its weights, its samples, and what it does in a round.

    Args:
        bundle: the fleet's bundle.
        data: local training samples.
        device_id: as in its topics.
        test: local test samples; without them `evaluate` returns None.
        threads: within an operator.
        workbench: shared compiled graphs, for many devices in one process; its own when None.
        secret: what noise is drawn from; 32 random bytes when None.

    Raises:
        UsageError: when `device_id` cannot be a device's.
    """

    def __init__(
        self,
        bundle: Bundle,
        data: LocalData,
        device_id: str,
        *,
        test: LocalData | None = None,
        threads: int = 1,
        workbench: Workbench | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._bundle, self._manifest = bundle, bundle.manifest
        self._data, self._test = data.labelled, test
        self._training_data = data if bundle.manifest.hyper.get("pu_weight") else self._data
        self._secret = secret or os.urandom(32)
        self._id = check_device(device_id, "device id")
        self._workbench = workbench or Workbench(bundle, threads)
        self._trained: dict[str, NDArray[np.float32]] = {}
        self._own_means: ClassMeans | None = None
        self._caution = Caution(DeclaredNoise.of(bundle.manifest.hyper))

    @property
    def own_classes(self) -> NDArray[np.bool_]:
        """(C,) which classes the device holds samples of."""
        return self._data.counts(self._manifest.classes) > 0

    def state(self) -> dict[str, NDArray[np.float32]]:
        """What training has changed so far: weights and running statistics by name; empty before the first round."""
        return dict(self._trained)

    def restore(self, state: Weights) -> None:
        """Go on from a state that `state` returned.

        Raises:
            BundleError: when it is not of this bundle.
        """
        shapes = {t.name: t.shape for t in self._manifest.state if t.role in ("param", "buffer")}
        if state and {name: value.shape for name, value in state.items()} != shapes:
            raise BundleError("device state", expected="the bundle's tensors", got="others", hint="another --state")
        self._trained, self._own_means = dict(state), None

    def run_round(
        self, announcement: Announcement, global_state: GlobalState | None, *, on_step: OnStep | None = None
    ) -> RoundResult:
        """Take part in the announced round.

        Args:
            announcement: which round of which method; its method is the bundle's own, or `ffc`.
            global_state: the state of the announced version; None or an empty one before the first.
            on_step: called after each training step with the steps done and the steps in all.

        Raises:
            MethodError: for another method.
            DivergedError: when training diverges. The device's weights are then those of before the round.
            WireError: when the global state is not of this fleet.
        """
        row = self._row(announcement.method)
        if row.objective is None:
            statistic = self._summarise(row, announcement)
            return RoundResult(self._wrapped(statistic, announcement), None, int(statistic.counts.sum()), 0)
        judged, before = self._caution.judge(global_state, self._longest), (self._trained, self._own_means)
        seed = round_seed(self._id, announcement.run, announcement.round)
        try:
            loss, steps = self._train(judged.state, seed, on_step)
            statistic = self._trained_statistic(row, announcement)
        except DivergedError:
            self._trained, self._own_means = before
            raise
        samples = int(statistic.counts.sum())
        return RoundResult(self._wrapped(statistic, announcement), loss, samples, steps, judged.refused)

    def sit_out(self, announcement: Announcement) -> RoundResult:
        """What may be sent for a round without a result: that the device took part, and no class rows.

        Where noise is added, it is what the weights of before the round give: whether training diverged follows from
        the samples, and must not be told without noise.
        """
        m, row = self._manifest, self._row(announcement.method)
        if row.statistic == "hyper-knowledge" and Mechanism.of(m.hyper).noise:
            statistic = self._hyper_knowledge(announcement)
            return RoundResult(self._wrapped(statistic, announcement), None, int(statistic.counts.sum()), 0)
        zero = HyperKnowledge.zero if row.statistic == "hyper-knowledge" else ClassMeans.zero
        return RoundResult(self._wrapped(zero(m.classes, m.features), announcement), None, 0, 0)

    def evaluate(self, global_state: GlobalState | None) -> Evaluation | None:
        """How well the device answers now, given this global state; None without test samples.

        Raises:
            WireError: when the global state is not of this fleet.
        """
        if self._test is None:
            return None
        classes, global_state = self._manifest.classes, self._caution.judge(global_state, self._longest).state
        extractor = self._extractor()
        confusion = score(extractor, self._local_answers(extractor, global_state), self._test, classes=classes)
        if global_state is not None and global_state.head is not None:
            settings = calibration(self._manifest.hyper)
            head, _ = global_state.head.dense(classes, settings.width(self._manifest.features))
            answers = {"linear": linear_answer(head, prepare=lambda z: calibrated_features(z, settings))}
            confusion |= score(self._workbench.shared_extractor(), answers, self._test, classes=classes)
        return summary(confusion, self.own_classes)

    def _row(self, name: str) -> Method:
        own = self._manifest.method
        if name not in (own, "ffc"):
            raise MethodError("the announced method", expected=f"{own} or ffc, as the bundle allows", got=name)
        return method(name)

    def _train(self, global_state: GlobalState | None, seed: int, on_step: OnStep | None) -> tuple[float, int]:
        m, data = self._manifest, self._training_data
        epochs, lr = int(m.hyper["epochs"]), float(m.hyper["lr"])
        trainer = self._workbench.trainer()
        given = self._given(global_state)
        trainer.load_state({**self._params(), **self._received(given)})
        loss = trainer.fit(data, epochs=epochs, lr=lr, given=given, seed=seed, on_step=on_step)
        self._trained, self._own_means = trainer.export_state(), None
        return loss, epochs * -(-len(data) // m.batch)

    def _trained_statistic(self, row: Method, announcement: Announcement) -> Statistic:
        """The statistic of what was just trained.

        Raises:
            DivergedError: when the features are no finite numbers, or longer than any network's are.
        """
        try:
            statistic = self._summarise(row, announcement)
        except StatisticError as error:
            raise diverged("finite features", str(error)) from None
        longest = 0.0 if isinstance(statistic, FeatureGram) else largest_norm(statistic.means)
        if longest > LARGEST_NORM:
            raise diverged(f"class means of norm {LARGEST_NORM:g} at most", f"{longest:.3g}")
        return statistic

    def _wrapped(self, statistic: Statistic, announcement: Announcement) -> Contribution:
        a = announcement
        return Contribution.of(statistic, run=a.run, round=a.round, method=a.method, bundle=self._bundle.sha256)

    def _longest(self) -> float:
        """The norm of the longest of the device's own class means, or of its learned prototypes."""
        params = self._params()
        return largest_norm(params[LEARNED] if LEARNED in params else self._means(self._extractor()).means)

    def _given(self, global_state: GlobalState | None) -> dict[str, NDArray[np.float32]]:
        """The global state, and what the device knows of its labels, as the training step takes them."""
        m, state = self._manifest, global_state or GlobalState(bytes(4), 0, 0)
        prototypes, mask = state.dense_prototypes(m.classes, m.features)
        counts = self._data.counts(m.classes)
        return {
            "prototypes": prototypes,
            "prototype_mask": mask,
            "soft_predictions": state.dense_soft(m.classes),
            "class_priors": (counts / counts.sum()).astype(np.float32),
        }

    def _received(self, given: Weights) -> dict[str, NDArray[np.float32]]:
        """Learned prototypes to start from: the global ones, and the device's own where there is none."""
        params = self._params()
        if LEARNED not in params:
            return {}
        return {LEARNED: np.where(given["prototype_mask"][:, None] > 0, given["prototypes"], params[LEARNED])}

    def _summarise(self, row: Method, announcement: Announcement) -> Statistic:
        m, least = self._manifest, announcement.min_samples
        if row.statistic == "participation":
            return ClassMeans.zero(m.classes, m.features)
        if row.statistic == "learned-prototypes":
            return withhold(ClassMeans.from_means(self._params()[LEARNED], self._data.counts(m.classes)), least)
        if row.statistic == "class-means":
            return withhold(self._means(self._extractor()), least)
        if row.statistic == "hyper-knowledge":
            return self._hyper_knowledge(announcement)
        settings = calibration(m.hyper)
        return feature_gram(
            self._workbench.shared_extractor(), self._data, settings, classes=m.classes, min_samples=least
        )

    def _hyper_knowledge(self, announcement: Announcement) -> Statistic:
        m, params = self._manifest, self._params()
        mechanism = Mechanism.of(m.hyper)
        found = hyper_knowledge(
            self._extractor(),
            (params["head.weight"], params.get("head.bias")),
            self._data,
            mechanism,
            classes=m.classes,
            temperature=float(m.hyper["temperature"]),
            min_samples=announcement.min_samples,
        )
        return mechanism.released(found, self._secret, announcement.run + announcement.round.to_bytes(8, "big"))

    def _local_answers(self, extractor: Extractor, global_state: GlobalState | None) -> dict[str, Answer]:
        """The ways of answering from the device's own features."""
        classes, width, params = self._manifest.classes, self._manifest.features, self._params()
        own = self._means(extractor)
        mine, known = own.means, own.present
        if LEARNED in params:
            mine, known = params[LEARNED].astype(np.float64), np.ones(classes, dtype=bool)
        prototypes, present = mine, known
        if global_state is not None and global_state.prototypes is not None:
            shared, shared_present = global_state.prototypes.dense(classes, width)
            prototypes = np.where(shared_present[:, None], shared, prototypes)
            present = present | shared_present
        answers = {
            "prototype": nearest_answer(prototypes, present),
            "prototype_among_own": nearest_answer(prototypes, own.present),
            "own_prototype": nearest_answer(mine, known),
        }
        if "head.weight" in params:
            answers["head"] = linear_answer(params["head.weight"], params.get("head.bias"))
        if method(self._manifest.method).unit_features:
            settings = replace(calibration(self._manifest.hyper), project=0)
            gram = feature_gram(extractor, self._data, settings, classes=classes)
            answers["personal"] = linear_answer(solve_head(gram, settings.ridge))
        return answers

    def _means(self, extractor: Extractor) -> ClassMeans:
        """The device's own class means under its present weights, nothing withheld; computed once for each weights."""
        if self._own_means is None:
            self._own_means = class_means(extractor, self._data, classes=self._manifest.classes)
        return self._own_means

    def _extractor(self) -> Extractor:
        return self._workbench.extractor(self._params()) if self._trained else self._workbench.shared_extractor()

    def _params(self) -> Mapping[str, NDArray[np.float32]]:
        return {**self._bundle.params, **self._trained}
