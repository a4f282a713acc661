"""The server's side: a Flower strategy whose rounds are a method's, merged as our aggregator merges them.

A round, in order: `configure_train` asks the nodes that Flower samples; `aggregate_train` decodes each reply, checks
that it can be true (`aggregator/validation.py`), leaves outliers and liars out, merges (`aggregator/merging.py`) and
makes the next global state (`aggregator/state.py`). Contributions are taken in the order of the clients' names, since
sums of floats depend on it, whatever order replies come in.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from aggregator.merging import merge_round
from aggregator.outliers import SUSPECTS, Screening, Suspects, Traits
from aggregator.state import next_global
from aggregator.validation import MAX_SAMPLES, Terms, check_content
from contract.bundle import read_bundle
from contract.errors import ProtofleetError, UsageError, WireError
from contract.messages import LEAST_LIMIT_BYTES, Announcement, Contribution
from contract.methods import Value
from contract.methods import method as method_of
from contract.rules import Rule, check_rule
from contract.state import GlobalState
from protofleet.flower.learned import Learned
from protofleet.flower.records import Reply, Task, arrays_of, carried, extractor_id, travelled

__all__ = ["MethodStrategy"]

_LIMIT_BYTES = max(LEAST_LIMIT_BYTES, 1 << 28)
_log = logging.getLogger("flwr")


class MethodStrategy(FedAvg):
    """Rounds of one of our methods, for clients with `method_mod` or `bundle_mod`.

    Args:
        method: `ncm`, `ffc`, `fedcof`, `fedproto`, `fedpr`, `fedhp`, `fedhkd`, `spherefed`, or `package.module:Class`.
        classes, width: C, and D of the clients' features.
        set: hyper-parameters of the method, as `protofleet export --set` takes them: `{"ridge": 0.1}`.
        extractor: names the extractor that all clients share, where the method asks for one; see `method_mod`. Arrays
            given to `start` stand for it instead.
        min_samples: classes of which a client has fewer are withheld.
        max_samples: the most that one client may say it has.
        max_share: the largest share of a round's samples that one client counts for; None for a half, and of n clients
            3/n where that is less.
        suspects: what becomes of clients whose class means contradict the others': `leave-out`, `name` or `ignore`.
        rule: how class means merge: `mean`, `median` or `trimmed-mean`.
        labels: names of the classes, for what is said of clients.
        run: 4 bytes that tell this run from others; random when None.
        state: global state to go on from; an empty one when None.
        options: as Flower's `FedAvg` takes them: `fraction_train`, `min_train_nodes`, `min_available_nodes`, …;
            `fraction_evaluate` is 0 unless given.

    Attributes:
        state: the global state so far, in float64.

    Raises:
        ProtofleetError: an unknown method or hyper-parameter, a method that adds noise; one line says which.
    """

    def __init__(
        self,
        method: str,
        *,
        classes: int,
        width: int,
        set: Mapping[str, object] | None = None,
        extractor: str = "",
        min_samples: int = 1,
        max_samples: int = MAX_SAMPLES,
        max_share: float | None = None,
        suspects: Suspects = "leave-out",
        rule: Rule = "mean",
        labels: Sequence[str] = (),
        run: bytes | None = None,
        state: GlobalState | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{"fraction_evaluate": 0.0, **options})
        self._method = method_of(method)
        self._classes, self._width = classes, width
        self._hyper = carried(self._method, set or {}, classes, width)
        self._rule = check_rule(rule, self._method.statistic)
        if max_share is not None and not 0 < max_share <= 1:
            raise UsageError("max_share", expected="above 0, up to 1", got=max_share)
        if suspects not in SUSPECTS:
            raise UsageError("suspects", expected=", ".join(SUSPECTS), got=suspects)
        self._min_samples, self._max_samples = min_samples, max_samples
        self._screening, self._labels = Screening(max_share, suspects), tuple(labels)
        if run is None:
            run = os.urandom(4) if state is None else state.run
        self.state = GlobalState(run, 0, 0) if state is None else state
        self._run, self._shared = run, ArrayRecord()
        self._bundle = _fleet_id(self._method.name, classes, width, self._hyper)
        self._extractor = extractor_id(extractor) if self._method.extractor == "bundle" else b""
        self._announced = self._announcement(1)  # which says what is out of range

    @classmethod
    def of_bundle(cls, bundle: str | os.PathLike[str], method: str | None = None, **options: Any) -> Self:
        """The strategy for clients with `bundle_mod` and this bundle.

        Args:
            method: the bundle's own, or one that trains nothing.
            options: as of the class; of the method's hyper-parameters those that the server alone uses.

        Raises:
            ProtofleetError: no bundle, or a method that its devices cannot take part in.
        """
        read = read_bundle(bundle)
        m, found = read.manifest, method_of(method or read.manifest.method)
        if found.trains and found.name != m.method:
            raise UsageError(
                "method", expected=f"{m.method}, as the bundle, or one that trains nothing", got=found.name
            )
        told = options.pop("set", None) or {}
        if unknown := sorted(told.keys() - {*found.solved_with}):
            expected = " or ".join(found.solved_with) or "none, all others are the bundle's"
            raise UsageError("set", expected=expected, got=", ".join(unknown), hint="protofleet export --set")
        hyper = found.settled_in({**m.hyper, **told})
        made = cls(found.name, classes=m.classes, width=m.features, set=hyper, labels=m.labels, **options)
        made._bundle, made._extractor = read.sha256, read.extractor(found)
        return made

    @property
    def learned(self) -> Learned:
        """What has come of the rounds so far, as clients have it."""
        return Learned(self._method, self._hyper, self._classes, self._width, travelled(self.state))

    # ── what Flower calls ───────────────────────────────────────────────────────────────────────────────────────────

    def summary(self) -> None:
        found = self._method
        _log.info("\t├──> Method: %s, which sends %s", found.title, found.sends)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds; as Flower's own, but that only the grid must be given.

        Args:
            initial_arrays: a model that all clients are to compute features with, sent along in each round: what
                FedAvg came to, say. None where clients have it already.
            num_rounds: as many as the method usually has when None: one where it trains nothing.

        Returns:
            whose `arrays` are the rows that came of it, by kind (`prototypes`, `head`, …) and whose they are
            (`prototypes.classes`, …); `learned` answers with them.
        """
        self._shared = ArrayRecord() if initial_arrays is None else initial_arrays
        if self._extractor and len(self._shared):
            self._extractor = extractor_id(self._shared)
        rounds = self._method.rounds if num_rounds is None else num_rounds
        return super().start(grid, self._shared, rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the round's statistic; `arrays` are those given to `start`, whatever has come of the rounds."""
        self._announced = self._announcement(server_round)
        self._task(self._announced).write(config)
        return self._without_empty(super().configure_train(server_round, self._shared, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg's, with what has come of the rounds so far: `received` reads it."""
        self._task(self._announcement(server_round)).write(config)
        return self._without_empty(super().configure_evaluate(server_round, self._shared, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the round. A reply that cannot be true is named in the log and left out; where none is left, nothing
        changes."""
        taken: dict[str, Contribution] = {}
        contents = []
        for (name, node), reply in sorted(((_name_of(reply), reply) for reply in replies), key=lambda named: named[0]):
            client = f"{name} (node {node})" if name else f"node {node}"
            try:
                taken[client] = self._checked(reply)
            except ProtofleetError as error:
                _log.warning("aggregate_train: %s is left out: %s", client, error)
                continue
            contents.append(reply.content)
        if not taken:
            return None, None
        metrics = self._merge(server_round, taken)
        if all(self.weighted_by_key in record for c in contents for record in c.metric_records.values()):
            told = [content for content in contents if len(content.metric_records) == 1]
            if told:
                metrics |= dict(self.train_metrics_aggr_fn(told, self.weighted_by_key))
        return arrays_of(self.state), MetricRecord(metrics)

    # ── a round ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _announcement(self, server_round: int) -> Announcement:
        return Announcement(
            run=self._run,
            round=server_round,
            phase="open",
            method=self._method.name,
            bundle=self._bundle,
            global_version=self.state.version,
            encoding=self._method.encoding,
            min_samples=self._min_samples,
            limit_bytes=_LIMIT_BYTES,
            extractor=self._extractor,
        )

    def _task(self, announced: Announcement) -> Task:
        return Task(announced, self._method, self._classes, self._width, self._hyper, self.state)

    def _without_empty(self, messages: Iterable[Message]) -> Iterable[Message]:
        """The messages without a record of no arrays, which would cost each client a request."""
        for message in (made := list(messages)):
            if not len(self._shared) and self.arrayrecord_key in message.content:
                del message.content[self.arrayrecord_key]
        return made

    def _checked(self, message: Message) -> Contribution:
        """The contribution of a reply, if it is of this round and can be merged."""
        a = self._announced
        if message.has_error():
            raise WireError(str(message.error.reason))
        found = Reply.read(message).contribution
        if (found.run, found.round, found.method) != (a.run, a.round, a.method):
            got = f"round {found.round} of {found.method}, run {found.run.hex()}"
            raise WireError("contribution", expected=f"round {a.round} of {a.method}, run {a.run.hex()}", got=got)
        terms = Terms(a.encoding, a.min_samples, self._max_samples, extractor=a.extractor)
        check_content(found, terms, bundles=(a.bundle,), classes=self._classes, width=self._row_width)
        return found

    @property
    def _row_width(self) -> int:
        return self._method.row_width(self._hyper, self._width)

    def _merge(self, server_round: int, taken: Mapping[str, Contribution]) -> dict[str, Any]:
        """Take the round's result over; what Flower is told of it."""

        def messages() -> Iterator[tuple[str, Contribution]]:
            return iter(taken.items())

        result = merge_round(
            self._method,
            messages,
            {client: Traits.of(contribution) for client, contribution in taken.items()},
            self._hyper,
            classes=self._classes,
            width=self._row_width,
            rule=self._rule,
            how=self._screening,
            labels=self._labels,
        )
        for finding in result.findings:
            _log.warning("aggregate_train: %s %s: %s", finding.device, finding.verdict, finding.reason)
        for said in (result.doubt, result.told):
            if said:
                _log.info("aggregate_train: %s", said)
        self.state = next_global(self.state, self._method, result.merged, round=server_round, hyper=self._hyper)
        left_out = sum(finding.left_out for finding in result.findings)
        counted = sum(found.samples for found in taken.values())
        return {self.weighted_by_key: counted, "clients": len(taken) - left_out}


def _name_of(reply: Message) -> tuple[str, int]:
    """What orders contributions: the client's name, then its node."""
    node = reply.metadata.src_node_id
    try:
        return "" if reply.has_error() else Reply.read(reply).name, node
    except ProtofleetError:  # told, and left out, where its content is asked for
        return "", node


def _fleet_id(name: str, classes: int, width: int, hyper: Mapping[str, Value]) -> bytes:
    """32 bytes that stand for what clients without a bundle agree on."""
    agreed = [name, classes, width, dict(hyper)]
    return hashlib.sha256(msgspec.json.encode(agreed, order="sorted")).digest()
