"""The description of every endpoint, from which ``/openapi.json`` is made.

A route is named by its method and path, as it was added. A route without a description here is a
bug, and so is a description without a route.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from ppd.announcement import PATH as WORKERS
from ppd.announcement import Acknowledgement, Announcement
from ppd.decision_service import DecideAnswer, DecideRequest

from ..apis import messages, passthrough, response_store, responses
from ..apis.messages_errors import MessagesErrorBody
from ..config.answer_cache import CacheOptions
from ..config.retrieval import RetrievalOptions
from ..intake.catalog import ModelCard, ModelList
from ..intake.inbound import Endpoint
from ..intake.schemas import FIELDS, ChatFields
from .peer_state import CHANGES_PATH, WorkerChanges
from .schemas import (
    AddedWorker,
    Explanation,
    Health,
    RecentDecisions,
    ResetResult,
    TableState,
    WorkerState,
    WorkerSummary,
)

OPENAPI_PATH = "/openapi.json"
LIVE = "/live"


class Tag(StrEnum):
    """The group of an endpoint.

    Attributes:
        description: of the group.
    """

    description: str

    def __new__(cls, value: str, description: str) -> Tag:
        """Make a member whose value is the name and not the pair."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    GENERATION = "generation", "Replies of a model, streamed or whole."
    MODELS = "models", "The models, and requests that one worker answers unchanged."
    STATE = "state", "Health, metrics and this document."
    WORKERS = "workers", "The workers: announcements, and operators' changes."
    DECISIONS = "decisions", "The decisions of the router, and the table that they use."
    DASHBOARD = "dashboard", "The page for operators."
    PROCESSES = "processes", "Requests between the router processes on one port."


class Access(StrEnum):
    """The senders that an endpoint accepts."""

    OPEN = "open"
    CLIENT = "client"
    OPERATOR = "operator"
    WORKER = "worker"
    PEER = "peer"


