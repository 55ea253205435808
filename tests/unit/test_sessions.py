"""The session index: longest prefix, expiry, size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ppd.prefix import MessageChain, hash_messages, hash_text
from ppd.sessions import SessionIndex, Turn

TURN = Turn(
    session=1,
    number=1,
    home="d",
    prompt_tokens=10,
    completion_tokens=5,
    prefill_worker="p",
    prefill_tokens=10,
    usual_reply_tokens=5.0,
)


def chain(*contents: str) -> MessageChain:
    return hash_messages(b"", [{"role": "user", "content": content} for content in contents])


def index(capacity: int = 100, ttl_s: float = 60.0) -> SessionIndex:
    return SessionIndex(capacity=capacity, ttl_s=ttl_s)


def test_unknown() -> None:
    assert index().find(chain("a"), 0.0) is None


def test_longest_prefix_wins() -> None:
    known = index()
    known.record(chain("a"), TURN, 0.0)
    known.record(chain("a", "reply", "b"), replace(TURN, number=2), 0.0)
    hit = known.find(chain("a", "reply", "b", "reply", "c"), 0.0)
    assert hit is not None
    assert hit.turn.number == 2
    assert hit.bytes_after == len("useruser" + "replyc")


def test_fork_and_edit_find_what_they_share() -> None:
    known = index()
    known.record(chain("a"), TURN, 0.0)
    known.record(chain("a", "reply", "b"), replace(TURN, number=2), 0.0)
    for contents in (("a", "reply", "other"), ("a", "edited reply", "b")):
        hit = known.find(chain(*contents), 0.0)
        assert hit is not None
        assert hit.turn.number == 1


def test_regeneration_is_a_hit_with_nothing_after() -> None:
    known = index()
    known.record(chain("a", "reply", "b"), replace(TURN, number=2), 0.0)
    hit = known.find(chain("a", "reply", "b"), 0.0)
    assert hit is not None
    assert (hit.turn.number, hit.bytes_after) == (2, 0)


def test_a_shared_system_prompt_is_no_conversation() -> None:
    known = index()
    known.record(chain("system " * 1000, "mine"), TURN, 0.0)
    assert known.find(chain("system " * 1000, "yours"), 0.0) is None


def test_expiry_counts_from_last_use() -> None:
    known = index(ttl_s=10.0)
    known.record(chain("a"), TURN, 0.0)
    assert known.find(chain("a", "x"), 9.0) is not None
    assert known.find(chain("a", "x"), 18.0) is not None
    assert known.find(chain("a", "x"), 28.0) is None
    assert len(known) == 0


def test_least_recently_used_go_first() -> None:
    known = index(capacity=2)
    known.record(chain("a"), TURN, 0.0)
    known.record(chain("b"), TURN, 1.0)
    known.find(chain("a"), 2.0)
    known.record(chain("c"), TURN, 3.0)
    assert known.find(chain("b"), 4.0) is None
    assert known.find(chain("a"), 4.0) is not None


def test_turns_that_were_followed_go_before_any_conversation() -> None:
    known = index(capacity=3)
    known.record(chain("a"), TURN, 0.0)
    known.record(chain("b"), TURN, 1.0)
    for number, turn in enumerate(["a2", "a3"], 2):
        contents = ["a", *[f"a{n}" for n in range(2, number)], turn]
        hit = known.find(chain(*contents), float(number))
        assert hit is not None
        known.record(chain(*contents), replace(TURN, number=number), float(number), hit.digest)
    assert len(known) == 3
    newest, other = known.find(chain("a", "a2", "a3", "x"), 5.0), known.find(chain("b", "x"), 5.0)
    assert newest is not None
    assert newest.turn.number == 3
    assert other is not None, "though it was used least recently"
    fork = known.find(chain("a", "a2", "else"), 5.0)
    assert fork is not None, "while there is room"
    assert fork.turn.number == 2
    assert known.find(chain("a", "else"), 5.0) is None
    known.record(chain("c"), TURN, 6.0)
    assert known.find(chain("a", "a2", "else"), 7.0) is None
    assert known.find(chain("b", "x"), 7.0) is not None


def test_what_has_expired_makes_room_by_itself() -> None:
    known = index(capacity=100, ttl_s=10.0)
    known.record(chain("a"), TURN, 0.0)
    known.record(chain("a", "b"), TURN, 1.0, chain("a").end)
    known.record(chain("c"), TURN, 10.5)
    assert len(known) == 3, "the first turn lives on for forks, as long as the second"
    known.record(chain("d"), TURN, 12.0)
    assert len(known) == 2


def test_kv_tokens_leave_out_the_last_generated_one() -> None:
    assert TURN.kv_tokens == 14
    assert replace(TURN, completion_tokens=0).kv_tokens == 10


# Without "\0": no prompt is another one's continuation below.
_TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=3000)


@given(st.lists(st.tuples(_TEXTS, st.booleans()), max_size=30), st.integers(1, 8))
def test_prompts_are_found_and_nothing_is_left_behind(
    steps: list[tuple[str, bool]], capacity: int
) -> None:
    known = index(capacity=capacity)
    for i, (text, grow) in enumerate(steps):
        prompt = hash_text(b"", text)
        known.record(prompt, replace(TURN, number=i), float(i))
        longer = hash_text(b"", text + "\0more") if grow else prompt
        hit = known.find(longer, float(i))
        assert hit is not None
        assert hit.bytes_after == longer.total_bytes - prompt.total_bytes
        assert hit.turn.number == i
        assert len(known) <= capacity
    assert sum(sum(t.values()) for t in known._tails.values()) == len(known)
    known_after_ttl = known.find(hash_text(b"", "never seen"), 1e9)
    assert known_after_ttl is None
