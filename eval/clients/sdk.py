"""The clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai

from .run import CONVERSATIONS, TURNS, ClientRun, require


def by_openai(run_of: ClientRun) -> int:
    """Send chats, completions and responses by the ``openai`` client."""

    async def talk(client: openai.AsyncOpenAI, number: int) -> int:
        messages: list[Any] = []
        previous: Any = openai.omit
        for turn in range(TURNS):
            asked = f"Conversation {number}, question {turn}: what is {number} times {turn}?"
            messages.append({"role": "user", "content": asked})
            stream = await client.chat.completions.create(
                model="default",
                messages=messages,
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
            reply, counted = "", 0
            async for chunk in stream:
                for choice in chunk.choices:
                    reply += choice.delta.content or ""
                if chunk.usage is not None:
                    counted = chunk.usage.completion_tokens
            require(0 < counted <= 16, f"usage counts {counted} tokens")
            messages.append({"role": "assistant", "content": reply})
            response = await client.responses.create(
                model="default",
                input=asked,
                max_output_tokens=16,
                previous_response_id=previous,
            )
            require(response.status in ("completed", "incomplete"), response.status)
            previous = response.id
        several = await client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, n=2, logprobs=True, top_logprobs=2
        )
        require(len(several.choices) == 2, "two samples were asked for")
        require(several.choices[1].logprobs is not None, "logprobs were asked for")
        text = await client.completions.create(model="default", prompt="Once upon", max_tokens=8)
        require(text.usage is not None and text.usage.completion_tokens == 8, "usage")
        return 2 * TURNS + 2 + 1

    async def all_talk() -> int:
        async with openai.AsyncOpenAI(
            base_url=f"{run_of.url}/v1", api_key="any", max_retries=0
        ) as client:
            await client.models.list()
            return sum(await asyncio.gather(*(talk(client, i) for i in range(CONVERSATIONS))))

    return asyncio.run(all_talk())


def by_anthropic(run_of: ClientRun) -> int:
    """Send messages by the ``anthropic`` client, streamed and whole."""

    async def talk(client: anthropic.AsyncAnthropic, number: int) -> int:
        messages: list[Any] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Say {number} and {turn} once more."})
            async with client.messages.stream(
                model="default", max_tokens=16, messages=messages
            ) as stream:
                final_message = await stream.get_final_message()
            require(final_message.usage.output_tokens > 0, "no usage")
            text = "".join(block.text for block in final_message.content if block.type == "text")
            messages.append({"role": "assistant", "content": text})
        return TURNS

    async def all_talk() -> int:
        async with anthropic.AsyncAnthropic(
            base_url=run_of.url, api_key="any", max_retries=0
        ) as client:
            return sum(await asyncio.gather(*(talk(client, i) for i in range(CONVERSATIONS))))

    return asyncio.run(all_talk())
