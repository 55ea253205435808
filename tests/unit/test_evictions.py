"""What a worker has dropped of whom, from the names of blocks alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ppd.evictions import Evictions

PAGE = 16


def test_a_conversation_loses_its_end_first_and_has_all_again_with_its_next_request() -> None:
    cache = Evictions()
    cache.stored(1, [10, 11, 12], PAGE)
    cache.stored(1, [13, 14], PAGE)
    assert cache.lost(1) == 0
    assert cache.removed([14]) == PAGE  # the end of what was stored together
    assert cache.removed([13]) == PAGE
    assert cache.lost(1) == 2 * PAGE
    cache.stored(1, [13, 14, 15], PAGE)
    assert cache.lost(1) == 0
    assert cache.removed([13, 14, 15, 10, 11, 12]) == 6 * PAGE
    assert cache.lost(1) == 6 * PAGE


def test_who_is_not_known_does_not_count_nor_hide_others() -> None:
    cache = Evictions()
    cache.stored(1, [10, 11], PAGE)
    assert cache.removed([7, 8, 9]) == 0
    assert cache.removed([8, 9, 11, 7]) == PAGE, "10 was not among them"
    assert (cache.lost(1), cache.lost(2)) == (PAGE, 0)
    cache.stored(2, [], PAGE)
    assert cache.removed([10]) == PAGE


def test_a_cache_that_is_emptied_or_not_understood() -> None:
    cache = Evictions()
    cache.stored(1, [10, 11], PAGE)
    cache.stored(2, [20], PAGE)
    cache.cleared()
    assert (cache.lost(1), cache.lost(2)) == (2 * PAGE, PAGE)
    cache.served(2)
    assert (cache.lost(1), cache.lost(2)) == (2 * PAGE, 0)
    cache.forget()
    assert (cache.lost(1), cache.lost(2)) == (0, 0)


def test_those_who_lost_something_and_never_came_back_are_bounded() -> None:
    cache = Evictions(most_sessions=2)
    for session in (1, 2, 3):
        cache.stored(session, [session], PAGE)
        cache.removed([session])
    assert [cache.lost(session) for session in (1, 2, 3)] == [0, PAGE, PAGE]


@dataclass
class Kept:
    """One conversation in a cache that is looked at from within: nodes of blocks."""

    nodes: list[list[int]] = field(default_factory=list)
    lost: int = 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "split", "drop"]), st.integers(0, 3), st.integers(1, 6))
    ),
    st.integers(1, 4),
)
def test_it_agrees_with_a_cache_that_drops_leaves(
    events: list[tuple[str, int, int]], together: int
) -> None:
    cache = Evictions()
    truth: dict[int, Kept] = {}
    told: list[int] = []  # removed, and told later with others
    next_block = 1
    for what, session, size in events:
        kept = truth.setdefault(session, Kept())
        if what == "store":
            cache.removed(told)
            told = []
            blocks = list(range(next_block, next_block + size))
            next_block += size
            cache.stored(session, blocks, PAGE)
            kept.nodes.append(blocks)
            kept.lost = 0
        elif what == "split" and kept.nodes and len(kept.nodes[-1]) > 1:
            last = kept.nodes.pop()
            at = 1 + size % (len(last) - 1)
            kept.nodes += [last[:at], last[at:]]
        elif what == "drop" and kept.nodes:
            told += (gone := kept.nodes.pop())
            kept.lost += len(gone) * PAGE
            if len(told) >= together:
                cache.removed(told)
                told = []
    cache.removed(told)
    assert {session: cache.lost(session) for session in truth} == {
        session: kept.lost for session, kept in truth.items()
    }
