"""The dispatch of requests on the token path by their API.

Requests of other APIs than the engine's are translated into chat completions.
"""

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
from . import messages, messages_errors, responses
from .messages import MessagesWriter
from .response_answers import ResponsesWriter
from .response_store import StoredResponses
from .responses import Messages

_ErrorBody = Callable[[ErrorAnswer], bytes]
_Translation = tuple[dict[str, Any], ResponseWriter]

PATHS = (*Endpoint, messages.PATH, responses.PATH)


class Front:
    """Serves the requests of all APIs on the token path.

    Args:
        handler: serves the engine's APIs.
        stored: the stored responses of the Responses API.
        retrieval: None if none is configured.
        answers: the answer cache; None if none is configured.
        admin_token: a request that carries it may have a large body without a client's key.
        max_body_bytes: of the chat completion that a request is translated into.
    """

    def __init__(
        self,
        handler: RequestHandler,
        stored: StoredResponses,
        retrieval: RetrievalStage | None,
        answers: AnswerCache | None,
        admin_token: str,
        max_body_bytes: int,
    ) -> None:
        self._handler = handler
        self._stored = stored
        self._retrieval = retrieval
        self._answers = answers
        self._is_plain = retrieval is None and answers is None
        self._admin_token = admin_token
        self._max_body_bytes = max_body_bytes

    def screen(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Check the key of a request with a large body before the body is read.

        Args:
            path: of the request.
            headers: by lower-case name.

        Returns:
            The refusal of a request with an unknown key; None if the body may be read.
        """
        token = self._admin_token
        if token and carries_token(headers.get("authorization"), token):
            return None
        try:
            self._handler.keys.tenant(headers)
        except RequestError as error:
            return Refusal(error.status, str(error), error.code, path)
        return None

    def refuse(self, refusal: Refusal) -> bytes:
        """Count a request that could not be read, and return the body of its answer."""
        overloaded = refusal.status == 503
        outcome = Outcome.OVERLOADED if overloaded else Outcome.REJECTED
        if not refusal.counted:
            self._handler.undecided("", outcome)
        kind = "router_error" if overloaded else INVALID
        answer = ErrorAnswer(refusal.status, refusal.message, kind, code=refusal.code)
        if refusal.path == messages.PATH:
            return _messages_error(answer)
        return _openai_error(answer)

    def serve(self, request: ServerRequest) -> Awaitable[None]:
        """Serve one request; errors are answered in the format of its API."""
        match request.path:
            case messages.PATH:
                return self._serve_translated(request, self._message, _messages_error)
            case responses.PATH:
                return self._serve_translated(request, self._response, _openai_error)
        if not self._is_plain and request.path == Endpoint.CHAT and request.method == "POST":
            return self._serve_chat(request)
        return self._handler.serve(request)

    async def _serve_chat(self, request: ServerRequest) -> None:
        serve = self._handler.serve if self._retrieval is None else self._retrieval.serve
        try:
            if self._answers is None:
                await serve(request)
            else:
                await self._answers.serve(request, serve)
        except RequestError as error:
            self._answer_error(request, error, _openai_error)

    async def _serve_translated(
        self,
        request: ServerRequest,
        translate: Callable[[ServerRequest, dict[str, Any]], Awaitable[_Translation]],
        error_body: _ErrorBody,
    ) -> None:
        try:
            if request.method != "POST":
                raise RequestError(f"{request.method} {request.path}: use POST", status=405)
            with self._handler.not_served_yet(request):
                fields, writer = await translate(request, json_object(request.body))
            body = json_bytes(fields)
            if len(body) > self._max_body_bytes:
                message = f"as a chat completion it is larger than {self._max_body_bytes} bytes"
                raise RequestError(message, status=413)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._answer_error(request, error, error_body)
            return
        inner = InternalRequest(Endpoint.CHAT, request.headers, body, request.connection, writer)
        await self._serve_chat(inner)

    def _answer_error(
        self, request: ServerRequest, error: Exception, error_body: _ErrorBody
    ) -> None:
        answer = answer_to(error, f"{request.method} {request.path}")
        self._handler.undecided(request.path, answer.outcome)
        headers = {"Content-Type": "application/json", **answer.headers}
        request.respond(answer.status, error_body(answer), headers)

    async def _message(self, request: ServerRequest, given: dict[str, Any]) -> _Translation:
        return messages.to_chat(given), MessagesWriter(request, given)

    async def _response(self, request: ServerRequest, given: dict[str, Any]) -> _Translation:
        tenant = self._handler.keys.tenant(request.headers)
        earlier: Messages = ()
        # The answer repeats much of the request, one level deeper.
        check_depth(request.body, {"response": given})
        if previous := typed(given, "previous_response_id", str, ""):
            earlier = await self._stored.find(tenant, previous, param="previous_response_id")
        name = self._stored.new_name()
        fields = responses.to_chat(given, earlier)
        store = partial(self._store, tenant, name, given, earlier)
        return fields, ResponsesWriter(request, given, name, store)

    def _store(
        self,
        tenant: str,
        name: str,
        given: dict[str, Any],
        earlier: Messages,
        response: dict[str, Any],
        reply: dict[str, Any],
    ) -> None:
        if given.get("store") is not False:
            new = responses.input_messages(given.get("input"))
            self._stored.put(tenant, name, response, (*earlier, *new, reply))


def _openai_error(answer: ErrorAnswer) -> bytes:
    return answer.body


def _messages_error(answer: ErrorAnswer) -> bytes:
    return messages_errors.error_body(answer.status, answer.message)
