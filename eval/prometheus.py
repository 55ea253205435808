"""Prometheus text, as a router or a worker serves it at ``/metrics``."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class MetricSample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


def read_metrics(url: str) -> Iterator[MetricSample]:
    """Fetch ``url``/metrics, and yield its samples.

    Raises:
        OSError: the server does not answer.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        yield from parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> Iterator[MetricSample]:
    """Yield every sample of a text in Prometheus' format."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield MetricSample(sample.name, sample.labels, sample.value)
