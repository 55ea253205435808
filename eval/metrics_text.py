"""A router's or a worker's ``/metrics``, read."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families


def read_metrics(url: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample at ``url``/metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
