"""pydantic-ai, over chat completions and over Responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from cases import ENOUGH, KEY, MODEL, QUESTIONS, SHORT, Weather, base_url, report, require
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def settings(tokens: int) -> Any:
    """Return settings of a request that generates at most ``tokens`` tokens."""
    return {"max_tokens": tokens, "temperature": 0.0, "parallel_tool_calls": False}


async def main() -> None:
    """Hold a chat, stream it, call a tool and get an object, over both APIs."""
    sent: Counter[str] = Counter()
    provider = OpenAIProvider(base_url=f"{base_url()}/v1", api_key=KEY)
    for api, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        model = kind(MODEL, provider=provider)
        agent: Any = Agent(model, instructions="Answer with one word.")
        history: Any = None
        for question in QUESTIONS:
            result = await agent.run(
                question, message_history=history, model_settings=settings(SHORT)
            )
            history = result.all_messages()
            sent[f"{api}: chat"] += 1
        async with agent.run_stream(
            QUESTIONS[0], message_history=history, model_settings=settings(SHORT)
        ) as streamed:
            parts = [part async for part in streamed.stream_text(delta=True)]
        require(parts, f"{api}: nothing was streamed")
        sent[f"{api}: stream"] += 1
        for case, output in (("tool", ToolOutput(Weather)), ("object", NativeOutput(Weather))):
            typed: Any = Agent(model, output_type=output)
            result = await typed.run(QUESTIONS[0], model_settings=settings(ENOUGH))
            require(isinstance(result.output, Weather), f"{api}: {result.output}")
            sent[f"{api}: {case}"] += 1
    report(sent)


asyncio.run(main())
