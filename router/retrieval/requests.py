"""Chat requests with retrieval: the wish taken off, earlier passages put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ppd.errors import RequestError
from ppd.prefix import Digest, hash_messages

from ..config.retrieval import RetrievalConfig, Stage, Wish
from ..intake.fields import kind_of
from ..intake.requests import json_bytes
from .memory import Citation, Injection, Memory
from .passages import inserted, text_of

FIELD = "retrieval"


@dataclass(frozen=True, slots=True)
class RetrievalRequest:
    """A chat request on its way through retrieval.

    Attributes:
        fields: the body without the wish, what earlier turns got put back into them.
        wish: None: nothing is searched for.
        turn: digest of the history as the client sends it; names its last message's turn.
        number: of that turn, from 1.
        question: text of it.
        earlier: passages that the conversation holds.
        again: what this very turn got the last time it was asked, if it was wished the same way.
    """

    fields: dict[str, Any]
    wish: Wish | None
    turn: Digest
    number: int
    question: str
    earlier: tuple[Citation, ...]
    again: Injection | None

    @property
    def searches(self) -> bool:
        """Before it is prefilled."""
        return self.wish is not None and Stage.PREFILL in self.wish.stages and self.again is None

    @property
    def probes(self) -> bool:
        """While its reply is streamed."""
        return self.wish is not None and Stage.DECODE in self.wish.stages

    def with_passages(self, text: str) -> bytes:
        """The body with ``text`` in the new turn's message.

        Raises:
            RequestError: it is nested too deeply.
        """
        if not text:
            return json_bytes(self.fields)
        *before, last = self.fields["messages"]
        return json_bytes({**self.fields, "messages": [*before, inserted(last, text)]})


def read(
    given: dict[str, Any],
    tenant: str,
    config: RetrievalConfig,
    memory: Memory,
    private: frozenset[str] = frozenset(),
) -> RetrievalRequest | None:
    """None: neither is anything wished, nor has the conversation any passages.

    Args:
        private: collections that are nobody's to search.

    Raises:
        RequestError: the wish is wrong, or not allowed to the tenant.
    """
    said = given.get(FIELD, msgspec.UNSET)
    messages: Any = given.get("messages")
    if not _are_messages(messages):  # whoever serves chats says what is wrong with them
        return None if said is msgspec.UNSET else _without(given)
    wish = _wish(said, given.get("model"), tenant, config, private)
    model = given.get("model")
    salt = orjson.dumps([tenant, model if isinstance(model, str) else None])
    digests = hash_messages(salt, messages).digests
    told, changed = list(messages), False
    earlier: list[Citation] = []
    for at, digest in enumerate(digests[:-1]):
        injection = memory.get(digest)
        if injection is None or not (injection.text or injection.asides):
            continue
        changed = True
        earlier += injection.citations
        if injection.text:
            told[at] = inserted(messages[at], injection.text)
        reply = messages[at + 1]
        if injection.asides and isinstance(reply.get("content"), str):
            told[at + 1] = {**reply, "content": injection.put_back(reply["content"])}
    asks = messages[-1].get("role") == "user"
    if not asks:  # what a tool says is no question
        wish = None
    elif wish is None:
        memory.forget(digests[-1])
    if wish is None and not changed:
        return None if said is msgspec.UNSET else _without(given)
    again = None if wish is None else memory.get(digests[-1])
    if again is not None and again.wish != wish:
        again = None  # wished otherwise than last time
    fields = {name: value for name, value in given.items() if name != FIELD}
    return RetrievalRequest(
        fields={**fields, "messages": told},
        wish=wish,
        turn=digests[-1],
        number=sum(message.get("role") == "user" for message in messages),
        question=text_of(messages[-1]) if asks else "",
        earlier=tuple(earlier),
        again=again,
    )


def _without(given: Mapping[str, Any]) -> RetrievalRequest:
    """Only the wish is taken off."""
    fields = {name: value for name, value in given.items() if name != FIELD}
    return RetrievalRequest(fields, None, b"", 0, "", (), None)


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(one, dict) and _is_plain(one.get("content")) for one in messages)
    )


def _is_plain(content: Any) -> bool:
    return content is None or isinstance(content, str | list)


def _wish(
    said: Any, model: Any, tenant: str, config: RetrievalConfig, private: frozenset[str]
) -> Wish | None:
    """What is wished: by the request, else by its tenant, else by its model."""
    its = config.tenants.get(tenant)
    default = its.default if its is not None else None
    if default is None and isinstance(model, str):
        default = config.defaults.get(model)
    if said is msgspec.UNSET:
        return default
    if said is None or said is False:
        return None
    if not isinstance(said, dict):
        raise RequestError(f"{FIELD} must be an object or null, got {kind_of(said)}", param=FIELD)
    named = {**(_fields(default) if default is not None else {}), **said}
    try:
        wish = msgspec.convert(named, Wish)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}", param=FIELD) from error
    if problems := list(wish.problems()):
        raise RequestError(f"{FIELD}: {'; '.join(problems)}", param=FIELD)
    allowed = its.collections if its is not None else None
    if allowed is not None and wish.collection not in allowed:
        raise RequestError(
            f"{FIELD}.collection: {wish.collection!r} is not one of yours: {_list(allowed)}",
            status=403,
            param=f"{FIELD}.collection",
        )
    if wish.collection in private:
        raise RequestError(
            f"{FIELD}.collection: {wish.collection!r} is the router's own",
            status=403,
            param=f"{FIELD}.collection",
        )
    return wish


def _fields(wish: Wish) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(wish)
    return fields


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "there are none"
