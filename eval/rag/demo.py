"""``ppd-eval rag demo``: chats about the project's own docs, with passages from a pool.

Three questions of several turns each, through the router: which passages were cited, and that later
turns stay on the decode worker that holds the conversation, passages and all.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import tiny_model
from ..cluster import launching
from ..provenance import provenance
from ..raw_rows import append_whole
from .cluster import COLLECTION, build_collection, passages, start

CHATS = (
    ("How does the router recognise a conversation?", "What if it was edited?", "And two routers?"),
    ("What is a decision table?", "How is one measured?", "When is it wrong?"),
    ("Why does a long append hurt decoding?", "What bounds it?", "What does that cost?"),
)
_WISH = {"collection": COLLECTION, "k": 2}
_ROW = "{:>4}  {:<7} {:<13} {:>8} {:>6} {:>7} {:>8}  {}"


@dataclass(slots=True)
class Transcript:
    """The results of the turns of all chats, in order."""

    routes: list[str] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    citations: list[list[str]] = field(default_factory=list)


def run(model: str | None, docs: Path, cache: Path, logs: Path, record: Path | None) -> int:
    """Hold the chats; the last line on stdout is one JSON object.

    Raises:
        ConfigError: there are no docs, or the sentence model cannot be fetched.
        ClusterError: something did not start.
    """
    path = tiny_model.resolve(model)
    found = passages(docs)
    print(f"{len(found)} passages of {docs}/**.md; model: {path}")
    data = logs / "rag"
    began_s = time.monotonic()
    build_collection(found, data, cache)
    took_s = time.monotonic() - began_s
    print(f"indexed after {took_s:.0f} s; starting pool, workers and router ...", flush=True)
    transcript = Transcript()
    with launching(logs) as launch:
        cluster = start(launch, path, data, cache, "full")
        print(f"ready after {time.monotonic() - began_s:.0f} s; logs in {logs}")
        for chat in CHATS:
            _hold(cluster.router.url, chat, transcript)
        print("stopping ...", flush=True)
    result = {
        "routes": transcript.routes,
        "context_tokens": transcript.context_tokens,
        "cached_tokens": transcript.cached_tokens,
        "ttft_ms": transcript.ttft_ms,
        "citations": transcript.citations,
    }
    if record is not None:
        append_whole(record, [{**result, "model": Path(path).name, **provenance(0)}])
    print(json.dumps(result))
    expected = ["remote", *["local"] * (len(CHATS[0]) - 1)] * len(CHATS)
    return 0 if transcript.routes == expected and all(transcript.citations) else 1


def _hold(url: str, chat: tuple[str, ...], transcript: Transcript) -> None:
    import openai

    messages: list[Any] = []
    context = 0
    print(f"\n{chat[0]}")
    head = ("turn", "route", "reason", "context", "new", "cached", "TTFT ms", "new passages")
    print(_ROW.format(*head))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0) as client:
        name = client.models.list().data[0].id
        for number, text in enumerate(chat, 1):
            messages.append({"role": "user", "content": text})
            sent_s = time.perf_counter()
            first_s, reply, usage, cited = 0.0, "", None, []
            with client.chat.completions.with_streaming_response.create(
                model=name,
                messages=messages,
                max_tokens=32,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"retrieval": _WISH},
            ) as response:
                for chunk in response.parse():
                    if chunk.choices and chunk.choices[0].delta.content:
                        first_s = first_s or time.perf_counter() - sent_s
                        reply += chunk.choices[0].delta.content
                    usage = chunk.usage or usage
                    if (note := getattr(chunk, "retrieval", None)) is not None:
                        cited = [
                            citation for citation in note["citations"] if citation["turn"] == number
                        ]
                headers = response.headers
            assert usage is not None
            messages.append({"role": "assistant", "content": reply})
            details = usage.prompt_tokens_details
            cached = (details and details.cached_tokens) or 0
            transcript.routes.append(headers["x-ppd-route"])
            transcript.context_tokens.append(context)
            transcript.cached_tokens.append(cached)
            transcript.ttft_ms.append(round(1e3 * first_s, 1))
            transcript.citations.append([citation["id"] for citation in cited])
            new = usage.prompt_tokens - context
            names = ", ".join(f"{citation['id']} ({citation['score']:.2f})" for citation in cited)
            row = (number, transcript.routes[-1], headers["x-ppd-reason"], context, new, cached)
            print(_ROW.format(*row, transcript.ttft_ms[-1], names), flush=True)
            context = usage.prompt_tokens + usage.completion_tokens
