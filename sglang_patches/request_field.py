"""The fields ``do_local_prefill`` and ``min_cached_tokens`` where others put them.

SGLang's draft PR #34773 and Dynamo send ``do_local_prefill`` at the top level of HTTP bodies, as an
argument of ``Engine.async_generate``, and start servers with a flag. All become the wire contract's
marker in ``custom_params``. SGLang itself drops the field.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from ppd.contract import LOCAL_MARKER, MIN_CACHED_TOKENS
from sglang_patches.engines import SUPPORTED
from sglang_patches.targets import Hook, source_link

FLAG = "--disaggregation-decode-enable-conditional-agg"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_FIELDS = (LOCAL_MARKER, MIN_CACHED_TOKENS)
_SEARCHED = tuple(f'"{name}"'.encode() for name in _FIELDS)
_SAMPLING = {"/generate": "sampling_params"}  # where ``custom_params`` is not at the top level
_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


def moved(fields: dict[str, Any], within: str | None) -> dict[str, Any]:
    """Move the fields of a request into its ``custom_params``, where the engine reads them.

    Args:
        fields: the request; it is not changed.
        within: the field with the sampling parameters (an object, or a list of them for a batch);
            None if ``custom_params`` is a field of the request itself.

    Returns:
        The request. One whose marker is absent, null or false has no marker and no precondition.
    """
    terms = {name: fields[name] for name in _FIELDS if name in fields}
    kept = {name: value for name, value in fields.items() if name not in terms}
    if not terms.get(LOCAL_MARKER):
        return kept
    if within is None:
        marked: dict[str, Any] = _marked(kept, terms)
        return marked
    parameters = kept.get(within)
    if isinstance(parameters, list):
        return {**kept, within: [_marked(each, terms) for each in parameters]}
    return {**kept, within: _marked({} if parameters is None else parameters, terms)}


def _marked(holder: Any, terms: Mapping[str, Any]) -> Any:
    """Add terms to the ``custom_params`` of an object; anything else is left to SGLang's checks."""
    if not isinstance(holder, dict):
        return holder
    given = holder.get("custom_params")
    if given is not None and not isinstance(given, dict):
        return holder
    return {**holder, "custom_params": {**(given or {}), **terms}}


class RequestField:
    """ASGI middleware that moves the fields of JSON bodies into ``custom_params``.

    A body is only parsed if it contains the name of a field.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        """Pass a request on, with its body changed if it has one of the fields."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                await self._app(scope, _replaying(message, receive), send)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        body = _with_fields_moved(b"".join(parts), scope["path"])
        whole: Message = {"type": "http.request", "body": body, "more_body": False}
        await self._app(_with_length(scope, len(body)), _replaying(whole, receive), send)


def _with_fields_moved(body: bytes, path: str) -> bytes:
    if not any(name in body for name in _SEARCHED):
        return body
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body  # SGLang answers with what is wrong
    if not isinstance(fields, dict) or not any(name in fields for name in _FIELDS):
        return body
    return orjson.dumps(moved(fields, _SAMPLING.get(path)))


def _with_length(scope: Message, length: int) -> Message:
    headers = [
        (name, str(length).encode() if name.lower() == b"content-length" else value)
        for name, value in scope["headers"]
    ]
    return {**scope, "headers": headers}


def _replaying(first: Message, receive: Receive) -> Receive:
    """Return a ``receive`` whose first message is ``first``."""
    messages = [first]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def add_middleware(_result: None, self: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Add the middleware to the HTTP server of a decode server, before it starts."""
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")  # absent: only an Engine
    if http_server is not None and server_args.disaggregation_mode == "decode":
        http_server.app.add_middleware(RequestField)


def async_generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the fields as arguments, which must be keywords."""
    terms = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
    if terms.get(LOCAL_MARKER):
        position = 1  # of sampling_params, behind the prompt
        given = args[position] if len(args) > position else kwargs.get("sampling_params")
        changed = moved({"sampling_params": given, **terms}, "sampling_params")["sampling_params"]
        if len(args) > position:
            args = (*args[:position], changed, *args[position + 1 :])
        else:
            kwargs["sampling_params"] = changed
    return original(self, *args, **kwargs)


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """Accept the flag of the draft. The plugin needs none: it is enabled by ``PPD_ENABLE``."""
    parser.add_argument(
        FLAG,
        action="store_true",
        help="decode: serve requests with do_local_prefill here (sglang-ppd, PPD_ENABLE=1)",
    )


FIELD_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        parameters="self, server_args, port_args, *, start_pd_bootstrap_service",
        kind="after",
        function=add_middleware,
        reason="move do_local_prefill of HTTP bodies into custom_params",
        read_against=SUPPORTED,
        upstream=source_link("managers/tokenizer_manager.py", 480),
    ),
    Hook(
        target="sglang.srt.entrypoints.engine.Engine.async_generate",
        parameters=None,
        kind="around",
        function=async_generate,
        reason="take do_local_prefill as an argument, as the draft PR and Dynamo do",
        read_against=SUPPORTED,
        upstream=source_link("entrypoints/engine.py", 523),
    ),
    Hook(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        parameters="parser",
        kind="after",
        function=add_cli_args,
        reason="accept the flag by which the draft PR's servers are started",
        read_against=SUPPORTED,
        upstream=source_link("server_args.py", 283),
    ),
)
