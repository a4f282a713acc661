"""What a scraper gets of some metrics, without the HTTP around it; and a collector for tests of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["OneGauge", "text_of"]


def text_of(metrics: Collector) -> str:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


class OneGauge(Collector):
    """`x 1`, whenever `before` returns."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self._before = before

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self._before()
        yield GaugeMetricFamily("x", "x", value=1)
