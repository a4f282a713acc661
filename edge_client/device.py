"""The device's core: what happens in a round, as a function of bundle, data, announcement and global state.

No MQTT, no files, no clock: the client drives this class over a broker, the lab drives the very same class in one
process. A round follows the method's row in `contract/methods.py`:

1. if the method trains, train on the local samples from the device's present weights, pulled towards the global
   prototypes (FedProto, eq. 5; SphereFed, eq. 5);
2. extract features with the extractor that the method names: the device's own `local` weights, or the `bundle`'s
   initial ones, which all devices share whatever they trained locally (Gram sums only add up over one extractor);
3. sum them into the method's statistic, small classes withheld, and wrap it as a contribution.

Everything random comes from (device, run, round), so a round that is repeated after a crash, from the same weights
and the same global state, gives the identical contribution. With an empty global state, a round is plain local
training: that is the lab's local-only baseline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Bundle
from contract.errors import BundleError, MethodError
from contract.messages import Announcement, Contribution
from contract.methods import Method, method
from contract.state import GlobalState
from contract.statistics import ClassMeans, Statistic
from contract.topics import check_id
from edge_client.data import LocalData
from edge_client.evaluate import Answer, Evaluation, linear_answer, nearest_answer, score, summary
from edge_client.extractor import Extractor
from edge_client.summarise import class_means, summarise, withhold
from edge_client.trainer import OnStep, Weights
from edge_client.workbench import Workbench

__all__ = ["Device", "RoundResult", "round_seed"]


@dataclass(frozen=True, eq=False)
class RoundResult:
    """What a round gave.

    Attributes:
        contribution: what may be sent; None when the method sends nothing.
        loss: mean training loss over the round's samples; None when the method trains nothing.
        samples: local samples in the statistic (or trained on, when nothing is sent).
        steps: training steps done.
    """

    contribution: Contribution | None
    loss: float | None
    samples: int
    steps: int


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

    Raises:
        UsageError: when `device_id` may not stand in a topic.
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
    ) -> None:
        self._bundle, self._manifest = bundle, bundle.manifest
        self._data, self._test = data, test
        self._id = check_id(device_id, "device id")
        self._workbench = workbench or Workbench(bundle, threads)
        self._trained: dict[str, NDArray[np.float32]] = {}
        self._own_means: ClassMeans | None = None

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
            MethodError: for another method, or when training diverges. The device's weights are then unchanged.
            WireError: when the global state is not of this fleet.
        """
        row = self._row(announcement.method)
        loss, steps = None, 0
        if row.objective is not None:
            seed = round_seed(self._id, announcement.run, announcement.round)
            loss, steps = self._train(global_state, seed, on_step)
        if row.statistic is None:
            return RoundResult(None, loss, len(self._data), steps)
        statistic = self._summarise(row, announcement.min_samples)
        contribution = Contribution.of(
            statistic,
            run=announcement.run,
            round=announcement.round,
            method=announcement.method,
            bundle=self._bundle.sha256,
        )
        return RoundResult(contribution, loss, int(statistic.counts.sum()), steps)

    def evaluate(self, global_state: GlobalState | None) -> Evaluation | None:
        """How well the device answers now, given this global state; None without test samples.

        Raises:
            WireError: when the global state is not of this fleet.
        """
        if self._test is None:
            return None
        classes = self._manifest.classes
        extractor = self._extractor()
        confusion = score(extractor, self._local_answers(extractor, global_state), self._test, classes=classes)
        if global_state is not None and global_state.head is not None:
            head, _ = global_state.head.dense(classes, self._manifest.features)
            answers = {"linear": linear_answer(head, unit=True)}
            confusion |= score(self._workbench.shared_extractor(), answers, self._test, classes=classes)
        return summary(confusion, self.own_classes)

    def _row(self, name: str) -> Method:
        own = self._manifest.method
        if name not in (own, "ffc"):
            raise MethodError("the announced method", expected=f"{own} or ffc, as the bundle allows", got=name)
        return method(name)

    def _train(self, global_state: GlobalState | None, seed: int, on_step: OnStep | None) -> tuple[float, int]:
        m = self._manifest
        prototypes, mask = (
            np.zeros((m.classes, m.features), np.float32),
            np.zeros(m.classes, np.float32),
        )
        if global_state is not None:
            prototypes, mask = global_state.dense_prototypes(m.classes, m.features)
        epochs, lr = int(m.hyper["epochs"]), float(m.hyper["lr"])
        trainer = self._workbench.trainer()
        trainer.load_state(self._params())
        loss = trainer.fit(
            self._data, epochs=epochs, lr=lr, prototypes=prototypes, mask=mask, seed=seed, on_step=on_step
        )
        self._trained, self._own_means = trainer.export_state(), None
        return loss, epochs * -(-len(self._data) // m.batch)

    def _summarise(self, row: Method, min_samples: int) -> Statistic:
        if row.extractor == "local" and row.statistic == "class-means" and not row.unit_features:
            return withhold(self._means(self._extractor()), min_samples)
        extractor = self._workbench.shared_extractor() if row.extractor == "bundle" else self._extractor()
        return summarise(row, extractor, self._data, classes=self._manifest.classes, min_samples=min_samples)

    def _local_answers(self, extractor: Extractor, global_state: GlobalState | None) -> dict[str, Answer]:
        """The ways of answering from the device's own features."""
        classes, width = self._manifest.classes, self._manifest.features
        own = self._means(extractor)
        prototypes, present = own.means, own.present
        if global_state is not None and global_state.prototypes is not None:
            shared, shared_present = global_state.prototypes.dense(classes, width)
            prototypes = np.where(shared_present[:, None], shared, prototypes)
            present = present | shared_present
        answers = {
            "prototype": nearest_answer(prototypes, present),
            "prototype_among_own": nearest_answer(prototypes, own.present),
        }
        params = self._params()
        if "head.weight" in params:
            unit = method(self._manifest.method).unit_features
            answers["head"] = linear_answer(params["head.weight"], params.get("head.bias"), unit=unit)
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
