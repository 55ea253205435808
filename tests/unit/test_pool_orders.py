"""The simple orders that the pool is compared with: what they serve next, and what may starve."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eval.pool.arrivals import BUDGET_S
from eval.pool.orders import BATCH, BATCH_WAIT_S, Batcher, Queue, Way, queue_of
from ppd.ann.schedule import Stage

P, D = Stage.PREFILL, Stage.DECODE
LATER_S = 100.0
WHOLE = (Way.PREFILL_FIRST, Way.EDF, Way.FIFO)
BATCHED = (Way.TWO_BATCHERS, Way.FIXED)
Offer = tuple[Stage, float, str]

MIXED = ((D, 0.0, "d0"), (P, 0.01, "p0"), (D, 0.02, "d1"), (P, 0.03, "p1"))


def offered(way: Way, searches: Sequence[Offer]) -> Queue[str]:
    queue: Queue[str] = queue_of(way)
    for stage, at_s, name in searches:
        queue.offer(stage, at_s, name)
    return queue


def emptied(queue: Queue[str]) -> list[list[str]]:
    batches = []
    while batch := queue.take(LATER_S):
        batches.append(batch)
    return batches


@pytest.mark.parametrize(
    ("way", "order"),
    [
        (Way.FIFO, "d0 p0 d1 p1"),
        (Way.PREFILL_FIRST, "p0 p1 d0 d1"),
        (Way.EDF, "p0 p1 d0 d1"),  # deadlines at 15, 35, 50 and 70 ms
    ],
)
def test_whole_searches_are_taken_one_at_a_time_in_the_order_of_their_way(
    way: Way, order: str
) -> None:
    assert emptied(offered(way, MIXED)) == [[name] for name in order.split()]


def test_batches_are_of_one_stage_or_of_both_in_the_order_of_arrival() -> None:
    assert emptied(offered(Way.FIXED, MIXED)) == [["d0", "p0", "d1", "p1"]]
    assert emptied(offered(Way.TWO_BATCHERS, MIXED)) == [["p0", "p1"], ["d0", "d1"]]


@pytest.mark.parametrize("way", BATCHED)
def test_no_batch_is_larger_than_its_size(way: Way) -> None:
    queue = offered(way, [(P, 0.0, str(number)) for number in range(BATCH + 1)])
    assert [len(batch) for batch in emptied(queue)] == [BATCH, 1]


def test_a_batch_that_is_not_full_is_due_when_its_oldest_search_has_waited() -> None:
    queue = offered(Way.FIXED, [(D, 1.0, "old"), (P, 1.0005, "new")])
    due_s = queue.due_s()
    assert due_s == 1.0 + BATCH_WAIT_S
    assert queue.take(1.0 + BATCH_WAIT_S / 2) == []
    assert queue.take(due_s) == ["old", "new"]
    assert queue.due_s() is None


def test_a_full_batch_is_due_when_its_last_search_arrives() -> None:
    batcher: Batcher[str] = Batcher(2, 1.0)
    batcher.offer(P, 0.25, "a")
    assert batcher.due_s() == 1.25
    batcher.offer(D, 0.5, "b")
    assert batcher.due_s() == 0.5
    assert batcher.take(0.5) == ["a", "b"]


@pytest.mark.parametrize("way", [way for way in Way if way is not Way.OURS])
def test_an_empty_queue_has_nothing_due(way: Way) -> None:
    queue = queue_of(way)
    assert queue.due_s() is None
    assert queue.take(LATER_S) == []


def served_before(way: Way, prefills: int, gap_s: float) -> int | None:
    """How many prefill searches are served before an older decode search, if one comes each turn.

    None: it starves; it is not served while prefill searches come.
    """
    queue = offered(way, [(D, 0.0, "decode")])
    for number in range(prefills):
        now_s = gap_s * number
        queue.offer(P, now_s, "prefill")
        if "decode" in queue.take(now_s):
            return number
    return None


@pytest.mark.parametrize("way", [Way.PREFILL_FIRST, Way.TWO_BATCHERS])
def test_a_strict_precedence_of_prefill_lets_decode_starve(way: Way) -> None:
    assert served_before(way, 10_000, 0.001) is None


def test_an_earliest_deadline_lets_decode_wait_no_longer_than_the_budgets_differ() -> None:
    gap_s = 0.001
    before = served_before(Way.EDF, 10_000, gap_s)
    assert before is not None
    assert before * gap_s == pytest.approx(BUDGET_S[D] - BUDGET_S[P], abs=gap_s)


def test_the_oldest_first_lets_no_search_overtake() -> None:
    assert served_before(Way.FIFO, 10, 0.001) == 0
