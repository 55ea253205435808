"""The decision log: written, read, replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ppd.decision import Decision, Features, Reason, Route, decide
from ppd.errors import ConfigError
from ppd.journal import (
    VERSION,
    Decided,
    Event,
    Finished,
    Opened,
    Reset,
    of_model,
    read,
    replay,
    to_line,
)
from ppd.policies import static_policy
from ppd.score import Objective, Weights
from ppd.table_policy import Correction, TablePolicy

from .fixtures import FEATURES, TABLE, any_features, any_objectives

ALL = tuple(sorted(Correction))
OPENED = Opened(VERSION, "2026-01-01T00:00:00+00:00", "ppd", ALL, 16384, "digest")


def decided(number: int, seen: Features | None, objective: Objective, now: Decision) -> Decided:
    return Decided(number, 1.0 * number, "/v1/chat/completions", "t", objective, seen, now)


def finished(number: int, route: Route, ttft_ms: float, tpot_ms: float) -> Finished:
    return Finished(number, 0.0, route, Reason.TABLE, "answered", True, 10, 5, 5, ttft_ms, tpot_ms)


def fresh(opened: Opened) -> TablePolicy:
    return TablePolicy(TABLE, frozenset(opened.corrections), opened.append_budget_tokens)


milliseconds = st.floats(0.1, 10_000)
turns = st.lists(
    st.tuples(st.none() | any_features, any_objectives, milliseconds, milliseconds, st.booleans()),
    max_size=40,
)


@settings(max_examples=50)
@given(turns)
def test_a_replay_reproduces_every_decision(
    seen: list[tuple[Features | None, Objective, float, float, bool]],
) -> None:
    """With every correction on: also shrinkage, whose state is only in what was observed."""
    policy, lines = fresh(OPENED), [to_line(OPENED)]
    for number, (one, objective, ttft_ms, tpot_ms, reset) in enumerate(seen):
        now = decide(one, policy, objective)
        lines.append(to_line(decided(number, one, objective, now)))
        if one is not None:
            policy.observe(one, now.route, ttft_ms, tpot_ms)
        lines.append(to_line(finished(number, now.route, ttft_ms, tpot_ms)))
        if reset:
            policy.reset()
            lines.append(to_line(Reset(0.0)))
    again = list(replay(read(lines), fresh))
    assert [one.now for one in again] == [one.was.decision for one in again]
    assert len(again) == len(seen)


def log_of(*events: Event) -> Iterator[Event]:
    return read([to_line(event) for event in events])


def test_other_weights_and_policies_say_what_would_have_changed() -> None:
    seen = replace(FEATURES, home_running=3)  # an append would delay them
    was = fresh(OPENED).choose(seen, Weights())
    events = (OPENED, decided(1, None, Weights(), decide(None, fresh(OPENED), Weights())),
              decided(2, seen, Weights(), was))  # fmt: skip
    assert not any(one.changed for one in replay(log_of(*events), fresh))
    (first, second) = replay(log_of(*events), fresh, Weights(0, 1))
    assert (first.changed, second.changed) == (False, True)
    assert second.now.route is Route.REMOTE
    (_, second) = replay(log_of(*events), lambda _: static_policy("pd"))
    assert second.now == Decision(Route.REMOTE, Reason.POLICY_PD)


def test_each_run_begins_anew() -> None:
    made = list[Opened]()

    def remember(opened: Opened) -> TablePolicy:
        made.append(opened)
        return fresh(opened)

    assert list(replay(log_of(OPENED, OPENED), remember)) == []
    assert len(made) == 2


def test_another_table_of_one_model_is_no_new_run_of_the_others() -> None:
    opened = structs.replace(OPENED, table="", tables={"a": "digest", "b": "digest"})
    again = structs.replace(opened, tables={"a": "other", "b": "digest"}, model="a")
    found = {
        name: [
            one.table for one in of_model(log_of(opened, again), name) if isinstance(one, Opened)
        ]
        for name in ("a", "b")
    }
    assert found == {"a": ["digest", "other"], "b": ["digest"]}


def test_a_line_that_was_cut_short_is_left_out() -> None:
    line = to_line(decided(1, None, Weights(), Decision(Route.REMOTE, Reason.FIRST_TURN)))
    assert len(list(read([to_line(OPENED), line, line[:-30]]))) == 2
    again = [to_line(OPENED), line, line[:-30] + b"\n", to_line(OPENED), line]
    assert len(list(read(again))) == 4


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([b"{}\n"], "line 1 is no event"),
        ([to_line(OPENED), b"nonsense\n"], "line 2 is no event"),
        ([to_line(OPENED), b"nonsense\n", to_line(Reset(0.0))], "line 2 is no event"),
        ([b"nonsense\n", to_line(OPENED)], "line 1 is no event"),
        ([to_line(Reset(0.0))], "line 1 must be an opened event"),
        ([to_line(OPENED).replace(b'"version":1', b'"version":9')], "version is 9, this reads 1"),
    ],
)
def test_what_is_no_log_is_refused(lines: list[bytes], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        list(read(lines))
