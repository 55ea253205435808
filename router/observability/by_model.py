"""The metrics of several models as one: each series has the label ``model``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ByModel(Collector):
    """The metrics of each model, and those of no model.

    Args:
        shared: of no model. Where a metric is of models, its series without labels are left out:
            they count nothing.
        models: the metrics of each model, by its name.
    """

    def __init__(self, shared: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> None:
        self._shared = shared
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics in Prometheus' form."""
        families: dict[str, Metric] = {}
        merged: Metric | None
        for model, registry in self._models.items():
            for family in registry.collect():
                merged = families.setdefault(family.name, _empty(family))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "model": model})
                    for sample in family.samples
                ]
        for family in self._shared.collect():
            if (merged := families.get(family.name)) is None:
                families[family.name] = family
            else:
                merged.samples += [sample for sample in family.samples if sample.labels]
        yield from families.values()


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)