class ChatRequest(ChatFields, kw_only=True):
    """A chat completion. The router checks these fields; all others go to the engine unchanged.

    Attributes:
        retrieval: passages that are added to the new turn; null turns the default off.
        answer_cache: an answer to a question with the same meaning may be returned.
    """

    retrieval: RetrievalOptions | None = None
    answer_cache: CacheOptions | bool | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of an endpoint.

    Attributes:
        summary: what it does, in one sentence.
        body: type of the request's body; None: it has none.
        answer: type of the response's body.
        media: content type of the response.
        streams: the response may be a stream of events instead.
        routed: requests may carry an objective, and responses have the headers of the route.
        query: names of query parameters, with their descriptions.
        required_query: they must be given.
        unhealthy: the response may have status 503, with the same body.
        error: type of an error's body; None: OpenAI's error object.
        source: address of the API's own reference.
    """

    summary: str
    tag: Tag
    access: Access
    body: Any = None
    answer: Any = dict[str, Any]
    media: str = "application/json"
    streams: bool = False
    routed: bool = False
    query: tuple[tuple[str, str], ...] = ()
    required_query: bool = False
    unhealthy: bool = False
    error: Any = None
    source: str = ""


_ANY = dict[str, Any]
_OPENAI = "https://platform.openai.com/docs/api-reference"
_ANTHROPIC = "https://docs.anthropic.com/en/api/messages"
_SGLANG = "https://docs.sglang.ai/basic_usage/native_api.html"
_BODIES: dict[Endpoint, Any] = {**FIELDS, Endpoint.CHAT: ChatRequest}
_GENERATED = {
    Endpoint.CHAT: ("Generate a chat completion.", f"{_OPENAI}/chat"),
    Endpoint.COMPLETIONS: ("Generate a completion of a prompt.", f"{_OPENAI}/completions"),
    Endpoint.GENERATE: ("Generate with SGLang's native API.", _SGLANG),
}
_PASSED = {
    passthrough.EMBEDDINGS: "Embed texts.",
    passthrough.RERANK: "Rank documents by their relevance to a query.",
    passthrough.SCORE: "Score texts by the probabilities of tokens.",
    passthrough.CLASSIFY: "Classify texts, with SGLang's native API.",
    "/v1/tokenize": "Tokenize a text.",
    "/v1/detokenize": "Turn token ids into a text.",
    "/v1/messages/count_tokens": "Count the tokens of a request of the Messages API.",
}
_PEER_QUERY = (
    ("tenant", "the client's tenant"),
    ("name", "id of the response"),
    ("part", "`response` or `messages`"),
)
_MODEL_QUERY = (("model", "name of the model, where the router serves several"),)
_EXPLAIN_QUERY = (
    ("limit", "maximum number of decisions, 1 to 1000; 20 by default"),
    ("session", "name of the conversation whose decisions are returned"),
)


def _operator(
    summary: str, answer: Any, tag: Tag = Tag.WORKERS, body: Any = None, **more: Any
) -> Operation:
    return Operation(summary, tag, Access.OPERATOR, body=body, answer=answer, **more)


def _described() -> dict[str, Operation]:
    return {
        **{
            f"POST {path}": Operation(
                summary,
                Tag.GENERATION,
                Access.CLIENT,
                body=_BODIES[path],
                streams=True,
                routed=True,
                source=source,
            )
            for path, (summary, source) in _GENERATED.items()
        },
        f"POST {responses.PATH}": Operation(
            "Generate a response with OpenAI's Responses API.",
            Tag.GENERATION,
            Access.CLIENT,
            body=_ANY,
            streams=True,
            routed=True,
            source=f"{_OPENAI}/responses",
        ),
        f"GET {response_store.BY_NAME}": Operation(
            "Return a stored response.", Tag.GENERATION, Access.CLIENT
        ),
        f"DELETE {response_store.BY_NAME}": Operation(
            "Delete a stored response.",
            Tag.GENERATION,
            Access.CLIENT,
            answer=response_store.DeletedResponse,
        ),
        f"POST {messages.PATH}": Operation(
            "Generate a message with Anthropic's Messages API.",
            Tag.GENERATION,
            Access.CLIENT,
            body=_ANY,
            streams=True,
            routed=True,
            error=MessagesErrorBody,
            source=_ANTHROPIC,
        ),
        **{
            f"POST {path}": Operation(_PASSED[path], Tag.MODELS, Access.CLIENT, body=_ANY)
            for path in passthrough.PASSED_ON
        },
        "GET /v1/models": Operation("List the models.", Tag.MODELS, Access.OPEN, answer=ModelList),
        "GET /v1/models/{model}": Operation(
            "Return one model.", Tag.MODELS, Access.OPEN, answer=ModelCard
        ),
        "GET /health": Operation(
            "Return 200 if each required role has a live worker (of one model), else 503.",
            Tag.STATE,
            Access.OPEN,
            answer=Health,
            unhealthy=True,
        ),
        f"GET {LIVE}": Operation(
            "Return 200 while the process serves, with workers or without.",
            Tag.STATE,
            Access.OPEN,
            answer=str,
            media="text/plain",
        ),
        "GET /metrics": Operation(
            "Return the metrics in Prometheus' text format.",
            Tag.STATE,
            Access.OPEN,
            answer=str,
            media="text/plain",
        ),
        f"GET {OPENAPI_PATH}": Operation("Return this document.", Tag.STATE, Access.OPEN),
        f"GET {WORKERS}": _operator("Return every worker and its state.", list[WorkerState]),
        f"PUT {WORKERS}": _operator(
            "Add a worker, after a handshake with it.", WorkerSummary, body=AddedWorker
        ),
        f"POST {WORKERS}": Operation(
            "Announce a worker: it joins, renews or leaves.",
            Tag.WORKERS,
            Access.WORKER,
            body=Announcement,
            answer=Acknowledgement,
        ),
        f"DELETE {WORKERS}/{{id}}": _operator(
            "Remove a worker; its requests in flight end normally.", WorkerSummary
        ),
        f"POST {WORKERS}/{{id}}/drain": _operator(
            "Send no new work to a worker, until it is resumed or its process ends.", WorkerSummary
        ),
        f"POST {WORKERS}/{{id}}/resume": _operator(
            "Send work to a drained worker again.", WorkerSummary
        ),
        "GET /explain": _operator(
            "Return the latest decisions and their outcomes.",
            RecentDecisions,
            Tag.DECISIONS,
            query=_EXPLAIN_QUERY,
        ),
        **{
            f"POST /explain{path}": _operator(
                "Return the decision that this request would get now, without sending it.",
                Explanation,
                Tag.DECISIONS,
                body,
            )
            for path, body in _BODIES.items()
        },
        "POST /decide": _operator(
            "Return the route of a turn that is given as numbers, for other routers.",
            DecideAnswer,
            Tag.DECISIONS,
            DecideRequest,
        ),
        "GET /table": _operator(
            "Return the decision table in use.", TableState, Tag.DECISIONS, query=_MODEL_QUERY
        ),
        "POST /table/reset": _operator(
            "Delete what was observed since the table was read, for one of several models or all.",
            ResetResult,
            Tag.DECISIONS,
            query=_MODEL_QUERY,
        ),
        "GET /dashboard": Operation(
            "Return the page.", Tag.DASHBOARD, Access.OPEN, answer=str, media="text/html"
        ),
        "GET /dashboard/{file}": Operation(
            "Return a file of the page.", Tag.DASHBOARD, Access.OPEN, answer=str, media="text/*"
        ),
        "GET /dashboard/state": _operator(
            "Return the state that the page shows; its fields change with the page.",
            _ANY,
            Tag.DASHBOARD,
        ),
        f"GET {CHANGES_PATH}": _operator(
            "Return operators' changes of workers, for a restarted process.",
            WorkerChanges,
            Tag.PROCESSES,
        ),
        f"GET {response_store.PEER_PATH}": Operation(
            "Return a part of a response that this process has stored.",
            Tag.PROCESSES,
            Access.PEER,
            answer=msgspec.Raw,
            query=_PEER_QUERY,
            required_query=True,
        ),
        f"DELETE {response_store.PEER_PATH}": Operation(
            "Delete a response that this process has stored.",
            Tag.PROCESSES,
            Access.PEER,
            answer=msgspec.Raw,
            query=_PEER_QUERY,
            required_query=True,
        ),
    }


OPERATIONS = _described()
