from __future__ import annotations

from ppd.headroom import Headroom


def test_a_request_counts_until_the_worker_has_told_of_it() -> None:
    room = Headroom()
    room.sent(1, 100)
    before = room.left_tokens
    assert before is None
    room.told(1000)
    assert room.left_tokens == 900  # it has not spoken: what was told cannot hold it
    room.spoke(1)
    assert room.left_tokens == 900
    room.told(850)
    assert room.left_tokens == 850
    room.ended(1)
    assert room.left_tokens == 850


def test_what_ends_unheard_gives_its_share_back() -> None:
    room = Headroom()
    room.told(1000)
    for request in (1, 2, 3):
        room.sent(request, 100)
    room.spoke(2)
    room.ended(1)
    room.ended(2)
    room.ended(2)
    room.sent(3, 50)  # sent again, elsewhere first
    assert room.left_tokens == 950
