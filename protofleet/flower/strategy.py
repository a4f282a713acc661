"""The server's side: a Flower strategy that runs rounds of one of our methods and merges them as our aggregator does.

A round, in order:

1. `configure_train` asks the nodes that Flower samples.
2. `aggregate_train` decodes each reply and checks that it is possible (`aggregator/ingest/validation.py`).
3. It leaves outliers and impossible contributions out, and merges the rest (`aggregator/merging/merge_round.py`).
4. It makes the next global state (`aggregator/merging/next_global.py`).

Contributions are merged in the order of the clients' names, not in the order of arrival: sums of floats depend on it.
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

from protofleet.aggregator.ingest.validation import MAX_SAMPLES, Terms, check_content
from protofleet.aggregator.merging.merge_round import merge_round
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.screening.outliers import SUSPECTS, Screening, Suspects, Traits
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import ProtofleetError, UsageError, WireError
from protofleet.contract.methods import Value
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import Rule, check_rule
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import LEAST_LIMIT_BYTES, Announcement, Contribution
from protofleet.flower.learned import Learned
from protofleet.flower.records import Reply, Task, arrays_of, carried, extractor_id, travelled

__all__ = ["MethodStrategy"]

_LIMIT_BYTES = max(LEAST_LIMIT_BYTES, 1 << 28)
_log = logging.getLogger("flwr")


class MethodStrategy(FedAvg):
    """Rounds of one of our methods, for clients with `method_mod` or `bundle_mod`.

    Args:
        method: `ncm`, `ffc`, `fedcof`, `fedproto`, `fedpr`, `fedhp`, `fedhkd`, `spherefed`, or `package.module:Class`.
        classes, width: C, the number of classes, and D, the width of the clients' features.
        set: hyper-parameters of the method, as `protofleet export --set` takes them: `{"ridge": 0.1}`.
        extractor: names the extractor that all clients share, where the method needs one; see `method_mod`. Arrays
            given to `start` identify it instead.
        min_samples: a client withholds classes with fewer samples.
        max_samples: the most samples that one client may claim.
        max_share: the largest share of a round's samples that one client counts for. None: a half, or 3/n of n
            clients where that is less.
        suspects: what happens to clients whose class means contradict the others': `leave-out`, `name` or `ignore`.
        rule: how class means merge: `mean`, `median` or `trimmed-mean`.
        labels: names of the classes, for log lines about clients.
        run: 4 bytes that identify this run; random when None.
        state: the global state to start from; an empty one when None.
        options: as Flower's `FedAvg` takes them: `fraction_train`, `min_train_nodes`, `min_available_nodes`, …;
            `fraction_evaluate` is 0 unless given.

    Attributes:
        state: the global state so far, in float64.

    Raises:
        ProtofleetError: an unknown method or hyper-parameter, or a method that adds noise. One line says which.
    """

    # arguments: Flower's own, and ours, by name
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
        self._announced = self._announcement(1)  # raises where an option is out of range

    @classmethod
    def of_bundle(cls, bundle: str | os.PathLike[str], method: str | None = None, **options: Any) -> Self:
        """The strategy for clients with `bundle_mod` and this bundle.

        Args:
            method: the bundle's own, or one without training.
            options: as of the class. `set` takes only hyper-parameters that the server alone uses.

        Raises:
            ProtofleetError: no bundle, or a method that the bundle's devices cannot run.
        """
        read = read_bundle(bundle)
        m, chosen = read.manifest, method_of(method or read.manifest.method)
        if chosen.trains and chosen.name != m.method:
            raise UsageError(
                "method", expected=f"{m.method}, as the bundle, or one that trains nothing", got=chosen.name
            )
        given = options.pop("set", None) or {}
        if unknown := sorted(given.keys() - {*chosen.solved_with}):
            expected = " or ".join(chosen.solved_with) or "none, all others are the bundle's"
            raise UsageError("set", expected=expected, got=", ".join(unknown), hint="protofleet export --set")
        hyper = chosen.resolved_in({**m.hyper, **given})
        strategy = cls(chosen.name, classes=m.classes, width=m.features, set=hyper, labels=m.labels, **options)
        strategy._bundle, strategy._extractor = read.sha256, read.extractor(chosen)
        return strategy

    @property
    def learned(self) -> Learned:
        """The result of the rounds so far, as clients have it."""
        return Learned(self._method, self._hyper, self._classes, self._width, travelled(self.state))

    # ── what Flower calls ───────────────────────────────────────────────────────────────────────────────────────────

    def summary(self) -> None:
        method = self._method
        _log.info("\t├──> Method: %s, which sends %s", method.title, method.sends)
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
        """Run the rounds. As Flower's own `start`, but only the grid is required.

        Args:
            initial_arrays: a model that all clients compute features with, for example a result of FedAvg. It is sent
                in each round. None where clients have it already.
            num_rounds: None for the method's usual number, which is one where it trains nothing.

        Returns:
            a result whose `arrays` are the final rows by kind (`prototypes`, `head`, …) and their classes
            (`prototypes.classes`, …). `learned` answers with them.
        """
        self._shared = ArrayRecord() if initial_arrays is None else initial_arrays
        if self._extractor and len(self._shared):
            self._extractor = extractor_id(self._shared)
        rounds = self._method.rounds if num_rounds is None else num_rounds
        return super().start(grid, self._shared, rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the round's statistic. The arrays that are sent are those given to `start`, not `arrays`."""
        self._announced = self._announcement(server_round)
        self._task(self._announced).write(config)
        return self._without_empty(super().configure_train(server_round, self._shared, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg's, with the result of the rounds so far, which `received` reads."""
        self._task(self._announcement(server_round)).write(config)
        return self._without_empty(super().configure_evaluate(server_round, self._shared, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the round. An impossible reply is logged and left out. If no reply is left, the state stays."""
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
            with_metrics = [content for content in contents if len(content.metric_records) == 1]
            if with_metrics:
                metrics |= dict(self.train_metrics_aggr_fn(with_metrics, self.weighted_by_key))
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
            factors=self._method.statistic.takes_factor(),
            min_samples=self._min_samples,
            limit_bytes=_LIMIT_BYTES,
            extractor=self._extractor,
        )

    def _task(self, announced: Announcement) -> Task:
        return Task(announced, self._method, self._classes, self._width, self._hyper, self.state)

    def _without_empty(self, messages: Iterable[Message]) -> Iterable[Message]:
        """The messages without their empty array record, which would cost each client a request."""
        for message in (listed := list(messages)):
            if not len(self._shared) and self.arrayrecord_key in message.content:
                del message.content[self.arrayrecord_key]
        return listed

    def _checked(self, message: Message) -> Contribution:
        """The contribution of a reply.

        Raises:
            ProtofleetError: it is of another round, or cannot be merged.
        """
        a = self._announced
        if message.has_error():
            raise WireError(str(message.error.reason))
        contribution = Reply.read(message).contribution
        if (contribution.run, contribution.round, contribution.method) != (a.run, a.round, a.method):
            got = f"round {contribution.round} of {contribution.method}, run {contribution.run.hex()}"
            raise WireError("contribution", expected=f"round {a.round} of {a.method}, run {a.run.hex()}", got=got)
        terms = Terms(a.encoding, a.min_samples, self._max_samples, extractor=a.extractor)
        check_content(contribution, terms, bundles=(a.bundle,), classes=self._classes, width=self._row_width)
        return contribution

    @property
    def _row_width(self) -> int:
        return self._method.row_width(self._hyper, self._width)

    def _merge(self, server_round: int, taken: Mapping[str, Contribution]) -> dict[str, Any]:
        """Merge the round into the state; returns the metrics for Flower."""

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
        for line in (result.doubt, result.told):
            if line:
                _log.info("aggregate_train: %s", line)
        self.state = next_global(self.state, self._method, result.merged, round=server_round, hyper=self._hyper)
        left_out = sum(finding.left_out for finding in result.findings)
        counted = sum(one.samples for one in taken.values())
        return {self.weighted_by_key: counted, "clients": len(taken) - left_out}


def _name_of(reply: Message) -> tuple[str, int]:
    """The key that orders contributions: the client's name, then its node."""
    node = reply.metadata.src_node_id
    try:
        return "" if reply.has_error() else Reply.read(reply).name, node
    except ProtofleetError:  # `_checked` reports it and leaves it out
        return "", node


def _fleet_id(name: str, classes: int, width: int, hyper: Mapping[str, Value]) -> bytes:
    """32 bytes that identify what clients without a bundle agree on."""
    agreed = [name, classes, width, dict(hyper)]
    return hashlib.sha256(msgspec.json.encode(agreed, order="sorted")).digest()
