"""The device's core: what happens in a round, as a function of bundle, data, announcement and global state.

No MQTT, no files, no clock: the client drives this class over a broker, the lab drives the very same class in one
process. A round follows the method's class (`contract/methods/`):

1. a global state that cannot be true is put aside (`edge_client/global_state_check.py`), and the last good one is taken
   instead;
2. if the method trains, train on the local samples from the device's present weights, given the global state (what
   that does is the objective's, export/objectives/); what the method says starts as the global state has it (FedHP's
   learned prototypes);
3. let the method summarise the samples (`edge_client/local.py`): with the extractor that it names, the device's own
   `local` weights or the `bundle`'s initial ones, which all devices share whatever they trained locally; small classes
   are withheld, noise is added where the method adds any; and wrap the statistic as a contribution.

Where only the tail of the network is trained (`edge_client/trunk.py`), the first round begins with what the class means
of the frozen features know (`edge_client/warm_start.py`). A round that leaves the device worse than these on its
held-out photos is left out: it goes on with, and sends what follows from, the weights of before the round
(`edge_client/never_worse.py`).

A round whose training diverges has no result, and leaves the device's weights as they were: `run_round` says so, and
`sit_out` is what may be sent for it, so that nobody waits.

Everything random comes from (device, run, round), and noise from a secret beside, so a round that is repeated after a
crash, from the same weights and the same global state, gives the identical contribution. With an empty global state, a
round is plain local training: that is the lab's local-only baseline.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from contract.accuracy import Accuracy
from contract.answers import Answer, linear_answer, nearest_answer
from contract.bundle import Bundle
from contract.errors import DivergedError, MethodError, StatisticError
from contract.fleet import list_digest
from contract.messages import Announcement, Contribution
from contract.methods import Method, method, runs_on
from contract.methods.base import Extractor as ExtractorName
from contract.plausible import LARGEST_NORM, largest_norm
from contract.state import GlobalState
from contract.statistics import Statistic
from contract.topics import check_device
from edge_client.answering import Answering, known_answers, usual_way
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.data.activations import ActivationStore
from edge_client.evaluate import JOINT, OWN, Evaluation, Heads, Scored, Tested, measured, score, summary
from edge_client.exposure import exposed
from edge_client.extractor import Extractor
from edge_client.global_state_check import Caution, Judged
from edge_client.local import LocalSamples, OwnMeans, own_means
from edge_client.never_worse import Check, right
from edge_client.trainer import OnStep, Weights, check_weights, diverged
from edge_client.trunk import Trunk
from edge_client.warm_start import anchored, class_mean_head

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
        held: samples that neither train nor test, which a trained tail has to stand on; without them it is not looked
            at.
        activations: keeps what a frozen trunk makes of the samples; without it, it runs again for each epoch.
        threads: within an operator.
        graphs: shared compiled graphs, for many devices in one process; its own when None.
        secret: what noise is drawn from; 32 random bytes when None.
        on_batch: called after each batch of photos that a network has seen.

    Attributes:
        left_out: the method of the round that the fleet left out of this device's; empty where its rounds count.
        joint: then, what those that agree with it and the device would be given as a fleet, where it was given that.

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
        held: LocalData | None = None,
        activations: ActivationStore | None = None,
        threads: int = 1,
        graphs: CompiledGraphs | None = None,
        secret: bytes | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._bundle, self._manifest = bundle, bundle.manifest
        self._method = method(bundle.manifest.method)
        self._secret = secret or os.urandom(32)
        self._id = check_device(device_id, "device id")
        self._graphs = graphs or CompiledGraphs(bundle, threads)
        self._trained: dict[str, NDArray[np.float32]] = {}
        self.left_out = ""
        self.joint: GlobalState | None = None
        self._caution = Caution(self._method, bundle.manifest.hyper)
        self._trunk = Trunk(bundle, self._graphs.trunk, activations, on_batch) if bundle.manifest.cut else None
        self._on_batch = on_batch
        self.hold(data, test=test, held=held)

    def hold(self, data: LocalData, *, test: LocalData | None = None, held: LocalData | None = None) -> None:
        """From now on the device has these samples; arguments as of the class."""
        hyper = self._manifest.hyper
        self._data, self._test = data.labelled, test
        self._training_data = data if self._method.uses_unlabelled(hyper) else self._data
        self._own_means: OwnMeans | None = None
        self._frozen: int | None = None  # see `_check`
        self._alone: dict[str, Mapping[str, Tested]] = {}  # see `_without_the_fleet`
        self._own: dict[str, GlobalState] = {}  # see `own_state`
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
        extractor, block = self._extractor("bundle"), 4 * self._manifest.batch
        for start in range(0, len(rows), block):
            chosen = rows[start : start + block]
            yield extractor.features(self._data.x[chosen]), self._data.y[chosen]

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
        found = self._method_of(announcement)
        if not found.trains:
            return self._untrained(found, announcement)
        judged, before = self.judge(global_state), (self._trained, self._own_means)
        seed = round_seed(self._id, announcement.run, announcement.round)
        try:
            given = self._given(judged.state)
            begun = self._begun(given)
            loss, steps = self._train(begun, given, seed, on_step)
            check = self._check()
            if check is not None and check.is_worse:
                self._trained, self._own_means = before if before[0] else (self._changed(begun), None)
            statistic = self._trained_statistic(found, announcement)
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
        """What stands of this device: the sums of the chosen samples (N,), as its contribution number `generation`.

        Raises:
            MethodError: for a method whose sums cannot stand.
        """
        found = self._method_of(announcement)
        if not found.stands:
            raise MethodError("the announced method", expected="one whose sums can stand", got=found.name)
        numbered = replace(announcement, round=generation)
        statistic = self._summarise(found, numbered, chosen)
        made = replace(self._wrapped(statistic, numbered), standing="present")
        return RoundResult(made, None, int(statistic.counts.sum()), 0)

    def sit_out(self, announcement: Announcement) -> RoundResult:
        """What may be sent for a round without a result: that the device took part, and no class rows.

        Where noise is added, it is what the weights of before the round give: whether training diverged follows from
        the samples, and must not be told without noise.
        """
        m, found = self._manifest, self._method_of(announcement)
        if found.mechanism(found.settled_in(m.hyper)) is not None:
            return self._untrained(found, announcement)
        return self.abstain(announcement)

    def unread(self, announcement: Announcement) -> RoundResult:
        """What may be sent while the photos cannot be read, and those read before are not used: as of a device that has
        none. Where noise is added that is noise alone, which tells nobody that they could not be."""
        found = self._method_of(announcement)
        if found.mechanism(found.settled_in(self._manifest.hyper)) is None:
            return self.abstain(announcement)
        statistic = self._summarise(found, announcement, np.zeros(len(self._data), bool))
        return RoundResult(self._wrapped(statistic, announcement), None, 0, 0)

    def abstain(self, announcement: Announcement) -> RoundResult:
        """What may be sent where its owner's policy refuses the round: no class rows, nothing computed of a sample."""
        m, found = self._manifest, self._method_of(announcement)
        zero = found.statistic.zero(m.classes, found.row_width(found.settled_in(m.hyper), m.features))
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
        own = self._own_answering(known)
        known |= {} if own is None else {OWN: own}
        joint = self._joint_answering()
        known |= {} if joint is None else {JOINT: joint}
        scored: dict[str, Scored] = {}
        for name in ("local", "bundle"):
            answers = {way: each.answer for way, each in known.items() if each.extractor == name}
            if answers:
                scored |= score(self._extractor(name), answers, test, self.own_classes)
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
        """What a fleet of this device alone would be given, for a device that was left out and has trained nothing; it
        is computed once for these samples."""
        if not self.left_out or self._trained or method(self.left_out).trains:
            return None
        if self.left_out not in self._own:
            self._own = {self.left_out: self._state_of_one(method(self.left_out))}
        return self._own[self.left_out]

    def beside_own(self, evaluation: Evaluation) -> Heads | None:
        """How many of the test samples the fleet's head, the device's own and the joint one name right; None where it
        was not left out, or there are not the first two."""
        others = [way for way in evaluation.confusion if way not in (OWN, JOINT)]
        way = usual_way(others, self._manifest.method, trained=bool(self._trained))
        if OWN not in evaluation.confusion or way is None:
            return None
        right = {each: int(np.diag(found).sum()) for each, found in evaluation.confusion.items()}
        return Heads(evaluation.samples, right[way], right[OWN], right.get(JOINT, 0))

    def accuracy(self, evaluation: Evaluation, announced: str) -> Accuracy | None:
        """What an evaluation after a round of the method `announced` comes to, beside what there would be without it.

        `shipped` is the bundle's initial weights with the nearest class mean of the device's own samples. `alone` is,
        where the round trains, the device's own head or prototypes; where it does not, what the round would have given
        had this device been the only one. There is none where the round's own way is the device's own head. None where
        the method has no answer yet.
        """
        found, tested, heads = method(announced), evaluation.tested, self.beside_own(evaluation)
        without, alone_way = self._without_the_fleet(found), found.alone_way(self._manifest.head)
        own = tested.get(alone_way) if alone_way != found.way else None
        alone = own if found.trains else without.get("alone")
        way = found.way if heads is None else heads.best or found.way
        return measured(tested.get(way), shipped=without.get("shipped"), alone=alone)

    def _without_the_fleet(self, found: Method) -> Mapping[str, Tested]:
        """How it does on the test samples over the bundle's extractor, from this device's samples alone.

        Nothing of it ever changes, so it is computed once: a pass over the samples for each method.
        """
        if self._test is None:
            return {}
        if found.name not in self._alone:
            m, extractor = self._manifest, self._extractor("bundle")
            means = own_means(extractor, self._data, classes=m.classes).classes
            answers: dict[str, Answer] = {"shipped": nearest_answer(means.means, means.present)}
            answers |= {} if found.trains else self._answer_of_one(found)
            scored = score(extractor, answers, self._test, self.own_classes)
            self._alone[found.name] = summary(scored, self.own_classes).tested
        return self._alone[found.name]

    def _answer_of_one(self, found: Method) -> dict[str, Answer]:
        """How a method that trains nothing answers where one device is all of the fleet."""
        m, hyper = self._manifest, found.settled_in(self._manifest.hyper)
        answers = found.shared_answers(self._state_of_one(found), m.classes, m.features, hyper)
        return {"alone": answers[found.way]} if found.way in answers else {}

    def _state_of_one(self, found: Method) -> GlobalState:
        """What a method that trains nothing would give back where one device is all of the fleet."""
        hyper = found.settled_in(self._manifest.hyper)
        statistic = found.summarise(self._local(found))
        rows = found.next_rows({}, found.merge(lambda: iter([statistic]), "mean", hyper), hyper)
        return GlobalState(bytes(4), 1, 1, rows)

    def judge(self, global_state: GlobalState | None) -> Judged:
        """Whether this global state can be true (`edge_client/global_state_check.py`), and what of it is to go on with:
        its rows of the bundle's classes."""
        known = None if global_state is None else global_state.below(self._manifest.classes)
        return self._caution.judge(known, self._longest)

    def own_means(self) -> OwnMeans | None:
        """What answers need to know of the device's own samples, where its method has prototypes or a personal head;
        None where not."""
        found = self._method
        return self._means() if "prototypes" in found.global_rows or found.has_personal_head else None

    def _method_of(self, announcement: Announcement) -> Method:
        known = runs_on(self._manifest.method)
        if announcement.method not in known:
            raise MethodError("the announced method", expected=" or ".join(known), got=announcement.method)
        return method(announcement.method)

    def _given(self, global_state: GlobalState | None) -> Weights:
        """The training step's inputs that come of the global state, and of the device's labels."""
        m, state = self._manifest, global_state or GlobalState(bytes(4), 0, 0)
        counts = self._training_data.counts(m.classes)
        given = self._method.inputs(counts, state, m.classes, m.features)
        if self._trunk is not None and self._method.warm_prototypes:
            return anchored(given, self._means())
        return given

    def _begun(self, given: Weights) -> Weights:
        """The weights that a round of training begins with."""
        params, head = self._params(), "head.weight" in self._manifest.names("param")
        if self._trunk is not None and head and not self._trained:
            params = {**params, **class_mean_head(self._extractor("local"), self._data, self._means())}
        return {**params, **self._method.start(params, given)}

    def _changed(self, begun: Weights) -> dict[str, NDArray[np.float32]]:
        """A state that goes on from these weights; empty where they are the bundle's own."""
        names, own = self._manifest.names("param", "buffer"), self._bundle.params
        return {name: begun[name] for name in names} if any(begun[name] is not own[name] for name in names) else {}

    def _check(self) -> Check | None:
        """What was just trained beside the frozen network, on the held-out photos."""
        if self._held is None or self._trunk is None:
            return None
        m, held = self._manifest, self._held
        if self._frozen is None:
            extractor = self._graphs.tail(self._bundle.params, self._trunk)
            means = own_means(extractor, self._data, classes=m.classes).classes
            self._frozen = right(extractor, nearest_answer(means.means, means.present), held)
        try:
            trained = right(self._extractor("local"), self._own_answer(), held)
        except StatisticError:  # features that are no numbers name nothing
            trained = 0
        return Check(self._frozen, trained, len(held))

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

    def _train(self, begun: Weights, given: Weights, seed: int, on_step: OnStep | None) -> tuple[float, int]:
        m, data, trainer = self._manifest, self._training_data, self._graphs.trainer()
        epochs, lr = int(m.hyper["epochs"]), float(m.hyper["lr"])
        trainer.load_state(begun)
        loss = trainer.fit(data, epochs=epochs, lr=lr, given=given, seed=seed, trunk=self._trunk, on_step=on_step)
        self._trained, self._own_means = trainer.export_state(), None
        return loss, epochs * -(-len(data) // m.batch)

    def _trained_statistic(self, found: Method, announcement: Announcement) -> Statistic:
        """The statistic of what was just trained.

        Raises:
            DivergedError: when the features are no finite numbers, or longer than any network's are.
        """
        try:
            statistic = self._summarise(found, announcement)
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
        self, found: Method, announcement: Announcement, chosen: NDArray[np.bool_] | None = None
    ) -> Statistic:
        """What the method makes of the samples; only what it declares may leave the device.

        Raises:
            MethodError: when it gives another statistic than its own, or one of another size.
        """
        m, made = self._manifest, found.summarise(self._local(found, announcement, chosen))
        size = (m.classes, found.row_width(found.settled_in(m.hyper), m.features))
        declared = found.statistic.zero(*size)
        if type(made) is not found.statistic or [a.shape for a in made.arrays()] != [
            a.shape for a in declared.arrays()
        ]:
            got = getattr(made, "NAME", type(made).__name__)
            raise MethodError(
                f"{found.name} sums up what it does not declare",
                expected=f"{found.statistic.NAME} of {size[0]} classes, width {size[1]}",
                got=got if type(made) is not found.statistic else f"{made.classes} classes, width {made.width}",
            )
        return made

    def exposed(self, contribution: Contribution, announcement: Announcement) -> str:
        """What a contribution of this device shows of single photos, for its owner; empty for nothing."""
        m, found = self._manifest, method(announcement.method)
        return exposed(contribution, announcement, found, found.settled_in(m.hyper), m.features)

    def _untrained(self, found: Method, announcement: Announcement) -> RoundResult:
        """What the samples come to under the present weights."""
        statistic = self._summarise(found, announcement)
        samples = int(statistic.counts.sum()) if statistic.COUNTED else len(self._data)
        return RoundResult(self._wrapped(statistic, announcement), None, samples, 0)

    def _wrapped(self, statistic: Statistic, announcement: Announcement) -> Contribution:
        a, found = announcement, method(announcement.method)
        stranger = bool(a.class_lists) and self._bundle.sha256 not in (a.bundle, *a.others)
        return Contribution.of(
            statistic,
            run=a.run,
            round=a.round,
            method=a.method,
            bundle=self._bundle.sha256,
            extractor=self._bundle.extractor(found),
            class_list=list_digest(self._manifest.labels) if stranger else b"",
        )

    def _local(
        self,
        found: Method,
        announcement: Announcement | None = None,
        chosen: NDArray[np.bool_] | None = None,
    ) -> LocalSamples:
        """What a method sees of this device: for a round, or, without one, for itself with nothing withheld."""
        m, a = self._manifest, announcement
        return LocalSamples(
            self._data,
            classes=m.classes,
            width=m.features,
            hyper=found.settled_in(m.hyper),
            params=self._params(),
            extractor=self._extractor,
            own_means=self._means,
            min_samples=a.min_samples if a is not None and found.statistic.COUNTED else 1,
            chosen=chosen,
            withheld=() if a is None else a.withheld,
            secret=self._secret,
            what=b"" if a is None else a.run + a.round.to_bytes(8, "big") + self._bundle.sha256 + found.name.encode(),
        )

    def _longest(self) -> float:
        """The norm of the longest of the device's own prototypes."""
        return largest_norm(self._method.own_prototypes(self._local(self._method))[0])

    def _means(self) -> OwnMeans:
        """What is known of its own samples under its present weights; computed once for each weights."""
        if self._own_means is None:
            found = own_means(self._extractor("local"), self._data, classes=self._manifest.classes)
            self._own_means = replace(found, head=self._method.personal_head(self._local(self._method)))
        return self._own_means

    def _extractor(self, name: ExtractorName) -> Extractor:
        if name == "local" and self._trunk is not None:
            found: Extractor = self._graphs.tail(self._params(), self._trunk)
        elif name == "bundle" or not self._trained:
            found = self._graphs.shared_extractor()
        else:
            found = self._graphs.extractor(self._params())
        found.on_batch = self._on_batch
        return found

    def _params(self) -> Mapping[str, NDArray[np.float32]]:
        return {**self._bundle.params, **self._trained}
