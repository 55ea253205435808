"""Anthropic's Messages API, translated into chat completions and back.

Owns the translation of requests, answers and streams; the engine validates the values of fields.
Source: Anthropic's API reference (messages, streaming, errors).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ppd.errors import RequestError

from ..intake.fields import kind_of, typed
from ..serving.internal import ServerRequest, chunks_of, parsed
from ..workers.sglang import Usage, stop_string_of, usage_of_openai
from .extensions import extensions
from .messages_errors import error_body, error_kind

PATH = "/v1/messages"

_COPIED_FIELDS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(given: dict[str, Any]) -> dict[str, Any]:
    """Translate a request into the body of a chat completion.

    Args:
        given: the fields of the request.

    Raises:
        RequestError: a field is malformed; the error names it.
    """
    fields = {name: given[name] for name in _COPIED_FIELDS if given.get(name) is not None}
    fields |= extensions(given)
    if typed(given, "max_tokens", int, None) is None:
        raise RequestError("max_tokens is needed", param="max_tokens")
    messages: list[dict[str, Any]] = []
    if system := given.get("system"):
        messages.append({"role": "system", "content": _text(system, "system")})
    for i, message in enumerate(typed(given, "messages", list, [])):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{i}] must be an object", param=f"messages[{i}]")
        messages += _messages(message, f"messages[{i}]")
    fields["messages"] = messages
    if stops := typed(given, "stop_sequences", list, []):
        fields["stop"] = stops
    if tools := typed(given, "tools", list, []):
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if choice := typed(given, "tool_choice", dict, {}):
        fields["tool_choice"] = _tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
    thinking = typed(given, "thinking", dict, {})
    if thinking.get("type") == "disabled":
        fields["chat_template_kwargs"] = {"enable_thinking": False, "thinking": False}
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def _messages(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Translate a message into a chat message, and one for each tool result before it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        problem = f"{where}.content must be a string or a list of blocks, got {kind_of(content)}"
        raise RequestError(problem, param=f"{where}.content")
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        match block:
            case {"type": "tool_use", "id": str(name), "name": str(function)}:
                arguments = orjson.dumps(block.get("input") or {}).decode()
                called = {"name": function, "arguments": arguments}
                calls.append({"id": name, "type": "function", "function": called})
            case {"type": "tool_result", "tool_use_id": str(name)}:
                yield {"role": "tool", "tool_call_id": name, "content": _result(block, at)}
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # chat clients do not send it back either
            case _:
                parts.append(_part(block, at))
    if parts or calls:
        content = _joined(parts) or None
        yield {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _result(block: Mapping[str, Any], where: str) -> Any:
    """The content of a tool's result: a text, or parts with images."""
    content = block.get("content") or ""
    if isinstance(content, list):
        return _joined([_part(part, where) for part in content])
    return _text(content, where)


def _part(block: Any, where: str) -> dict[str, Any]:
    """Translate a block of text or an image."""
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "base64", **source}}:
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case _:
            kind = block.get("type") if isinstance(block, dict) else kind_of(block)
            raise RequestError(f"{where} is of no kind that is served: {kind}", param=where)


def _joined(parts: list[dict[str, Any]]) -> Any:
    """The parts, as one text where all are text."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _text(value: Any, where: str) -> str:
    """The text of a string or of a list of text blocks."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(block, dict) and isinstance(block.get("text"), str) for block in value
    ):
        return "".join(block["text"] for block in value)
    raise RequestError(f"{where} must be a string or a list of text blocks", param=where)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            function = {"name": name, "parameters": schema}
            if "description" in tool:
                function["description"] = tool["description"]
            return {"type": "function", "function": function}
        case _:
            raise RequestError(f"{where} must have name and input_schema", param=where)


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    chosen = _TOOL_CHOICES.get(str(choice.get("type")))
    if chosen is None:
        allowed = ", ".join((*_TOOL_CHOICES, "tool"))
        raise RequestError(f"tool_choice.type must be one of {allowed}", param="tool_choice")
    return chosen


