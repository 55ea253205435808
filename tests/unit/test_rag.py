"""Passages of Markdown, and what the benchmark says of its turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.rag.bench import RagTurn, summarize
from eval.rag.cluster import passages
from ppd.errors import ConfigError

MARKDOWN = """# Title

A paragraph with a [link](there.md#at) that is long enough to be a passage of its own, and
goes on in a second line.

| a | table that is long enough to be taken for a passage, but is none, whatever it says |
|---|---|

```
code that is long enough to be taken for a passage, but is none of those either, indeed not
```

short

- **One point** of a list, long enough to be a passage of its own: it says something or other.
- **Another point**, which is just as long as the one before and so becomes a passage as well.
"""


def test_paragraphs_and_points_become_passages(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(MARKDOWN)
    found = passages(tmp_path)
    assert [one.id for one in found] == ["page.md:1", "page.md:2", "page.md:3"]
    assert found[0].text.startswith("A paragraph with a link that is long enough")
    assert found[0].text.endswith("and goes on in a second line.")
    assert found[1].text.startswith("- **One point**")
    with pytest.raises(ConfigError, match="no Markdown with passages"):
        passages(tmp_path / "none")


def test_a_turn_is_the_median_of_its_rounds() -> None:
    turns = [
        RagTurn(
            number, way, turn, "local", 100 * turn, 100 * turn + 50, cached, 10.0 * (number + 1)
        )
        for number in range(3)
        for way, cached in (("off", 90), ("tail", 95), ("stripped", 60), ("system", 5))
        for turn in range(1, 11)
    ]
    rows = summarize(turns)
    assert [row["turn"] for row in rows] == list(range(1, 11))
    assert rows[4] == {
        "turn": 5,
        "off_cached": 90, "off_context": 500, "off_ttft_ms": 20.0,
        "tail_cached": 95, "tail_context": 500, "tail_ttft_ms": 20.0,
        "stripped_cached": 60, "stripped_context": 500, "stripped_ttft_ms": 20.0,
        "system_cached": 5, "system_context": 500, "system_ttft_ms": 20.0,
    }  # fmt: skip
