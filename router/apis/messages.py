"""Anthropic's Messages API, served as chat completions.

Translates requests, answers and streams; what a field means to the engine is the engine's. Made
after Anthropic's API reference (messages, streaming, errors).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ppd.errors import RequestError

from ..intake.fields import kind_of, typed
from ..serving.internal import ServerRequest, chunks_of, parsed
from .extensions import extensions

PATH = "/v1/messages"

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def to_chat(given: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion.

    Raises:
        RequestError: naming the field at fault.
    """
    fields = {name: given[name] for name in _SAME if given.get(name) is not None}
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
    thinking = typed(given, "thinking", dict, {})
    if thinking.get("type") == "disabled":
        fields["chat_template_kwargs"] = {"enable_thinking": False, "thinking": False}
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def _messages(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """A message of theirs is one of ours, and one for each tool result."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        told = f"{where}.content must be a string or a list of blocks, got {kind_of(content)}"
        raise RequestError(told, param=f"{where}.content")
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": {"type": "base64", **source}}:
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "image", "source": {"type": "url", "url": str(url)}}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "tool_use", "id": str(name), "name": str(function)}:
                arguments = orjson.dumps(block.get("input") or {}).decode()
                called = {"name": function, "arguments": arguments}
                calls.append({"id": name, "type": "function", "function": called})
            case {"type": "tool_result", "tool_use_id": str(name)}:
                told = _text(block.get("content") or "", at)
                yield {"role": "tool", "tool_call_id": name, "content": told}
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # as chat clients do: templates drop it
            case _:
                kind = block.get("type") if isinstance(block, dict) else kind_of(block)
                raise RequestError(f"{at} is of no kind that is served: {kind}", param=at)
    if parts or calls:
        plain = all(part["type"] == "text" for part in parts)
        told_as = "".join(part["text"] for part in parts) if plain else parts
        yield {"role": role, "content": told_as or None, **({"tool_calls": calls} if calls else {})}


def _text(value: Any, where: str) -> str:
    """A string, or the text of blocks."""
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


def error_body(status: int, message: str) -> bytes:
    kind = _ERRORS.get(status, "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


class MessagesWriter:
    """Writes a chat completion's answer as a message of Anthropic's API.

    A ``serving.internal.ResponseWriter``.
    """

    def __init__(self, request: ServerRequest, given: Mapping[str, Any]) -> None:
        self._request = request
        self._model = given.get("model", "default")
        self._blocks = 0
        self._open: str | int | None = None  # "text", or the number of a tool call
        self._begun = False
        self._stop = "end_turn"
        self._sequence: str | None = None
        self._usage: dict[str, Any] = {}
        self._extensions: dict[str, Any] = {}
        self._failed = False

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        answer = parsed(body)
        if status != 200:
            message = str((answer.get("error") or {}).get("message", ""))
            self._request.respond(status, error_body(status, message), headers)
            return
        choice = answer["choices"][0]
        said = choice["message"]
        content: list[dict[str, Any]] = []
        if text := said.get("content"):
            content.append({"type": "text", "text": text})
        for call in said.get("tool_calls") or ():
            function = call["function"]
            given = parsed(function["arguments"].encode()) if function.get("arguments") else {}
            content.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
            )
        told = self._message(answer.get("id", ""))
        told |= {"content": content, "stop_reason": _STOPS.get(choice.get("finish_reason"))}
        told |= {"stop_sequence": _stopped_by(choice), "usage": _usage(answer.get("usage") or {})}
        told |= extensions(answer)
        if told["stop_sequence"] is not None:
            told["stop_reason"] = "stop_sequence"
        self._request.respond(200, orjson.dumps(told), headers)

    def start(self, headers: Mapping[str, str]) -> None:
        self._request.start(200, headers, b"")

    def write(self, events: bytes) -> None:
        for chunk in chunks_of(events):
            if "choices" not in chunk:
                self._fail(chunk)
                continue
            if not self._begun:
                self._begun = True
                empty = {"input_tokens": 0, "output_tokens": 0}
                message = self._message(chunk.get("id", "")) | {"content": [], "usage": empty}
                self._tell("message_start", message=message)
            self._usage = chunk.get("usage") or self._usage
            self._extensions |= extensions(chunk)
            for choice in chunk["choices"]:
                self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if text := delta.get("content"):
            self._in_block("text", {"type": "text", "text": ""})
            self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):
                use = {"type": "tool_use", "id": call.get("id"), "name": function["name"]}
                self._in_block(call.get("index", 0), {**use, "input": {}})
            if arguments := function.get("arguments"):
                self._delta({"type": "input_json_delta", "partial_json": arguments})
        if finish := choice.get("finish_reason"):
            self._sequence = _stopped_by(choice)
            stopped = self._sequence is not None
            self._stop = "stop_sequence" if stopped else _STOPS.get(finish, "end_turn")

    def end(self) -> None:
        self._close_block()
        if not self._failed:
            delta = {"stop_reason": self._stop, "stop_sequence": self._sequence}
            usage = _usage(self._usage)
            self._tell("message_delta", delta=delta, usage=usage, **self._extensions)
            self._tell("message_stop")
        self._request.end()

    def abort(self) -> None:
        self._request.abort()

    def _fail(self, chunk: Mapping[str, Any]) -> None:
        error = chunk.get("error") or {}
        self._failed = True
        kind = _ERRORS.get(error.get("code", 500), "api_error")
        self._tell("error", error={"type": kind, "message": str(error.get("message", ""))})

    def _message(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _in_block(self, which: str | int, block: Mapping[str, Any]) -> None:
        if self._open != which:
            self._close_block()
            self._open = which
            self._tell("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> None:
        self._tell("content_block_delta", index=self._blocks, delta=delta)

    def _close_block(self) -> None:
        if self._open is not None:
            self._tell("content_block_stop", index=self._blocks)
            self._blocks += 1
            self._open = None

    def _tell(self, kind: str, **fields: Any) -> None:
        event = orjson.dumps({"type": kind, **fields})
        self._request.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), event))


def _stopped_by(choice: Mapping[str, Any]) -> str | None:
    """The stop string that ended it; SGLang tells it as ``matched_stop``."""
    matched = choice.get("matched_stop")
    return matched if isinstance(matched, str) and choice.get("finish_reason") == "stop" else None


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": (usage.get("prompt_tokens") or 0) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.get("completion_tokens") or 0,
    }
