"""instructor: objects by tools and by Responses.

Its mode of JSON gives the engine no schema, and its mode of JSON schemas sends tools as well, which
SGLang refuses.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import instructor
from cases import ENOUGH, KEY, MODEL, QUESTIONS, SHORT, Weather, base_url, report, require
from openai import OpenAI


def main() -> None:
    """Hold a chat, and get objects: whole in two ways, and streamed."""
    sent: Counter[str] = Counter()
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    options = {"model": MODEL, "temperature": 0, "max_retries": 0}
    ways = {
        "tool": instructor.Mode.TOOLS,
        "responses": instructor.Mode.RESPONSES_TOOLS,
    }
    for way, mode in ways.items():
        plain = OpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0)
        client: Any = instructor.from_openai(plain, mode=mode)  # it changes the client itself
        limit = "max_output_tokens" if way == "responses" else "max_tokens"
        if way == "tool":
            for _ in QUESTIONS:
                answer = client.chat.completions.create(
                    response_model=None, messages=messages, max_tokens=SHORT, **options
                )
                reply = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": reply})
                messages.append({"role": "user", "content": QUESTIONS[1]})
                sent["chat"] += 1
        found = client.chat.completions.create(
            response_model=Weather, messages=messages[:1], **{limit: ENOUGH}, **options
        )
        require(isinstance(found, Weather), f"{way}: {found}")
        sent[way] += 1
        if way != "responses":
            *_, last = client.chat.completions.create_partial(
                response_model=Weather, messages=messages[:1], **{limit: ENOUGH}, **options
            )
            require(last.wet is not None and last.wind is not None, f"{way}: {last}")
            sent[f"{way}, streamed"] += 1
    report(sent)


main()
