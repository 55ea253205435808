"""What a worker has dropped of whom, from the names of blocks alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ppd.evictions import Evictions

PAGE = 16


def test_a_conversation_loses_its_end_first_and_has_all_again_with_its_next_request() -> None:
    cache = Evictions()
    cache.stored(1, None, [10, 11, 12], PAGE)
    cache.stored(1, 12, [13, 14], PAGE)
    assert cache.lost(1) == 0
    assert cache.removed([14]) == PAGE  # the end of what was stored together
    assert cache.removed([13]) == PAGE
    assert cache.lost(1) == 2 * PAGE
    cache.stored(1, 12, [13, 14, 15], PAGE)
    assert cache.lost(1) == 0
    assert cache.removed([13, 14, 15, 10, 11, 12]) == 6 * PAGE
    assert cache.lost(1) == 6 * PAGE


def test_what_a_conversation_left_behind_is_not_its_end() -> None:
    cache = Evictions()
    cache.stored(1, None, [10, 11, 12, 13], PAGE)  # 12 and 13: reasoning that is not sent back
    cache.stored(1, 11, [14, 15], PAGE)
    assert cache.removed([12, 13]) == 0
    cache.stored(1, 14, [16], PAGE)
    assert cache.removed([15, 99]) == 0
    assert cache.lost(1) == 0
    assert cache.removed([16]) == PAGE
    cache.stored(1, 10, [17], PAGE)  # a fork: all of the other branch is left
    assert cache.removed([14, 11]) == 0
    assert cache.removed([17, 10]) == 2 * PAGE


def test_a_prefix_that_another_stored_is_not_its_own() -> None:
    cache = Evictions()
    cache.stored(1, None, [10, 11, 12], PAGE)
    cache.stored(2, 10, [20, 21], PAGE)
    cache.stored(2, 10, [22], PAGE)  # nothing of what it had before
    assert cache.removed([20, 21]) == 0
    assert cache.removed([22, 12, 11, 10]) == 4 * PAGE
    assert (cache.lost(1), cache.lost(2)) == (3 * PAGE, PAGE)


def test_an_unmeasured_policy_neither_counts_nor_hides_others() -> None:
    cache = Evictions()
    cache.stored(1, None, [10, 11], PAGE)
    assert cache.removed([7, 8, 9]) == 0
    assert cache.removed([8, 9, 11, 7]) == PAGE, "10 was not among them"
    assert (cache.lost(1), cache.lost(2)) == (PAGE, 0)
    cache.stored(2, None, [], PAGE)
    assert cache.removed([10]) == PAGE


def test_a_cache_that_is_emptied_or_not_understood() -> None:
    cache = Evictions()
    cache.stored(1, None, [10, 11], PAGE)
    cache.stored(2, None, [20], PAGE)
    cache.cleared()
    assert (cache.lost(1), cache.lost(2)) == (2 * PAGE, PAGE)
    cache.served(2)
    assert (cache.lost(1), cache.lost(2)) == (2 * PAGE, 0)
    cache.forget()
    assert (cache.lost(1), cache.lost(2)) == (0, 0)
    cache.stored(1, None, [10, 11], PAGE)
    cache.stored(2, None, [10, 11], PAGE)  # so the first must have been dropped unheard
    assert cache.removed([10, 11]) == 2 * PAGE
    assert (cache.lost(1), cache.lost(2)) == (0, 2 * PAGE)


def test_what_is_remembered_is_bounded() -> None:
    cache = Evictions(max_sessions=2, max_blocks=4)
    for session in (1, 2, 3):
        cache.stored(session, None, [session], PAGE)
        cache.removed([session])
    assert [cache.lost(session) for session in (1, 2, 3)] == [0, PAGE, PAGE]
    cache.stored(4, None, [10, 11, 12], PAGE)
    cache.stored(5, None, [13, 14], PAGE)
    assert cache.removed([12, 14]) == PAGE, "there was no room for both"
    assert (cache.lost(4), cache.lost(5)) == (0, PAGE)


@dataclass
class Kept:
    """One conversation in a cache that is looked at from within: nodes of blocks."""

    nodes: list[list[int]] = field(default_factory=list)
    dead: list[list[int]] = field(default_factory=list)  # leaves beside its path
    lost: int = 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "branch", "split", "drop", "drop dead"]),
        st.integers(0, 3),
        st.integers(1, 6),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 4))
def test_it_agrees_with_a_cache_that_drops_leaves(
    events: list[tuple[str, int, int]], together: int
) -> None:
    cache = Evictions()
    truth: dict[int, Kept] = {}
    told: list[int] = []  # removed, and told later with others
    next_block = 1
    for what, session, size in events:
        kept = truth.setdefault(session, Kept())
        if what in ("store", "branch"):
            cache.removed(told)
            told = []
            if what == "branch" and kept.nodes:  # in the midst of its last node, or behind it
                last = kept.nodes.pop()
                at = 1 + size % len(last)
                kept.nodes.append(last[:at])
                kept.dead += [last[at:]] if last[at:] else []
            blocks = list(range(next_block, next_block + size))
            next_block += size
            parent = kept.nodes[-1][-1] if kept.nodes else None
            cache.stored(session, parent, blocks, PAGE)
            kept.nodes.append(blocks)
            kept.lost = 0
        elif what == "split" and kept.nodes and len(kept.nodes[-1]) > 1:
            last = kept.nodes.pop()
            at = 1 + size % (len(last) - 1)
            kept.nodes += [last[:at], last[at:]]
        elif what == "drop" and kept.nodes:
            told += (gone := kept.nodes.pop())
            kept.lost += len(gone) * PAGE
        elif what == "drop dead" and kept.dead:
            told += kept.dead.pop()
        if len(told) >= together:
            cache.removed(told)
            told = []
    cache.removed(told)
    assert {session: cache.lost(session) for session in truth} == {
        session: kept.lost for session, kept in truth.items()
    }


BLOCK_NAMES = st.lists(st.integers(1, 5), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), BLOCK_NAMES)))
def test_no_message_breaks_the_reader(events: list[tuple[int, int, list[int]]]) -> None:
    cache = Evictions()
    for session, parent, blocks in events:
        if session:
            cache.stored(session, parent, blocks, PAGE)
        else:
            cache.removed(blocks)
    assert min(cache.lost(1), cache.lost(2)) >= 0
