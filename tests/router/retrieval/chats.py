"""The options and passages of these tests, and the messages that workers get."""

from __future__ import annotations

from typing import Any

from eval.fake_worker.worker import FakeWorker

OPTIONS = {"collection": "docs", "k": 2}


def on_topic(body: dict[str, Any]) -> list[tuple[str, float, str]]:
    """The hits of a search: two passages about its last word, and one for every search."""
    topic = body["text"].split()[-1]
    return [
        (f"{topic}-1", 0.9, f"all about {topic}"),
        ("common", 0.5, "common knowledge"),
        (f"{topic}-2", 0.4, f"more about {topic}"),
    ]


Engines = tuple[FakeWorker, FakeWorker]


def sent(engine: FakeWorker) -> list[str]:
    """Contents of the messages of the last request."""
    return [message["content"] for message in engine.bodies[-1]["messages"]]


def block(*texts: str) -> str:
    """The text of passages in front of a message."""
    numbered = (f"[{number}] {text}" for number, text in enumerate(texts, 1))
    return "\n\n".join(("Passages that may help:", *numbered, ""))
