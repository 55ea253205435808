"""Which API a request on the token path is of; those that are not the engine's are translated."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ppd.errors import RequestError

from ..answer_cache.cache import AnswerCache
from ..answers import ErrorAnswer, answer_to
from ..apis import messages, responses
from ..intake.inbound import Endpoint
from ..intake.requests import json_bytes, json_object
from ..retrieval.stage import RetrievalStage
from ..serving.inner import Asked, Inner, Taker
from ..serving.turns import TurnServer
from .messages import MessagesTaker
from .response_answers import ResponseTaker
from .responses import Conversations, Messages

_ErrorBody = Callable[[ErrorAnswer], bytes]

PATHS = (*Endpoint, messages.PATH, responses.PATH)


class Front:
    """
    Args:
        conversations: None if they cannot be kept: a client's next request may come to another
            process.
        retrieval, answers: None: none is configured.
    """

    def __init__(
        self,
        turns: TurnServer,
        conversations: Conversations | None,
        retrieval: RetrievalStage | None,
        answers: AnswerCache | None,
    ) -> None:
        self._turns = turns
        self._retrieval = retrieval
        self._answers = answers
        self._plain = retrieval is None and answers is None
        self._conversations = conversations
        self.refuse = turns.refuse

    async def serve(self, request: Asked) -> None:
        match request.path:
            case messages.PATH:
                await self._translated(request, self._message, _as_messages)
            case responses.PATH:
                await self._translated(request, self._response, _as_openai)
            case Endpoint.CHAT if not self._plain and request.method == "POST":
                await self._chat(request)
            case _:
                await self._turns.serve(request)

    async def _chat(self, request: Asked) -> None:
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
        request: Asked,
        translate: Callable[[Asked, dict[str, Any]], tuple[dict[str, Any], Taker]],
        error_body: _ErrorBody,
    ) -> None:
        try:
            if request.method != "POST":
                raise RequestError(f"{request.method} {request.path}: use POST", status=405)
            fields, taker = translate(request, json_object(request.body))
            body = json_bytes(fields)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._refuse(request, error, error_body)
            return
        inner = Inner(Endpoint.CHAT, request.headers, body, request.connection, taker)
        await self._chat(inner)

    def _refuse(self, request: Asked, error: Exception, error_body: _ErrorBody) -> None:
        told = answer_to(error, f"{request.method} {request.path}")
        self._turns.undecided(request.path, told.outcome)
        headers = {"Content-Type": "application/json", **told.headers}
        request.respond(told.status, error_body(told), headers)

    def _message(self, request: Asked, given: dict[str, Any]) -> tuple[dict[str, Any], Taker]:
        return messages.to_chat(given), MessagesTaker(request, given)

    def _response(self, request: Asked, given: dict[str, Any]) -> tuple[dict[str, Any], Taker]:
        tenant = self._turns.keys.tenant(request.headers)
        kept = self._conversations
        before: Messages = ()
        if previous := given.get("previous_response_id"):
            if kept is None:
                raise RequestError(
                    "previous_response_id is not served by several processes: send the whole input",
                    param="previous_response_id",
                )
            before = kept.get(tenant, str(previous))
        name = f"resp_{secrets.token_hex(16)}"
        fields = responses.to_chat(given, before)

        def keep(said: dict[str, Any]) -> None:
            if kept is not None and given.get("store") is not False:
                asked = responses.input_messages(given.get("input"))
                kept.keep(tenant, name, (*before, *asked, said))

        return fields, ResponseTaker(request, given, name, keep)


def _as_openai(told: ErrorAnswer) -> bytes:
    return told.body


def _as_messages(told: ErrorAnswer) -> bytes:
    return messages.error_body(told.status, told.message)
