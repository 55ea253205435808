"""Whether a router could find what foresight finds."""

from __future__ import annotations

from collections.abc import Callable

from ...compare.kept import machine_of, newest
from ..parts import Block, Table, block, percent
from ..results import Results, Rows


def learned(results: Results) -> Block:
    """Return what each way to choose saves of what foresight saves, by traffic."""
    every = results.rows("observable.jsonl")
    rows = Rows(every.file, tuple(newest(every)), every.headers)
    table = [
        (
            row["trace"],
            machine_of(row),
            f"{row['decisions']:,}",
            f"{row['foresight']:.3f}",
            *(percent(row[way] / row["foresight"]) for way in ("local", "ppd", "learner")),
            f"{row['learner_ahead']} of {row['windows']}",
            percent(row["explained"]),
        )
        for row in rows
    ]
    saved = ("foresight saves", "all local", "`ppd`", "learner")
    caption = (
        "foresight saves: mean over decisions of a remote turn's cost, less that of the cheaper "
        "route; the next three columns: the part of it that other ways save; ahead in: windows in "
        "which the learner saves more than `ppd`; explains: share of the variance of costs (R^2)"
    )
    return block(
        Table(("traffic", "link", "decisions", *saved, "ahead in", "explains"), table, caption),
        made_of=[rows],
    )


BLOCKS: dict[str, Callable[[Results], Block]] = {"observable": learned}
