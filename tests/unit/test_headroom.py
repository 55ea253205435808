from __future__ import annotations

from ppd.headroom import Headroom


def test_a_request_counts_until_the_worker_has_reported_it() -> None:
    room = Headroom()
    room.reserve(1, 100)
    before = room.left_tokens
    assert before is None
    room.report(1000)
    assert room.left_tokens == 900  # it has not spoken: what was told cannot hold it
    room.answered(1)
    assert room.left_tokens == 900
    room.report(850)
    assert room.left_tokens == 850
    room.release(1)
    assert room.left_tokens == 850


def test_a_request_that_ends_unanswered_gives_its_share_back() -> None:
    room = Headroom()
    room.report(1000)
    for request in (1, 2, 3):
        room.reserve(request, 100)
    room.answered(2)
    room.release(1)
    room.release(2)
    room.release(2)
    room.reserve(3, 50)  # sent again, elsewhere first
    assert room.left_tokens == 950
