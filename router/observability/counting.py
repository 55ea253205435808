"""Counters and histograms whose updates take a fraction of a microsecond.

They are updated for every request and every part of every stream, by one thread only. So they
need no locks, which ``prometheus_client`` has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Counts(Collector):
    """A counter with labels.

    Args:
        name: of the metric, without ``_total``.
        help_text: of the metric.
        labels: names of the labels; () for none.
        registry: that the metric is added to.
    """

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def add(self, *labels: str, more: int = 1) -> None:
        """Add ``more`` to the counter with these label values."""
        self._counts[labels] = self._counts.get(labels, 0) + more

    def get(self, *labels: str) -> int | None:
        """Return the count for these label values, or None if nothing has been counted."""
        return self._counts.get(labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metric in Prometheus' form."""
        family = CounterMetricFamily(self._name, self._help_text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class HistogramChild:
    """The observations of a histogram with one set of label values.

    Attributes:
        counts: observations of each bucket, not cumulative.
        total: sum of the observed values.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histograms(Collector):
    """A histogram with labels.

    Args:
        name: of the metric.
        help_text: of the metric.
        labels: names of the labels; () for none.
        bounds: upper bounds of the buckets, ascending. A bucket without a bound is added.
        registry: that the metric is added to.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = labels
        self._bounds = bounds
        self._children: dict[tuple[str, ...], HistogramChild] = {}
        registry.register(self)

    def of(self, *labels: str) -> HistogramChild:
        """Return the observations with these label values; they are created on first use."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = HistogramChild(self._bounds)
        return child

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric in Prometheus' form."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._labels)
        ends = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, child in self._children.items():
            buckets: Iterable[tuple[str, float]] = zip(ends, accumulate(child.counts), strict=True)
            family.add_metric(labels, list(buckets), child.total)
        yield family
