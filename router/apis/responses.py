"""Requests of OpenAI's Responses API, translated into chat completions.

Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ppd.errors import RequestError

from ..intake.fields import kind_of, typed
from .extensions import extensions

PATH = "/v1/responses"

_COPIED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "prompt_cache_key",
    "cache_salt",
    "user",
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_KINDS = ("input_text", "output_text", "text")
_PART_KINDS = (*_TEXT_KINDS, "input_image", "input_file")

Messages = tuple[dict[str, Any], ...]


def to_chat(given: Mapping[str, Any], earlier: Messages) -> dict[str, Any]:
    """Translate a request into the body of a chat completion.

    Args:
        given: the fields of the request.
        earlier: messages of the response that the request continues.

    Raises:
        RequestError: a field is malformed; the error names it.
    """
    fields = {name: given[name] for name in _COPIED_FIELDS if given.get(name) is not None}
    fields |= extensions(given)
    instructions = typed(given, "instructions", str, "")
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    fields["messages"] = [*messages, *earlier, *input_messages(given.get("input"))]
    if (limit := given.get("max_output_tokens")) is not None:
        fields["max_completion_tokens"] = limit
    if tools := typed(given, "tools", list, []):
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    forced = False  # then there is no text whose format counts, and SGLang refuses both together
    match given.get("tool_choice"):
        case None:
            pass
        case {"type": "function", "name": str(name)}:
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
            forced = True
        case choice:
            fields["tool_choice"] = choice
            forced = choice == "required"
    match typed(given, "text", dict, {}).get("format"):
        case _ if forced:
            pass
        case {"type": "json_schema", **schema}:
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        case {"type": "json_object"}:
            fields["response_format"] = {"type": "json_object"}
        case _:
            pass
    if effort := typed(given, "reasoning", dict, {}).get("effort"):
        fields["reasoning_effort"] = effort
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def input_messages(given: Any) -> Messages:
    """The chat messages of the ``input`` field.

    Args:
        given: the value of the field: a text or a list of items.

    Raises:
        RequestError: an item is malformed; the error names it.
    """
    if isinstance(given, str) and given:
        return ({"role": "user", "content": given},)
    if not isinstance(given, list):
        problem = f"input must be a text or a list of items, got {kind_of(given)}"
        raise RequestError(problem, param="input")
    return tuple(_input_messages(given))


def _input_messages(items: list[Any]) -> Iterator[dict[str, Any]]:
    said: dict[str, Any] | None = None  # of the assistant, whose calls may follow
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item:
            case {"type": "function_call", "call_id": str(name), "name": str(function)}:
                called = {"name": function, "arguments": item.get("arguments") or "{}"}
                said = said or {"role": "assistant", "content": None}
                call = {"id": name, "type": "function", "function": called}
                said.setdefault("tool_calls", []).append(call)
                continue
            case {"type": "reasoning"}:
                continue
        if said is not None:
            yield said
            said = None
        match item:
            case {"type": "function_call_output", "call_id": str(name), "output": output}:
                yield {"role": "tool", "tool_call_id": name, "content": _result(output, where)}
            case {"role": "assistant", "content": content}:
                parts = content if isinstance(content, str) else _parts(content, where)
                said = {"role": "assistant", "content": parts}
            case {"role": str(role), "content": content} if role in _ROLES:
                parts = content if isinstance(content, str) else _parts(content, where)
                yield {"role": "system" if role == "developer" else role, "content": parts}
            case _:
                kind = item.get("type") if isinstance(item, dict) else kind_of(item)
                raise RequestError(f"{where} is of no kind that is served: {kind}", param=where)
    if said is not None:
        yield said


def _result(output: Any, where: str) -> Any:
    """The content of a tool's result: a text, or parts of the API; another value as JSON."""
    match output:
        case str():
            return output
        case [{"type": kind}, *_] if kind in _PART_KINDS:
            return _parts(output, where)
        case _:
            return orjson.dumps(output).decode()


def _parts(content: Any, where: str) -> Any:
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else ():
        match part:
            case {"type": kind, "text": str(text)} if kind in _TEXT_KINDS:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case _:
                raise RequestError(f"{where}.content holds what is not served", param=where)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool(tool: Any, where: str) -> dict[str, Any]:
    match tool:
        case {"type": "function", "name": str(), **function}:
            return {"type": "function", "function": {"name": tool["name"], **function}}
        case _:
            raise RequestError(f"{where}: only functions are served", param=where)
