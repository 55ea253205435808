"""openai-agents, over chat completions and over Responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import ENOUGH, KEY, MODEL, QUESTIONS, SHORT, Weather, base_url, report, require
from openai import AsyncOpenAI

called: list[bool] = []


@function_tool
def record(wet: bool) -> str:
    """Record whether it is wet."""
    called.append(wet)
    return "recorded"


def agent(model: Any, tokens: int, **more: Any) -> Any:
    """Return an agent that generates at most ``tokens`` tokens."""
    settings = ModelSettings(
        max_tokens=tokens, temperature=0, parallel_tool_calls=False, **more.pop("settings", {})
    )
    instructions = "Answer with one word."
    return Agent(name="a", instructions=instructions, model=model, model_settings=settings, **more)


async def main() -> None:
    """Hold a chat, stream it, call a tool and get an object, over both APIs."""
    set_tracing_disabled(True)
    sent: Counter[str] = Counter()
    client = AsyncOpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0)
    for api, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        model = kind(MODEL, client)
        items: list[Any] = []
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            result = await Runner.run(agent(model, SHORT), items)
            items = result.to_input_list()
            sent[f"{api}: chat"] += 1
        streamed = Runner.run_streamed(agent(model, SHORT), items + items[:1])
        events = [event async for event in streamed.stream_events()]
        require(events, f"{api}: no events")
        sent[f"{api}: stream"] += 1
        recording = agent(
            model,
            ENOUGH,
            tools=[record],
            tool_use_behavior="stop_on_first_tool",
            settings={"tool_choice": "required"},
        )
        result = await Runner.run(recording, "Record that it is wet.")
        require(called and result.final_output == "recorded", f"{api}: the tool was not called")
        called.clear()
        sent[f"{api}: tool"] += 1
        result = await Runner.run(agent(model, ENOUGH, output_type=Weather), QUESTIONS[0])
        require(isinstance(result.final_output, Weather), f"{api}: {result.final_output}")
        sent[f"{api}: object"] += 1
    report(sent)


asyncio.run(main())
