"""A chat completion's answer as a response of OpenAI's Responses API: whole, or event by event."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ..serving.internal import ServerRequest, chunks_of, parsed
from .extensions import extensions


class ResponsesWriter:
    """``serving.internal.ResponseWriter``: a chat completion's answer, as a response.

    Args:
        name: of the response.
        keep: gets the response and what the model said, when it has ended well.
    """

    def __init__(
        self,
        request: ServerRequest,
        given: Mapping[str, Any],
        name: str,
        keep: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self._request = request
        self._name = name
        self._keep = keep
        self._response: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata") or {},
            "model": given.get("model", "default"),
            "output": [],
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": given.get("previous_response_id"),
            "temperature": given.get("temperature"),
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools") or [],
            "top_p": given.get("top_p"),
            "usage": None,
        }
        self._told = 0
        self._items: list[dict[str, Any]] = []
        self._open: str | int | None = None  # "text", or the number of a tool call
        self._finish = "stop"
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None

    # -- whole --------------------------------------------------------------------------

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        if status != 200:
            self._request.respond(status, body, headers)
            return
        answer = parsed(body)
        choice = answer["choices"][0]
        message = choice["message"]
        if text := message.get("content"):
            self._items.append(self._message(text, "completed"))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            self._items.append(
                self._call(call["id"], function["name"], function["arguments"], "completed")
            )
        self._finish = choice.get("finish_reason") or "stop"
        self._usage = answer.get("usage")
        self._response |= extensions(answer)
        self._request.respond(200, orjson.dumps(self._done()), headers)

    # -- streamed -----------------------------------------------------------------------

    def start(self, headers: Mapping[str, str]) -> None:
        self._request.start(200, headers, b"")
        self._tell("response.created", response=self._response)
        self._tell("response.in_progress", response=self._response)

    def write(self, events: bytes) -> None:
        for chunk in chunks_of(events):
            if "choices" not in chunk:
                self._error = chunk.get("error") or {}
                continue
            self._usage = chunk.get("usage") or self._usage
            self._response |= extensions(chunk)
            for choice in chunk["choices"]:
                delta = choice.get("delta") or {}
                if text := delta.get("content"):
                    self._text(text)
                for call in delta.get("tool_calls") or ():
                    self._part_of_call(call)
                self._finish = choice.get("finish_reason") or self._finish

    def end(self) -> None:
        self._close_item()
        if self._error is not None:
            self._response |= {
                "status": "failed",
                "error": {"code": "server_error", "message": self._error.get("message", "")},
                "output": self._items,
            }
            self._tell("response.failed", response=self._response)
        else:
            response = self._done()
            self._tell(f"response.{response['status']}", response=response)
        self._request.end()

    def abort(self) -> None:
        self._request.abort()

    def _text(self, text: str) -> None:
        if self._open != "text":
            item = self._opened("text", self._message("", "in_progress"))
            item["content"] = []
            self._tell_item("response.output_item.added", item=item)
            item["content"] = [_output_text("")]
            part = item["content"][0]
            self._tell_part("response.content_part.added", part=part)
        self._items[-1]["content"][0]["text"] += text
        self._tell_part("response.output_text.delta", delta=text, logprobs=[])

    def _part_of_call(self, call: Mapping[str, Any]) -> None:
        number, function = call.get("index", 0), call.get("function") or {}
        if self._open != number:
            new = self._call(str(call.get("id")), str(function.get("name")), "", "in_progress")
            self._tell_item("response.output_item.added", item=self._opened(number, new))
        if arguments := function.get("arguments"):
            self._items[-1]["arguments"] += arguments
            self._tell_item(
                "response.function_call_arguments.delta",
                item_id=self._items[-1]["id"],
                delta=arguments,
            )

    def _opened(self, which: str | int, item: dict[str, Any]) -> dict[str, Any]:
        self._close_item()
        self._open = which
        self._items.append(item)
        return item

    def _close_item(self) -> None:
        if self._open is None:
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            part = item["content"][0]
            self._tell_part("response.output_text.done", text=part["text"], logprobs=[])
            self._tell_part("response.content_part.done", part=part)
        else:
            self._tell_item(
                "response.function_call_arguments.done",
                item_id=item["id"],
                name=item["name"],
                arguments=item["arguments"],
            )
        self._tell_item("response.output_item.done", item=item)
        self._open = None

    def _tell_part(self, kind: str, **fields: Any) -> None:
        self._tell_item(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _tell_item(self, kind: str, **fields: Any) -> None:
        self._tell(kind, output_index=len(self._items) - 1, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        event = orjson.dumps({"type": kind, "sequence_number": self._told, **fields})
        self._told += 1
        self._request.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), event))

    # -- both ---------------------------------------------------------------------------

    def _done(self) -> dict[str, Any]:
        cut_off = self._finish == "length"
        self._response |= {
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._items,
            "usage": _usage(self._usage or {}),
        }
        self._keep(self._response, _said(self._items))
        return self._response

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}_{len(self._items)}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_output_text(text)],
        }

    def _call(self, name: str, function: str, arguments: str, status: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self._name}_{len(self._items)}",
            "type": "function_call",
            "call_id": name,
            "name": function,
            "arguments": arguments,
            "status": status,
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _said(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message, as a chat client would send it back."""
    text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in items
        if item["type"] == "function_call"
    ]
    said: dict[str, Any] = {"role": "assistant", "content": text or None}
    return {**said, "tool_calls": calls} if calls else said


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt, made = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens") or 0},
        "total_tokens": prompt + made,
    }
