"""What the chats of these tests search for, and what workers see of it."""

from __future__ import annotations

from typing import Any

from eval.fake_worker.worker import FakeWorker

WISH = {"collection": "docs", "k": 2}


def on_topic(body: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Passages that name the question's last word; one that every search finds."""
    topic = body["text"].split()[-1]
    return [
        (f"{topic}-1", 0.9, f"all about {topic}"),
        ("common", 0.5, "known everywhere"),
        (f"{topic}-2", 0.4, f"more about {topic}"),
    ]


Engines = tuple[FakeWorker, FakeWorker]


def sent(engine: FakeWorker) -> list[str]:
    """Contents of the messages of the newest request."""
    return [message["content"] for message in engine.bodies[-1]["messages"]]


def block(*texts: str) -> str:
    told = (f"[{number}] {text}" for number, text in enumerate(texts, 1))
    return "\n\n".join(("Passages that may help:", *told, ""))
