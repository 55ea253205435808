"""``ppd-eval rag demo``: chats about the project's own docs, with passages from a pool.

Three questions of several turns each, through the router: what was answered, which passages were
cited, and that later turns stay on the decode worker that holds the conversation, passages and all.
"""

from __future__ import annotations

import asyncio
import json
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from .. import real_model
from ..chat import Conversation, Reply, connected
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
_REPLY_TOKENS = 48


@dataclass(slots=True)
class Transcript:
    """The results of the turns of all chats, in order."""

    routes: list[str] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    citations: list[list[str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


def run(model: str | None, docs: Path, cache: Path, logs: Path, record: Path | None) -> int:
    """Hold the chats; the last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if a route differs from what is expected, or a turn has no passage.

    Raises:
        ConfigError: there are no docs, or the sentence model cannot be fetched.
        ClusterError: something did not start.
        WorkerError: a turn failed.
    """
    began_s = time.monotonic()
    served = real_model.choose(model)
    found = passages(docs)
    print(f"model: {served.description}")
    print(f"indexing {len(found)} passages of {docs}/**.md ...", flush=True)
    data = logs / "rag"
    build_collection(found, data, cache)
    took_s = time.monotonic() - began_s
    print(f"indexed after {took_s:.0f} s; starting pool, workers and router ...", flush=True)
    transcript = Transcript()
    with launching(logs) as launch:
        cluster = start(launch, served, data, cache, "full")
        print(f"ready after {time.monotonic() - began_s:.0f} s; logs in {logs}")
        asyncio.run(_hold_all(cluster.router.url, transcript))
        print("\nstopping ...", flush=True)
    result = {
        "routes": transcript.routes,
        "context_tokens": transcript.context_tokens,
        "cached_tokens": transcript.cached_tokens,
        "ttft_ms": transcript.ttft_ms,
        "citations": transcript.citations,
        "answers": transcript.answers,
    }
    if record is not None:
        name = Path(served.path).name
        append_whole(record, [{**result, "model": name, **provenance(0)}])
    print(json.dumps(result))
    expected = ["remote", *["local"] * (len(CHATS[0]) - 1)] * len(CHATS)
    return 0 if transcript.routes == expected and all(transcript.citations) else 1


async def _hold_all(url: str, transcript: Transcript) -> None:
    async with connected(url) as client:
        for chat in CHATS:
            conversation = Conversation(client, _REPLY_TOKENS)
            for number, text in enumerate(chat, 1):
                context_tokens = conversation.context_tokens
                reply = await conversation.ask(text, retrieval=_WISH)
                cited = [one for one in reply.citations if one["turn"] == number]
                transcript.routes.append(reply.route)
                transcript.context_tokens.append(context_tokens)
                transcript.cached_tokens.append(reply.cached_tokens)
                transcript.ttft_ms.append(round(reply.ttft_ms, 1))
                transcript.citations.append([one["id"] for one in cited])
                transcript.answers.append(reply.text)
                names = ", ".join(f"{one['id']} ({one['score']:.2f})" for one in cited)
                _print_turn(number, text, reply, context_tokens, names)


def _print_turn(number: int, text: str, reply: Reply, context_tokens: int, names: str) -> None:
    new_tokens = reply.prompt_tokens - context_tokens
    answer = " ".join(reply.text.split())
    print(f"\n{number}  {text}")
    print(textwrap.fill(answer, 96, initial_indent="   ", subsequent_indent="   "))
    print(
        f"   [{reply.route}, {reply.reason}; {context_tokens} + {new_tokens} tokens, "
        f"{reply.cached_tokens} cached; first token after {reply.ttft_ms:.0f} ms]"
    )
    print(f"   [new passages: {names}]", flush=True)
