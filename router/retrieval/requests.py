"""Chat requests with retrieval: their options, and the passages of earlier turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ppd.errors import RequestError
from ppd.prefix import Digest, hash_messages

from ..config.retrieval import RetrievalConfig, RetrievalOptions, Stage, TenantRetrieval
from ..intake.fields import kind_of
from ..intake.requests import json_bytes
from .memory import Citation, Injection, Memory
from .passages import text_of, with_prefix

FIELD = "retrieval"
_UNLIMITED = TenantRetrieval()


@dataclass(frozen=True, slots=True)
class RetrievalRequest:
    """A chat request with retrieval, or with passages in its history.

    Attributes:
        fields: the body without the retrieval object, with the passages of earlier turns.
        options: of the retrieval; None if nothing is searched for.
        turn: digest of the history as the client sends it, up to and including the last message.
        number: of that turn, from 1.
        question: text of that turn.
        earlier: passages that the conversation holds.
        previous: what the same turn got when it was sent before with the same options.
    """

    fields: dict[str, Any]
    options: RetrievalOptions | None
    turn: Digest
    number: int
    question: str
    earlier: tuple[Citation, ...]
    previous: Injection | None

    @property
    def searches(self) -> bool:
        """Whether a search is made before the turn is prefilled."""
        return (
            self.options is not None
            and Stage.PREFILL in self.options.stages
            and self.previous is None
        )

    @property
    def probes(self) -> bool:
        """Whether searches are made while the reply is streamed."""
        return self.options is not None and Stage.DECODE in self.options.stages

    def with_passages(self, text: str) -> bytes:
        """The body with ``text`` in front of the last message.

        Raises:
            RequestError: the body is nested too deeply.
        """
        if not text:
            return json_bytes(self.fields)
        *before, last = self.fields["messages"]
        return json_bytes({**self.fields, "messages": [*before, with_prefix(last, text)]})


def read(
    given: dict[str, Any],
    tenant: str,
    config: RetrievalConfig,
    memory: Memory,
    private: frozenset[str] = frozenset(),
) -> RetrievalRequest | None:
    """Read the retrieval of a chat request.

    Args:
        given: the fields of the body.
        tenant: the client's tenant.
        config: defaults, and the collections of each tenant.
        memory: passages of earlier turns.
        private: collections that no client may search.

    Returns:
        None if the body can be served as it is: it has no retrieval object, and nothing is
        searched for or inserted.

    Raises:
        RequestError: the retrieval object is malformed, or not allowed to the tenant.
    """
    value = given.get(FIELD, msgspec.UNSET)
    if given.get("input_ids") is not None:  # the engine reads no messages then
        if value not in (msgspec.UNSET, None, False):
            raise RequestError("retrieval needs messages, not input_ids", param=FIELD)
        return None if value is msgspec.UNSET else _without_retrieval(given)
    messages: Any = given.get("messages")
    if not _are_messages(messages):  # the request handler refuses the request
        return None if value is msgspec.UNSET else _without_retrieval(given)
    options = _options(value, given.get("model"), tenant, config, private)
    model = given.get("model")
    salt = orjson.dumps([tenant, model if isinstance(model, str) else None])
    try:
        digests = hash_messages(salt, messages).digests
    except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
        raise RequestError(f"the body cannot be forwarded: {error}") from error
    completed, changed = list(messages), False
    earlier: list[Citation] = []
    for at, digest in enumerate(digests[:-1]):
        injection = memory.get(digest)
        if injection is None or not (injection.text or injection.insertions):
            continue
        changed = True
        earlier += injection.of_prompt
        if injection.text:
            completed[at] = with_prefix(messages[at], injection.text)
        reply = messages[at + 1]
        if isinstance(text := reply.get("content"), str) and injection.is_of(text):
            earlier += injection.of_reply
            completed[at + 1] = {**reply, "content": injection.put_back(text)}
    is_question = messages[-1].get("role") == "user"
    if not is_question:  # the result of a tool is not searched for
        options = None
    elif options is None:
        memory.forget(digests[-1])
    if options is None and not changed:
        return None if value is msgspec.UNSET else _without_retrieval(given)
    previous = None if options is None else memory.get(digests[-1])
    if previous is not None and previous.options != options:
        previous = None
    fields = {name: value for name, value in given.items() if name != FIELD}
    return RetrievalRequest(
        fields={**fields, "messages": completed},
        options=options,
        turn=digests[-1],
        number=sum(message.get("role") == "user" for message in messages),
        question=text_of(messages[-1]) if is_question else "",
        earlier=tuple(earlier),
        previous=previous,
    )


def _without_retrieval(given: Mapping[str, Any]) -> RetrievalRequest:
    """The request without its retrieval object, otherwise unchanged."""
    fields = {name: value for name, value in given.items() if name != FIELD}
    return RetrievalRequest(fields, None, b"", 0, "", (), None)


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict) and _is_content(message.get("content"))
            for message in messages
        )
    )


def _is_content(value: Any) -> bool:
    return value is None or isinstance(value, str | list)


def _options(
    value: Any, model: Any, tenant: str, config: RetrievalConfig, private: frozenset[str]
) -> RetrievalOptions | None:
    """The options of the request's retrieval object, or the default of its tenant or model.

    Fields that the object lacks are the default's. A model's default is none for a tenant that may
    not search its collection.

    Args:
        value: the retrieval object; ``msgspec.UNSET`` if the body has none.
        model: the model that the body names.
        tenant: the client's tenant.
        config: defaults, and the collections of each tenant.
        private: collections that no client may search.

    Raises:
        RequestError: the object is malformed, or its collection is not allowed.
    """
    limits = config.tenants.get(tenant, _UNLIMITED)
    default = limits.default
    if default is None and isinstance(model, str):
        default = config.defaults.get(model)
        if default is not None and not limits.allows(default.collection):
            default = None
    if value is msgspec.UNSET:
        return default
    if value is None or value is False:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{FIELD} must be an object or null, got {kind_of(value)}", param=FIELD)
    fields = {**(_fields(default) if default is not None else {}), **value}
    try:
        options = msgspec.convert(fields, RetrievalOptions)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}", param=FIELD) from error
    if problems := list(options.problems()):
        raise RequestError(f"{FIELD}: {'; '.join(problems)}", param=FIELD)
    if not limits.allows(options.collection):
        yours = ", ".join(limits.collections or ()) or "there are none"
        raise RequestError(
            f"{FIELD}.collection: {options.collection!r} is not one of yours: {yours}",
            status=403,
            param=f"{FIELD}.collection",
        )
    if options.collection in private:
        raise RequestError(
            f"{FIELD}.collection: {options.collection!r} is the router's own",
            status=403,
            param=f"{FIELD}.collection",
        )
    return options


def _fields(options: RetrievalOptions) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(options)
    return fields
