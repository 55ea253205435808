"""Planned conversations of real clusters (``eval.traffic``), as the simulator takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppd.errors import ConfigError

from ..traffic.conversations import Conversation as Planned
from .cache import SharedPrefix
from .traffic import Conversation, TurnTokens


def simulated(planned: Sequence[Planned], *, end_at_cuts: bool = False) -> list[Conversation]:
    """Return planned conversations as the simulator takes them.

    Args:
        end_at_cuts: a conversation ends before a turn that cuts its history. A turn that only
            leaves out the reply before it is no cut.

    Raises:
        ConfigError: turns follow the reply before and the arrival before, or cut their history.
    """
    found = []
    for session, one in enumerate(planned):
        turns = tuple(_turns(one))
        if len(turns) < len(one.turns) and not end_at_cuts:
            raise ConfigError("the simulator has no workload that cuts the history of a turn")
        later = one.turns[1 : len(turns)]
        thinks, gaps = any(turn.think_s for turn in later), any(turn.gap_s for turn in later)
        if thinks and gaps:
            raise ConfigError("the simulator has no workload with pauses of two kinds")
        pauses = tuple(turn.gap_s if gaps else turn.think_s for turn in later)
        shared = None
        if one.shared_tokens:
            shared = SharedPrefix(one.shared_prompt + 1, one.shared_tokens)
        found.append(
            Conversation(session, one.starts_at_s, turns, pauses, shared=shared, since_arrival=gaps)
        )
    return found


def _turns(planned: Planned) -> Iterator[TurnTokens]:
    """Yield turns up to the first one that cuts its history."""
    prompt_tokens = 0  # of the turn before
    for turn, context in zip(planned.turns, planned.contexts(), strict=True):
        drops_reply = turn.keep_tokens is not None
        if drops_reply and context != prompt_tokens:
            return
        yield TurnTokens(turn.new_tokens, turn.output_tokens, drops_reply)
        prompt_tokens = context + turn.new_tokens
