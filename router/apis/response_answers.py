"""Answers of OpenAI's Responses API, translated from those of chat completions.

Source: OpenAI's API reference (responses, streaming events).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ..serving.internal import ServerRequest, chunks_of, parsed
from ..workers.sglang import Usage, usage_of_openai
from .extensions import extensions


class ResponsesWriter:
    """Translates the answer of a chat completion; a ``serving.internal.ResponseWriter``.

    Args:
        request: gets the answer.
        given: the fields of the request.
        name: id of the response.
        store: called with the response and the assistant's message if it was completed.
    """

    def __init__(
        self,
        request: ServerRequest,
        given: Mapping[str, Any],
        name: str,
        store: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self._request = request
        self._name = name
        self._store = store
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
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._open_item: str | int | None = None  # "text", or the number of a tool call
        self._finish = "stop"
        self._usage: Usage | None = None
        self._error: dict[str, Any] | None = None

    # -- whole answers ----------------------------------------------------------------

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Translate a whole answer; an error is sent unchanged."""
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
        if self._items:
            self._items[-1]["status"] = self._last_status
        self._usage = usage_of_openai(answer)
        self._response |= extensions(answer)
        self._request.respond(200, orjson.dumps(self._final_response()), headers)

    # -- streams ----------------------------------------------------------------------

    def start(self, headers: Mapping[str, str]) -> None:
        """Start a streamed answer."""
        self._request.start(200, headers, b"")
        self._write_event("response.created", response=self._response)
        self._write_event("response.in_progress", response=self._response)

    def write(self, events: bytes) -> None:
        """Translate whole events."""
        for chunk in chunks_of(events):
            if "choices" not in chunk:
                self._error = chunk.get("error") or {}
                continue
            self._usage = usage_of_openai(chunk) or self._usage
            self._response |= extensions(chunk)
            for choice in chunk["choices"]:
                delta = choice.get("delta") or {}
                if text := delta.get("content"):
                    self._write_text(text)
                for call in delta.get("tool_calls") or ():
                    self._write_call(call)
                self._finish = choice.get("finish_reason") or self._finish

    def end(self) -> None:
        """Write the last events, and end the stream."""
        self._close_item(self._last_status)
        if self._error is not None:
            self._response |= {
                "status": "failed",
                "error": {"code": "server_error", "message": self._error.get("message", "")},
                "output": self._items,
            }
            self._write_event("response.failed", response=self._response)
        else:
            response = self._final_response()
            self._write_event(f"response.{response['status']}", response=response)
        self._request.end()

    def abort(self) -> None:
        """Abort a streamed answer."""
        self._request.abort()

    def _write_text(self, text: str) -> None:
        if self._open_item != "text":
            item = self._add_item("text", self._message("", "in_progress"))
            item["content"] = []
            self._write_item_event("response.output_item.added", item=item)
            item["content"] = [_output_text("")]
            part = item["content"][0]
            self._write_part_event("response.content_part.added", part=part)
        self._items[-1]["content"][0]["text"] += text
        self._write_part_event("response.output_text.delta", delta=text, logprobs=[])

    def _write_call(self, call: Mapping[str, Any]) -> None:
        number, function = call.get("index", 0), call.get("function") or {}
        if self._open_item != number:
            new = self._call(str(call.get("id")), str(function.get("name")), "", "in_progress")
            self._write_item_event("response.output_item.added", item=self._add_item(number, new))
        if arguments := function.get("arguments"):
            self._items[-1]["arguments"] += arguments
            self._write_item_event(
                "response.function_call_arguments.delta",
                item_id=self._items[-1]["id"],
                delta=arguments,
            )

    def _add_item(self, key: str | int, item: dict[str, Any]) -> dict[str, Any]:
        self._close_item()
        self._open_item = key
        self._items.append(item)
        return item

    @property
    def _last_status(self) -> str:
        """The status of the last item, with which the answer ends."""
        ended = self._finish != "length" and self._error is None
        return "completed" if ended else "incomplete"

    def _close_item(self, status: str = "completed") -> None:
        if self._open_item is None:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            self._write_part_event("response.output_text.done", text=part["text"], logprobs=[])
            self._write_part_event("response.content_part.done", part=part)
        else:
            self._write_item_event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                name=item["name"],
                arguments=item["arguments"],
            )
        self._write_item_event("response.output_item.done", item=item)
        self._open_item = None

    def _write_part_event(self, kind: str, **fields: Any) -> None:
        self._write_item_event(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _write_item_event(self, kind: str, **fields: Any) -> None:
        self._write_event(kind, output_index=len(self._items) - 1, **fields)

    def _write_event(self, kind: str, **fields: Any) -> None:
        event = orjson.dumps({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        self._request.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), event))

    # -- all answers ------------------------------------------------------------------

    def _final_response(self) -> dict[str, Any]:
        is_cut_off = self._finish == "length"
        self._response |= {
            "status": "incomplete" if is_cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "output": self._items,
            "usage": _usage(self._usage),
        }
        self._store(self._response, _assistant_message(self._items))
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


def _assistant_message(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message as a chat client sends it back."""
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
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": calls} if calls else message


def _usage(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage(0, 0, 0)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