class MessagesWriter:
    """Translates the answer of a chat completion; a ``serving.internal.ResponseWriter``.

    Args:
        request: gets the answer.
        given: the fields of the request.
    """

    def __init__(self, request: ServerRequest, given: Mapping[str, Any]) -> None:
        self._request = request
        self._model = given.get("model", "default")
        self._blocks = 0
        self._open_block: str | int | None = None  # "text", or the number of a tool call
        self._started = False
        self._stop_reason = "end_turn"
        self._stop_sequence: str | None = None
        self._usage: Usage | None = None
        self._extensions: dict[str, Any] = {}
        self._failed = False

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Translate a whole answer."""
        answer = parsed(body)
        if status != 200:
            error_text = str((answer.get("error") or {}).get("message", ""))
            self._request.respond(status, error_body(status, error_text), headers)
            return
        choice = answer["choices"][0]
        reply = choice["message"]
        content: list[dict[str, Any]] = []
        if text := reply.get("content"):
            content.append({"type": "text", "text": text})
        for call in reply.get("tool_calls") or ():
            function = call["function"]
            given = parsed(function["arguments"].encode()) if function.get("arguments") else {}
            content.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
            )
        message = self._message(answer.get("id", ""))
        message |= {
            "content": content,
            "stop_reason": _STOP_REASONS.get(choice.get("finish_reason")),
            "stop_sequence": stop_string_of(choice),
            "usage": _usage(usage_of_openai(answer)),
        }
        message |= extensions(answer)
        if message["stop_sequence"] is not None:
            message["stop_reason"] = "stop_sequence"
        self._request.respond(200, orjson.dumps(message), headers)

    def start(self, headers: Mapping[str, str]) -> None:
        """Start a streamed answer."""
        self._request.start(200, headers, b"")

    def write(self, events: bytes) -> None:
        """Translate whole events."""
        for chunk in chunks_of(events):
            if "choices" not in chunk:
                self._fail(chunk)
                continue
            if not self._started:
                self._started = True
                empty = {"input_tokens": 0, "output_tokens": 0}
                message = self._message(chunk.get("id", "")) | {"content": [], "usage": empty}
                self._write_event("message_start", message=message)
            self._usage = usage_of_openai(chunk) or self._usage
            self._extensions |= extensions(chunk)
            for choice in chunk["choices"]:
                self._write_choice(choice)

    def _write_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if text := delta.get("content"):
            self._enter_block("text", {"type": "text", "text": ""})
            self._write_delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):
                use = {"type": "tool_use", "id": call.get("id"), "name": function["name"]}
                self._enter_block(call.get("index", 0), {**use, "input": {}})
            if arguments := function.get("arguments"):
                self._write_delta({"type": "input_json_delta", "partial_json": arguments})
        if finish := choice.get("finish_reason"):
            self._stop_sequence = stop_string_of(choice)
            self._stop_reason = _STOP_REASONS.get(finish, "end_turn")
            if self._stop_sequence is not None:
                self._stop_reason = "stop_sequence"

    def end(self) -> None:
        """Write the last events, and end the stream."""
        self._close_block()
        if not self._failed:
            delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
            usage = _usage(self._usage)
            self._write_event("message_delta", delta=delta, usage=usage, **self._extensions)
            self._write_event("message_stop")
        self._request.end()

    def abort(self) -> None:
        """Abort a streamed answer."""
        self._request.abort()

    def _fail(self, chunk: Mapping[str, Any]) -> None:
        error = chunk.get("error") or {}
        self._failed = True
        kind = error_kind(error.get("code", 500))
        self._write_event("error", error={"type": kind, "message": str(error.get("message", ""))})

    def _message(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _enter_block(self, key: str | int, block: Mapping[str, Any]) -> None:
        if self._open_block != key:
            self._close_block()
            self._open_block = key
            self._write_event("content_block_start", index=self._blocks, content_block=block)

    def _write_delta(self, delta: Mapping[str, Any]) -> None:
        self._write_event("content_block_delta", index=self._blocks, delta=delta)

    def _close_block(self) -> None:
        if self._open_block is not None:
            self._write_event("content_block_stop", index=self._blocks)
            self._blocks += 1
            self._open_block = None

    def _write_event(self, kind: str, **fields: Any) -> None:
        event = orjson.dumps({"type": kind, **fields})
        self._request.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), event))


def _usage(usage: Usage | None) -> dict[str, int]:
    usage = usage or Usage(0, 0, 0)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
