"""Which API a request on the token path is of; those that are not the engine's are translated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ppd.errors import RequestError
from ppd.outcome import Outcome

from ..answer_cache.cache import AnswerCache
from ..answers import INVALID, ErrorAnswer, answer_to
from ..intake.fields import typed
from ..intake.inbound import Endpoint
from ..intake.requests import check_depth, json_bytes, json_object
from ..retrieval.stage import RetrievalStage
from ..serving.handler import RequestHandler
from ..serving.internal import InternalRequest, ResponseWriter, ServerRequest
from ..wire.access import carries_token
from ..wire.request import Refusal
from . import messages, responses
from .messages import MessagesWriter
from .response_answers import ResponsesWriter
from .response_store import StoredResponses
from .responses import Messages

_ErrorBody = Callable[[ErrorAnswer], bytes]

PATHS = (*Endpoint, messages.PATH, responses.PATH)


class Front:
    """
    Args:
        retrieval, answers: None: none is configured.
        admin_token: whoever carries it may send large bodies, too.
        max_body_bytes: of what other APIs' requests become.
    """

    def __init__(
        self,
        turns: RequestHandler,
        kept: StoredResponses,
        retrieval: RetrievalStage | None,
        answers: AnswerCache | None,
        admin_token: str,
        max_body_bytes: int,
    ) -> None:
        self._turns = turns
        self._retrieval = retrieval
        self._answers = answers
        self._plain = retrieval is None and answers is None
        self._kept = kept
        self._admin_token = admin_token
        self._max_body_bytes = max_body_bytes

    def screen(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why a large body shall not be read: nobody knows whose it is."""
        token = self._admin_token
        if token and carries_token(headers.get("authorization"), token):
            return None
        try:
            self._turns.keys.tenant(headers)
        except RequestError as error:
            return Refusal(error.status, str(error), error.code, path)
        return None

    def refuse(self, refusal: Refusal) -> bytes:
        """The body of an answer to what was not read as a request."""
        overloaded = refusal.status == 503
        outcome = Outcome.OVERLOADED if overloaded else Outcome.REJECTED
        if not refusal.counted:
            self._turns.undecided("", outcome)
        kind = "router_error" if overloaded else INVALID
        told = ErrorAnswer(refusal.status, refusal.message, kind, code=refusal.code)
        return _as_messages(told) if refusal.path == messages.PATH else _as_openai(told)

    async def serve(self, request: ServerRequest) -> None:
        match request.path:
            case messages.PATH:
                await self._translated(request, self._message, _as_messages)
            case responses.PATH:
                await self._translated(request, self._response, _as_openai)
            case Endpoint.CHAT if not self._plain and request.method == "POST":
                await self._chat(request)
            case _:
                await self._turns.serve(request)

    async def _chat(self, request: ServerRequest) -> None:
        serve = self._turns.serve if self._retrieval is None else self._retrieval.serve
        try:
            if self._answers is None:
                await serve(request)
            else:
                await self._answers.serve(request, serve)
        except RequestError as error:
            self._refuse(request, error, _as_openai)

    async def _translated(
        self,
        request: ServerRequest,
        translate: Callable[
            [ServerRequest, dict[str, Any]], Awaitable[tuple[dict[str, Any], ResponseWriter]]
        ],
        error_body: _ErrorBody,
    ) -> None:
        try:
            if request.method != "POST":
                raise RequestError(f"{request.method} {request.path}: use POST", status=405)
            with self._turns.not_served_yet(request):
                fields, writer = await translate(request, json_object(request.body))
            body = json_bytes(fields)
            if len(body) > self._max_body_bytes:
                told = f"as a chat completion it is larger than {self._max_body_bytes} bytes"
                raise RequestError(told, status=413)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._refuse(request, error, error_body)
            return
        inner = InternalRequest(Endpoint.CHAT, request.headers, body, request.connection, writer)
        await self._chat(inner)

    def _refuse(self, request: ServerRequest, error: Exception, error_body: _ErrorBody) -> None:
        told = answer_to(error, f"{request.method} {request.path}")
        self._turns.undecided(request.path, told.outcome)
        headers = {"Content-Type": "application/json", **told.headers}
        request.respond(told.status, error_body(told), headers)

    async def _message(
        self, request: ServerRequest, given: dict[str, Any]
    ) -> tuple[dict[str, Any], ResponseWriter]:
        return messages.to_chat(given), MessagesWriter(request, given)

    async def _response(
        self, request: ServerRequest, given: dict[str, Any]
    ) -> tuple[dict[str, Any], ResponseWriter]:
        tenant = self._turns.keys.tenant(request.headers)
        before: Messages = ()
        check_depth(request.body, {"response": given})  # much of it is shown again
        if previous := typed(given, "previous_response_id", str, ""):
            before = await self._kept.find(tenant, previous, param="previous_response_id")
        name = self._kept.new_name()
        fields = responses.to_chat(given, before)
        keep = partial(self._keep, tenant, name, given, before)
        return fields, ResponsesWriter(request, given, name, keep)

    def _keep(
        self,
        tenant: str,
        name: str,
        given: dict[str, Any],
        before: Messages,
        response: dict[str, Any],
        said: dict[str, Any],
    ) -> None:
        if given.get("store") is not False:
            asked = responses.input_messages(given.get("input"))
            self._kept.keep(tenant, name, response, (*before, *asked, said))


def _as_openai(told: ErrorAnswer) -> bytes:
    return told.body


def _as_messages(told: ErrorAnswer) -> bytes:
    return messages.error_body(told.status, told.message)
