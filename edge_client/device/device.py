"""The device's core: what happens in a round, as a function of bundle, data, announcement and global state.

This module uses no MQTT, no files and no clock. The client drives `Device` over a broker. The lab drives the same class
in one process. A round follows the method's class (`contract/methods/`):

1. Check the global state. One that cannot be true is put aside (`edge_client/device/global_state_check.py`), and the
   last good one is taken instead.
2. If the method trains, train on the local samples, from the device's present weights and with the global state. The
   objective defines how the global state is used (export/objectives/). Parameters that the method names start with the
   values of the global state (FedHP's learned prototypes).
3. Let the method summarise the samples (`edge_client/training/local_samples.py`). The method names the extractor:
   `local` has the device's own weights, `bundle` the initial weights, which are the same on all devices. Small classes
   are withheld. Noise is added if the method adds any.
4. Wrap the statistic as a contribution.

Where only the tail of the network is trained (`edge_client/training/frozen_trunk.py`), two rules apply:

- The first round starts with a head from the class means of the frozen features
  (`edge_client/training/warm_start.py`).
- After each round the trained tail is compared with those class means on the held-out photos. If it is worse, the
  round is left out: the device keeps the weights of before the round, and its contribution is made with these
  (`edge_client/training/tail_check.py`).

If training diverges, the round has no result, and the device's weights stay as they were. `run_round` raises
`DivergedError`. `sit_out` gives what may be sent for such a round, so that nobody waits.

Training is seeded from (device, run, round). Noise comes from a secret as well. So a round that is repeated after a
crash, from the same weights and the same global state, gives the identical contribution. A round with an empty global
state is plain local training: this is the lab's local-only baseline.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.accuracy import Accuracy
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import DivergedError, MethodError, StatisticError
from protofleet.contract.heads.answers import Answer, linear_answer, nearest_answer
from protofleet.contract.methods import Method, method, runs_on
from protofleet.contract.methods.base import Extractor as ExtractorName
from protofleet.contract.sums.plausibility import LARGEST_NORM, largest_norm
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution
from protofleet.contract.wire.topics import check_device
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.activations import ActivationStore
from protofleet.edge_client.device.answer_choice import Answering, known_answers, usual_way
from protofleet.edge_client.device.calibration import Gathered, HeldOut
from protofleet.edge_client.device.evaluation import (
    JOINT,
    OWN,
    Evaluation,
    Heads,
    Scored,
    Tested,
    measured,
    score,
    summary,
)
from protofleet.edge_client.device.exposure import exposed
from protofleet.edge_client.device.global_state_check import GlobalStateCheck, Judged
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.frozen_trunk import FrozenTrunk
from protofleet.edge_client.training.kept_features import KeptFeatures
from protofleet.edge_client.training.local_samples import LocalSamples, OwnMeans, own_means
from protofleet.edge_client.training.tail_check import Check, right
from protofleet.edge_client.training.trainer import OnStep, Weights, check_weights, diverged
from protofleet.edge_client.training.warm_start import anchored, class_mean_head

__all__ = ["Device", "RoundResult", "round_seed"]


@dataclass(frozen=True, eq=False)
class RoundResult:
    """What a round gave.

    Attributes:
        contribution: what may be sent; without class rows when the method sends nothing else.
        loss: mean training loss over the round's samples; None when the method trains nothing.
        samples: local samples in the statistic.
        steps: training steps done.
        refused: why the given global state was not trained on; empty when it was.
        check: how what was trained compares with the frozen network, where that was looked at.
    """

    contribution: Contribution
    loss: float | None
    samples: int
    steps: int
    refused: str = ""
    check: Check | None = None


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
        held: held-out samples, which neither train nor test. A trained tail is checked on them; without them there is
            no such check.
        activations: keeps the activations of a frozen trunk; without it, the trunk runs again in each epoch.
        threads: within an operator.
        graphs: shared compiled graphs, for many devices in one process; its own when None.
        secret: what noise is drawn from; 32 random bytes when None.
        on_batch: called after each batch of photos that a network has computed.
        by_factor: whether sums of few photos are held as a factor; False for a trial of what many photos take.

    Attributes:
        left_out: the method of the round that the fleet left this device out of; empty where its rounds count.
        held_out: the held-out photos as they were tested last, for the calibration of answers; None before.
        joint: the joint head, of a device that was left out: the global state of a fleet of this device and those that
            agree with it. None where the device was given none.

    Raises:
        UsageError: when `device_id` cannot be a device's.
    """

    # arguments: what a device is made of, by name
    def __init__(
        self,
        bundle: Bundle,
        data: LocalData,
        device_id: str,
        *,
        test: LocalData | None = None,
        held: LocalData | None = None,
        activations: ActivationStore | None = None,
        threads: int = 1,
        graphs: CompiledGraphs | None = None,
        secret: bytes | None = None,
        on_batch: Callable[[], None] = lambda: None,
        by_factor: bool = True,
    ) -> None:
        self._by_factor = by_factor
        self._bundle, self._manifest = bundle, bundle.manifest
        self._method = method(bundle.manifest.method)
        self._secret = secret or os.urandom(32)
        self._id = check_device(device_id, "device id")
        self._graphs = graphs or CompiledGraphs(bundle, threads)
        self._trained: dict[str, NDArray[np.float32]] = {}
        self.left_out = ""
        self.joint: GlobalState | None = None
        self.held_out: HeldOut | None = None
        self._caution = GlobalStateCheck(self._method, bundle.manifest.hyper)
        self._trunk = FrozenTrunk(bundle, self._graphs.trunk, activations, on_batch) if bundle.manifest.cut else None
        self._on_batch = on_batch
        self.hold(data, test=test, held=held)

    def hold(self, data: LocalData, *, test: LocalData | None = None, held: LocalData | None = None) -> None:
        """From now on the device has these samples. The arguments are those of the class."""
        hyper = self._manifest.hyper
        self._data, self._test = data.labelled, test
        self._training_data = data if self._method.uses_unlabelled(hyper) else self._data
        self._own_means: OwnMeans | None = None
        self._frozen: int | None = None  # see `_check`
        self._alone: dict[str, Mapping[str, Tested]] = {}  # see `_without_the_fleet`
        self._own: dict[str, GlobalState] = {}  # see `own_state`
        # a network that is trained has other features after each round: then those of the test images alone are kept
        sets = [] if self._method.trains else [self._data.x]
        sets += [] if test is None else [test.x]
        self._frozen_features = KeptFeatures(self._manifest.features, self._shared_extractor, *sets)
        noised = self._method.mechanism(hyper) is not None  # what is held out would be told unnoised
        self._held = held if self._trunk is not None and held is not None and len(held) and not noised else None
        if self._trunk is not None:
            self._trunk.forget()
            for name, samples in (("train", self._training_data), ("held", held), ("test", test)):
                if samples is not None:
                    self._trunk.keep(name, samples.x)

    @property
    def classes(self) -> int:
        """C."""
        return self._manifest.classes

    @property
    def width(self) -> int:
        """D."""
        return self._manifest.features

    def frozen_features(self, rows: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Features (n, D) under the bundle's initial weights, and labels (n,), of some labelled samples, by blocks."""
        for chosen, features in self._frozen_features.chosen(self._data.x, rows, 4 * self._manifest.batch):
            yield features, self._data.y[chosen]

    @property
    def own_classes(self) -> NDArray[np.bool_]:
        """(C,) which classes the device holds samples of."""
        return self._data.counts(self._manifest.classes) > 0

    def state(self) -> dict[str, NDArray[np.float32]]:
        """What training has changed so far: weights and running statistics by name; empty before the first round."""
        return dict(self._trained)

    @property
    def trusted(self) -> GlobalState | None:
        """The last global state that could be true."""
        return self._caution.good

    def restore(self, state: Weights, trusted: GlobalState | None = None) -> None:
        """Go on from a state that `state` returned.

        Args:
            trusted: what `trusted` was then, where it is known.

        Raises:
            BundleError: when it is not of this bundle.
        """
        check_weights(state, self._manifest)
        self._trained, self._own_means = dict(state), None
        self._caution.good = trusted or self._caution.good

    def run_round(
        self, announcement: Announcement, global_state: GlobalState | None, *, on_step: OnStep | None = None
    ) -> RoundResult:
        """Take part in the announced round.

        Args:
            announcement: which round of which method: the bundle's own, or one that trains nothing.
            global_state: the state of the announced version; None or an empty one before the first.
            on_step: called after each training step with the steps done and the steps in all.

        Raises:
            MethodError: for another method.
            DivergedError: when training diverges. The device's weights are then those of before the round.
            WireError: when the global state is not of this fleet.
        """
        round_method = self._announced_method(announcement)
        if not round_method.trains:
            return self._untrained(round_method, announcement)
        judged, before = self.judge(global_state), (self._trained, self._own_means)
        seed = round_seed(self._id, announcement.run, announcement.round)
        try:
            given = self._step_inputs(judged.state)
            starting = self._starting_weights(given)
            loss, steps = self._train(starting, given, seed, on_step)
            check = self._check()
            if check is not None and check.is_worse:
                self._trained, self._own_means = before if before[0] else (self._changed(starting), None)
            statistic = self._trained_statistic(round_method, announcement)
        except DivergedError:
            self._trained, self._own_means = before
            raise
        finally:
            self._rest()
        samples = int(statistic.counts.sum())
        return RoundResult(self._wrapped(statistic, announcement), loss, samples, steps, judged.refused, check)

    @property
    def samples(self) -> LocalData:
        """The labelled samples that it would sum."""
        return self._data

    def stand(self, announcement: Announcement, generation: int, chosen: NDArray[np.bool_]) -> RoundResult:
        """A contribution where sums stand: the sums of the chosen samples (N,), numbered `generation`.

        Raises:
            MethodError: for a method whose sums cannot stand.
        """
        round_method = self._announced_method(announcement)
        if not round_method.stands:
            raise MethodError("the announced method", expected="one whose sums can stand", got=round_method.name)
        numbered = replace(announcement, round=generation)
        statistic = self._summarise(round_method, numbered, chosen)
        contribution = replace(self._wrapped(statistic, numbered), standing="present")
        return RoundResult(contribution, None, int(statistic.counts.sum()), 0)

    def sit_out(self, announcement: Announcement) -> RoundResult:
        """What may be sent for a round without a result: that the device took part, and no class rows.

        Where noise is added, the statistic under the weights of before the round is sent instead. Whether training
        diverged follows from the samples, so it must not be told without noise.
        """
        m, round_method = self._manifest, self._announced_method(announcement)
        if round_method.mechanism(round_method.resolved_in(m.hyper)) is not None:
            return self._untrained(round_method, announcement)
        return self.abstain(announcement)

    def unread(self, announcement: Announcement) -> RoundResult:
        """What may be sent while the photos cannot be read: the contribution of a device without photos.

        The photos that were read before are not used. Where noise is added, the contribution is noise alone, so nobody
        learns that the photos could not be read.
        """
        round_method = self._announced_method(announcement)
        if round_method.mechanism(round_method.resolved_in(self._manifest.hyper)) is None:
            return self.abstain(announcement)
        statistic = self._summarise(round_method, announcement, np.zeros(len(self._data), bool))
        return RoundResult(self._wrapped(statistic, announcement), None, 0, 0)

    def abstain(self, announcement: Announcement) -> RoundResult:
        """What may be sent for a round that the owner's policy refuses: no class rows, nothing computed of a sample."""
        m, round_method = self._manifest, self._announced_method(announcement)
        zero = round_method.statistic.zero(
            m.classes, round_method.row_width(round_method.resolved_in(m.hyper), m.features)
        )
        return RoundResult(replace(self._wrapped(zero, announcement), triangle=None, further=()), None, 0, 0)

    def evaluate(self, global_state: GlobalState | None) -> Evaluation | None:
        """How well the device answers now, given this global state; None without test samples.

        Raises:
            WireError: when the global state is not of this fleet.
        """
        if self._test is None:
            return None
        try:
            return self._evaluated(global_state, self._test)
        finally:
            self._rest()

    def _evaluated(self, global_state: GlobalState | None, test: LocalData) -> Evaluation:
        m, state = self._manifest, self.judge(global_state).state
        known = known_answers(m, self._local(self._method), state)
        way = usual_way(known, m.method, trained=bool(self._trained))
        gathered = None if way is None else Gathered(way, known[way].answer, len(test), m.classes)
        own = self._own_answering(known)
        known |= {} if own is None else {OWN: own}
        joint = self._joint_answering()
        known |= {} if joint is None else {JOINT: joint}
        scored: dict[str, Scored] = {}
        for name in ("local", "bundle"):
            answers = {way: answering.answer for way, answering in known.items() if answering.extractor == name}
            if answers:
                scored |= score(self._extractor(name).blocks(test.x), answers, test.y, self.own_classes, gathered)
        if gathered is not None:
            run, version = (bytes(4), 0) if state is None else (state.run, state.version)
            self.held_out = gathered.held_out(test.y, self._data.counts(m.classes), run, version)
        return summary(scored, self.own_classes)

    def _own_answering(self, known: Mapping[str, Answering]) -> Answering | None:
        """The own head of a device that was left out: what it has trained itself, or what `own_state` gives."""
        if not self.left_out:
            return None
        if self._trained:
            return known.get(self._method.alone_way(self._manifest.head))
        m, state = self._manifest, self.own_state()
        alone = known_answers(m, self._local(self._method), state)
        way = usual_way(alone, m.method, trained=False)
        return None if way is None else alone[way]

    def _joint_answering(self) -> Answering | None:
        """The joint head of a device that was left out; None where there is none, or it cannot be true."""
        if not self.left_out or self.joint is None:
            return None
        m = self._manifest
        joint = self.joint.below(m.classes)
        if self._caution.doubt(joint, self._longest):
            return None
        answers = known_answers(m, self._local(self._method), joint)
        way = usual_way([way for way in answers if answers[way].extractor == "bundle"], m.method, trained=False)
        return None if way is None else answers[way]

    def own_state(self) -> GlobalState | None:
        """The global state that a fleet of this device alone would be given.

        None for a device that was not left out, for one that has trained, and where the round that left it out trains.
        It is computed once for these samples.
        """
        if not self.left_out or self._trained or method(self.left_out).trains:
            return None
        if self.left_out not in self._own:
            self._own = {self.left_out: self._state_as_whole_fleet(method(self.left_out))}
        return self._own[self.left_out]

    def beside_own(self, evaluation: Evaluation) -> Heads | None:
        """How many test samples the fleet's head, the device's own head and the joint head name right.

        None for a device that was not left out, and where the fleet's head or the own head is missing.
        """
        others = [way for way in evaluation.confusion if way not in (OWN, JOINT)]
        way = usual_way(others, self._manifest.method, trained=bool(self._trained))
        if OWN not in evaluation.confusion or way is None:
            return None
        right = {name: int(np.diag(confusion).sum()) for name, confusion in evaluation.confusion.items()}
        return Heads(evaluation.samples, right[way], right[OWN], right.get(JOINT, 0))

    def accuracy(self, evaluation: Evaluation, announced: str) -> Accuracy | None:
        """The figures of an evaluation after a round of the method `announced`, beside figures without the fleet.

        - `shipped` is the bundle's initial weights, with the nearest class mean of the device's own samples.
        - `alone`, where the round trains, is the device's own head or prototypes.
        - `alone`, where the round does not train, is what the round would have given to this device as the only one.
        - There is no `alone` where the round's own way of answering is the device's own head.

        None where the method has no answer yet.
        """
        round_method, tested, heads = method(announced), evaluation.tested, self.beside_own(evaluation)
        without, alone_way = self._without_the_fleet(round_method), round_method.alone_way(self._manifest.head)
        own = tested.get(alone_way) if alone_way != round_method.way else None
        alone = own if round_method.trains else without.get("alone")
        way = round_method.way if heads is None else heads.best or round_method.way
        return measured(tested.get(way), shipped=without.get("shipped"), alone=alone)

    def _without_the_fleet(self, round_method: Method) -> Mapping[str, Tested]:
        """How it does on the test samples over the bundle's extractor, from this device's samples alone.

        Nothing of it ever changes, so it is computed once: a pass over the samples for each method.
        """
        if self._test is None:
            return {}
        if round_method.name not in self._alone:
            means = own_means(self._extractor("bundle"), self._data, classes=self._manifest.classes).classes
            answers: dict[str, Answer] = {"shipped": nearest_answer(means.means, means.present)}
            answers |= {} if round_method.trains else self._answer_as_whole_fleet(round_method)
            scored = score(self._extractor("bundle").blocks(self._test.x), answers, self._test.y, self.own_classes)
            self._alone[round_method.name] = summary(scored, self.own_classes).tested
        return self._alone[round_method.name]

    def _answer_as_whole_fleet(self, round_method: Method) -> dict[str, Answer]:
        """How a method that trains nothing answers where one device is all of the fleet."""
        m, hyper = self._manifest, round_method.resolved_in(self._manifest.hyper)
        answers = round_method.shared_answers(self._state_as_whole_fleet(round_method), m.classes, m.features, hyper)
        return {"alone": answers[round_method.way]} if round_method.way in answers else {}

    def _state_as_whole_fleet(self, round_method: Method) -> GlobalState:
        """What a method that trains nothing would give back where one device is all of the fleet."""
        hyper = round_method.resolved_in(self._manifest.hyper)
        statistic = round_method.summarise(self._local(round_method))
        self._graphs.rest()  # a head of wide features takes more than the extractor did
        # A factor is no summand, and need not be one here: a head is made of it, and no D × D matrix.
        is_one = statistic.factor is not None
        merged = statistic if is_one else round_method.merge(lambda: iter([statistic]), "mean", hyper)
        rows = round_method.next_rows({}, merged, hyper)
        return GlobalState(bytes(4), 1, 1, rows)

    def judge(self, global_state: GlobalState | None) -> Judged:
        """Whether this global state can be true, and which state to go on with (`global_state_check.py`).

        Only rows of the bundle's classes are kept.
        """
        known = None if global_state is None else global_state.below(self._manifest.classes)
        return self._caution.judge(known, self._longest)

    def own_means(self) -> OwnMeans | None:
        """The device's own class means.

        Answers need them where the method has prototypes or a personal head; for other methods it is None.
        """
        own_method = self._method
        return self._means() if "prototypes" in own_method.global_rows or own_method.has_personal_head else None

    def _announced_method(self, announcement: Announcement) -> Method:
        known = runs_on(self._manifest.method)
        if announcement.method not in known:
            raise MethodError("the announced method", expected=" or ".join(known), got=announcement.method)
        return method(announcement.method)

    def _step_inputs(self, global_state: GlobalState | None) -> Weights:
        """The training step's inputs that come of the global state, and of the device's labels."""
        m, state = self._manifest, global_state or GlobalState(bytes(4), 0, 0)
        counts = self._training_data.counts(m.classes)
        given = self._method.inputs(counts, state, m.classes, m.features)
        if self._trunk is not None and self._method.warm_prototypes:
            return anchored(given, self._means())
        return given

    def _starting_weights(self, given: Weights) -> Weights:
        """The weights that a round of training begins with."""
        params, head = self._params(), "head.weight" in self._manifest.names("param")
        if self._trunk is not None and head and not self._trained:
            params = {**params, **class_mean_head(self._extractor("local"), self._data, self._means())}
        return {**params, **self._method.start(params, given)}

    def _changed(self, starting: Weights) -> dict[str, NDArray[np.float32]]:
        """A state that goes on from these weights; empty where they are the bundle's own."""
        names, own = self._manifest.names("param", "buffer"), self._bundle.params
        return (
            {name: starting[name] for name in names} if any(starting[name] is not own[name] for name in names) else {}
        )

    def _check(self) -> Check | None:
        """What was just trained beside the frozen network, on the held-out photos."""
        if self._held is None or self._trunk is None:
            return None
        m, held_out = self._manifest, self._held
        if self._frozen is None:
            extractor = self._graphs.tail(self._bundle.params, self._trunk)
            means = own_means(extractor, self._data, classes=m.classes).classes
            self._frozen = right(extractor, nearest_answer(means.means, means.present), held_out)
        try:
            trained = right(self._extractor("local"), self._own_answer(), held_out)
        except StatisticError:  # features that are no numbers name nothing
            trained = 0
        return Check(self._frozen, trained, len(held_out))

    def _own_answer(self) -> Answer:
        """How the device answers from what it has trained itself: by its head where the method answers by one that is
        trained, else by the nearest of its own class means."""
        params = self._params()
        if self._method.way == "head" and "head.weight" in self._manifest.names("param"):
            return linear_answer(params["head.weight"], params.get("head.bias"))
        means = self._means().classes
        return nearest_answer(means.means, means.present)

    def _rest(self) -> None:
        """Let go of what is not needed until the next round."""
        if self._trunk is not None:
            self._trunk.rest()

    def _train(self, starting: Weights, given: Weights, seed: int, on_step: OnStep | None) -> tuple[float, int]:
        m, data, trainer = self._manifest, self._training_data, self._graphs.trainer()
        epochs, lr = int(m.hyper["epochs"]), float(m.hyper["lr"])
        trainer.load_state(starting)
        loss = trainer.fit(data, epochs=epochs, lr=lr, given=given, seed=seed, trunk=self._trunk, on_step=on_step)
        self._trained, self._own_means = trainer.export_state(), None
        return loss, epochs * -(-len(data) // m.batch)

    def _trained_statistic(self, round_method: Method, announcement: Announcement) -> Statistic:
        """The statistic of what was just trained.

        Raises:
            DivergedError: when the features are no finite numbers, or longer than any network's are.
        """
        try:
            statistic = self._summarise(round_method, announcement)
        except StatisticError as error:
            raise diverged("finite features", str(error)) from None
        over = np.maximum(statistic.counts, 1)
        fields = [field for field in statistic.row_fields() if field.holds == "features"]
        means = [field.means(statistic.as_sent(field), over) for field in fields]
        longest = max(map(largest_norm, means), default=0.0)
        if longest > LARGEST_NORM:
            raise diverged(f"class means of norm {LARGEST_NORM:g} at most", f"{longest:.3g}")
        return statistic

    def _summarise(
        self, round_method: Method, announcement: Announcement, chosen: NDArray[np.bool_] | None = None
    ) -> Statistic:
        """What the method makes of the samples; only what it declares may leave the device.

        Raises:
            MethodError: when it gives another statistic than its own, or one of another size.
        """
        m, statistic = self._manifest, round_method.summarise(self._local(round_method, announcement, chosen))
        size = (m.classes, round_method.row_width(round_method.resolved_in(m.hyper), m.features))
        kind = getattr(statistic, "STANDS_FOR", None) or type(statistic)
        form = type(statistic) if kind is round_method.statistic else round_method.statistic
        declared = form.shapes(*size)
        if kind is not round_method.statistic or [a.shape for a in statistic.arrays()] != declared:
            got = getattr(statistic, "NAME", type(statistic).__name__)
            raise MethodError(
                f"{round_method.name} sums up what it does not declare",
                expected=f"{round_method.statistic.NAME} of {size[0]} classes, width {size[1]}",
                got=got
                if kind is not round_method.statistic
                else f"{statistic.classes} classes, width {statistic.width}",
            )
        return statistic

    def exposed(self, contribution: Contribution, announcement: Announcement) -> str:
        """What a contribution of this device shows of single photos, for its owner; empty for nothing."""
        m, round_method = self._manifest, method(announcement.method)
        return exposed(contribution, announcement, round_method, round_method.resolved_in(m.hyper), m.features)

    def _untrained(self, round_method: Method, announcement: Announcement) -> RoundResult:
        """What the samples come to under the present weights."""
        statistic = self._summarise(round_method, announcement)
        samples = int(statistic.counts.sum()) if statistic.COUNTED else len(self._data)
        return RoundResult(self._wrapped(statistic, announcement), None, samples, 0)

    def _wrapped(self, statistic: Statistic, announcement: Announcement) -> Contribution:
        a, round_method = announcement, method(announcement.method)
        stranger = bool(a.class_lists) and self._bundle.sha256 not in (a.bundle, *a.others)
        return Contribution.of(
            statistic,
            run=a.run,
            round=a.round,
            method=a.method,
            bundle=self._bundle.sha256,
            extractor=self._bundle.extractor(round_method),
            class_list=list_digest(self._manifest.labels) if stranger else b"",
        )

    def _local(
        self,
        round_method: Method,
        announcement: Announcement | None = None,
        chosen: NDArray[np.bool_] | None = None,
    ) -> LocalSamples:
        """What a method sees of this device: for a round, or, without one, for itself with nothing withheld."""
        m, a = self._manifest, announcement
        return LocalSamples(
            self._data,
            classes=m.classes,
            width=m.features,
            hyper=round_method.resolved_in(m.hyper),
            params=self._params(),
            extractor=self._extractor,
            own_means=self._means,
            min_samples=a.min_samples if a is not None and round_method.statistic.COUNTED else 1,
            chosen=chosen,
            withheld=() if a is None else a.withheld,
            secret=self._secret,
            factor_rows=self._factor_rows(round_method, a),
            what=b""
            if a is None
            else a.run + a.round.to_bytes(8, "big") + self._bundle.sha256 + round_method.name.encode(),
        )

    def _factor_rows(self, round_method: Method, a: Announcement | None) -> int:
        """Up to so many samples, a factor stands for a triangle: of a round that takes it, or for the device itself."""
        refused = a is not None and (not a.factors or a.helper is not None)
        if refused or not self._by_factor:
            return 0
        m, encoding = self._manifest, round_method.encoding if a is None else a.encoding
        return round_method.factor_rows(round_method.resolved_in(m.hyper), m.features, encoding)

    def _longest(self) -> float:
        """The norm of the longest of the device's own prototypes."""
        return largest_norm(self._method.own_prototypes(self._local(self._method))[0])

    def _means(self) -> OwnMeans:
        """What is known of its own samples under its present weights; computed once for each weights."""
        if self._own_means is None:
            means = own_means(self._extractor("local"), self._data, classes=self._manifest.classes)
            self._own_means = replace(means, head=self._method.personal_head(self._local(self._method)))
        return self._own_means

    def _extractor(self, name: ExtractorName) -> Extractor:
        if name == "bundle" or not (self._trained or self._trunk):
            return self._frozen_features
        params = self._params()
        extractor = self._graphs.tail(params, self._trunk) if self._trunk else self._graphs.extractor(params)
        extractor.on_batch = self._on_batch
        return extractor

    def _shared_extractor(self) -> Extractor:
        """That of the bundle's own weights, opened for one pass: what is done between two needs the memory."""
        extractor = self._graphs.shared_extractor()
        extractor.on_batch = self._on_batch
        return extractor

    def _params(self) -> Mapping[str, NDArray[np.float32]]:
        return {**self._bundle.params, **self._trained}
