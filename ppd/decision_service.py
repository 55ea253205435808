"""``POST /decide``: a route for callers that route requests themselves.

They give what they know of a turn and of the workers as numbers. The policy in force decides. The
router needs to know neither the conversation nor the workers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ppd.decision import Decision, Features, HomeState, Route, decide
from ppd.errors import RequestError
from ppd.planning import Planner
from ppd.score import Objective

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TurnSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a turn, in tokens.

    Attributes:
        context_tokens: of the conversation so far, prompts and replies.
        new_tokens: of the input that follows.
        output_tokens: expected of the reply.
        earlier_prompt_tokens: of the conversation's last prompt; default: all of the context.
        has_media: whether the prompt has images, audio or video.
        number: of the turn in its conversation, from 2. Long conversations have more later turns.
    """

    context_tokens: Tokens
    new_tokens: Tokens
    output_tokens: Tokens
    earlier_prompt_tokens: Tokens | None = None
    has_media: bool = False
    number: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 2


class HomeLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decode worker that holds the conversation's KV.

    Attributes:
        state: whether it can take the turn.
        page_size: tokens of a page of its KV cache.
        running: requests that decode there.
        append_tokens: of local turns that wait or prefill there.
        free_tokens: KV that it has left, evictable cache counted as free; null: not known.
        evicted_tokens: part of the context that it has dropped.
    """

    state: HomeState = HomeState.READY
    page_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 1
    running: Tokens = 0
    append_tokens: Tokens = 0
    free_tokens: Tokens | None = None
    evicted_tokens: Tokens = 0


class PrefillLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prefill worker that a remote turn would go to.

    Attributes:
        cached_tokens: tokens of the conversation that it has cached.
        queue_tokens: tokens that it was sent and has not answered yet.
        wait_ms: how long a remote turn waits for them; null: by the table, from their number.
    """

    cached_tokens: Tokens = 0
    queue_tokens: Tokens = 0
    wait_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None


class DecideRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /decide``.

    Attributes:
        turn: null for the first turn of a conversation.
        prefill: null: no prefill worker is ready.
        qps: turns a second of each decode worker; null: what this router observes.
        objective: weights or targets; null: the configured ones, or those of the headers.
        session: name of the conversation; the policy ``partial`` decides by a hash of it.
        model: whose policy decides, where the router serves several; null: the one model's.
    """

    turn: TurnSizes | None
    home: HomeLoad = HomeLoad()
    prefill: PrefillLoad | None = PrefillLoad()
    qps: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    objective: Objective | None = None
    session: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    model: str | None = None


class DecideAnswer(msgspec.Struct, frozen=True):
    """The answer of ``POST /decide``.

    Attributes:
        policy: name and options of the policy that decided.
        objective: the weights or targets of the decision.
        decision: route and reason; with a table, the cell, the costs and the scores.
        min_cached_tokens: what a local turn shall require of its worker; null for other routes.
    """

    policy: str
    objective: Objective
    decision: Decision
    min_cached_tokens: int | None


_decoder = msgspec.json.Decoder(DecideRequest)


def parse(raw: bytes) -> DecideRequest:
    """Parse a body.

    Raises:
        RequestError: it is not JSON, or a field is malformed; the message names the field.
    """
    try:
        request = _decoder.decode(raw)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise RequestError(str(error)) from None
    turn, home = request.turn, request.home
    if turn is not None and (turn.earlier_prompt_tokens or 0) > turn.context_tokens:
        raise RequestError("turn.earlier_prompt_tokens must be at most turn.context_tokens")
    if turn is not None and home.evicted_tokens > turn.context_tokens:
        raise RequestError("home.evicted_tokens must be at most turn.context_tokens")
    if request.objective is not None and (problem := request.objective.problem()):
        raise RequestError(f"objective: {problem}")
    return request


def features_of(request: DecideRequest, qps: float) -> Features | None:
    """Return what the policy decides from; None for a first turn.

    Args:
        request: from a caller.
        qps: turns a second where the request has none.
    """
    turn, home, prefill = request.turn, request.home, request.prefill or PrefillLoad()
    if turn is None:
        return None
    earlier = turn.earlier_prompt_tokens
    return Features(
        session=request.session,
        turn=turn.number,
        context_tokens=turn.context_tokens,
        earlier_prompt_tokens=turn.context_tokens if earlier is None else earlier,
        new_tokens=turn.new_tokens,
        output_tokens=turn.output_tokens,
        prefill_cached_tokens=prefill.cached_tokens,
        prefill_queue_tokens=prefill.queue_tokens,
        prefill_wait_ms=prefill.wait_ms,
        qps=qps if request.qps is None else request.qps,
        home=home.state,
        page_size=home.page_size,
        home_running=home.running,
        home_append_tokens=home.append_tokens,
        home_free_tokens=home.free_tokens,
        evicted_tokens=home.evicted_tokens,
        has_media=turn.has_media,
        has_prefill=request.prefill is not None,
    )


def decided(
    request: DecideRequest, planner: Planner, spec: str, configured: Objective, qps: float
) -> DecideAnswer:
    """Decide by the policy in force.

    Args:
        request: from a caller.
        planner: that holds the policy.
        spec: name and options of the policy.
        configured: the objective where the request has none.
        qps: turns a second where the request has none.
    """
    features, objective = features_of(request, qps), request.objective or configured
    decision = decide(features, planner.policy, objective)
    is_local = features is not None and decision.route is Route.LOCAL
    least = features.min_cached_tokens if features is not None and is_local else None
    return DecideAnswer(spec, objective, decision, least)
