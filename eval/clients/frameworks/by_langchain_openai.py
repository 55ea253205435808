"""langchain-openai, over chat completions and over Responses."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cases import ENOUGH, KEY, MODEL, QUESTIONS, SHORT, Weather, base_url, report, require
from langchain_openai import ChatOpenAI


def chat(tokens: int, responses: bool) -> Any:
    """Return a chat model that generates at most ``tokens`` tokens."""
    return ChatOpenAI(
        base_url=f"{base_url()}/v1",
        api_key=KEY,
        model=MODEL,
        max_tokens=tokens,
        temperature=0,
        max_retries=0,
        use_responses_api=responses,
    )


def main() -> None:
    """Hold a chat, stream it, call a tool and get an object, over both APIs."""
    sent: Counter[str] = Counter()
    for api in ("chat", "responses"):
        short, enough = chat(SHORT, api == "responses"), chat(ENOUGH, api == "responses")
        messages: list[Any] = [("system", "Answer with one word.")]
        for question in QUESTIONS:
            messages.append(("user", question))
            messages.append(short.invoke(messages))
            sent[f"{api}: chat"] += 1
        chunks = list(short.stream([*messages, ("user", QUESTIONS[0])]))
        require(len(chunks) > 1, f"{api}: nothing was streamed")
        sent[f"{api}: stream"] += 1
        bound = enough.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
        calls = bound.invoke(QUESTIONS[0]).tool_calls
        require([call["name"] for call in calls] == ["Weather"], f"{api}: calls {calls}")
        sent[f"{api}: tool"] += 1
        found = enough.with_structured_output(Weather, method="json_schema").invoke(QUESTIONS[0])
        require(isinstance(found, Weather), f"{api}: {found}")
        sent[f"{api}: object"] += 1
    report(sent)


main()
