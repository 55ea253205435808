"""The Grafana dashboard: what it asks Prometheus for is exported by the router or the plugin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang_patches.telemetry
from router.observability.metrics import Metrics

FILE = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
_SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


def exported_by_the_router() -> set[str]:
    return {
        family.name + suffix
        for family in Metrics().registry.collect()
        for suffix in _SUFFIXES[family.type]
    }


def exported_by_the_plugin() -> set[str]:
    """As its source names them: made, they would stay in this process's registry."""
    source = Path(sglang_patches.telemetry.__file__).read_text()
    made = re.findall(r'(PromCounter|histogram|gauge)\(\s*"(ppd_\w+)"', source)
    return {
        name + suffix
        for kind, name in made
        for suffix in _SUFFIXES[kind.removeprefix("Prom").lower()]
    }


def texts(value: Any) -> Iterator[tuple[str, str]]:
    """All strings of a JSON value, by the key they stand under."""
    match value:
        case dict():
            for key, inner in value.items():
                if isinstance(inner, str):
                    yield key, inner
                else:
                    yield from texts(inner)
        case list():
            for inner in value:
                yield from texts(inner)


def asked_for() -> set[str]:
    expressions = [
        text for key, text in texts(json.loads(FILE.read_text())) if key in ("expr", "query")
    ]
    # Whatever stands outside of braces and begins as our metrics do.
    return {
        name
        for text in expressions
        for name in re.findall(r"\bppd_\w+", re.sub(r"\{[^}]*\}", "", text))
    }


def test_every_metric_it_asks_for_is_exported() -> None:
    asked = asked_for()
    assert len(asked) > 20
    assert asked <= exported_by_the_router() | exported_by_the_plugin()


def test_its_panels_are_whole() -> None:
    """One datasource, chosen at the top; panels that do not overlap and have something to show."""
    panels = json.loads(FILE.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
