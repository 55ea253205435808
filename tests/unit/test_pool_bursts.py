"""What the pool's benchmark does: drawn histories, three ways to run them, real sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.pool import sentences
from eval.pool.bursts import Way, draw, run
from ppd.ann import batch
from ppd.errors import ConfigError

from .ann_making import clustered, made, target_of

ROWS = clustered(1500, 32, 20, 0)


def test_histories_have_the_rate_asked_for_and_bursts_five_times_as_dense() -> None:
    arrivals = draw(1000.0, 60.0, 100, 0)
    assert len(arrivals) == pytest.approx(60_000, rel=0.05)
    in_bursts = sum(one.at_s % 0.5 >= 0.45 for one in arrivals)
    assert in_bursts * 0.45 / 0.05 == pytest.approx(5 * (len(arrivals) - in_bursts), rel=0.1)
    assert arrivals == draw(1000.0, 60.0, 100, 0)


@pytest.mark.parametrize("way", list(Way))
def test_every_way_answers_all_with_the_same_ids(way: Way) -> None:
    target = target_of(made(ROWS))
    queries = ROWS[:50] + 0.1
    arrivals = draw(3000.0, 0.2, 50, 1)
    answered = run(way, target, target.snapshot.space.queries(queries), arrivals, 2)
    assert len(answered) == len(arrivals)
    for one in answered:
        query = queries[one.query : one.query + 1]
        _, nodes = batch.search(target, query, len(one.nodes), one.itopk)
        assert one.nodes == tuple(nodes[0].tolist())
        assert one.took_s > 0


def test_sentences_come_from_files_first(tmp_path: Path) -> None:
    said = [f"This is the sentence with number {'x' * i} in it." for i in range(1, 8)]
    talk = {"messages": [{"role": "user", "content": " ".join(said)}, {"content": None}]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk))
    found, documented = sentences.collect([tmp_path / "talk.jsonl"], 7, 0)
    assert sorted(found) == sorted(said)
    assert documented == 0
    found, documented = sentences.collect([tmp_path / "talk.jsonl"], 30, 0)
    assert documented == 23
    assert set(said) < set(found)
    with pytest.raises(ConfigError, match=r"absent"):
        sentences.collect([tmp_path / "absent.txt"], 1, 0)
