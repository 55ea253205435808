"""``n`` above 1 sends all samples, and one request more, into one bootstrap room.

A bootstrap room is the name of one transfer. The tokenizer process gives every copy of the request
the same one: the copy that fills the cache, and each sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from eval import tiny_model
from tests.upstream.in_process import report


def main() -> None:
    """Record what the tokenizer process sends to the scheduler for ``n = 2``."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    rooms: list[int] = []

    class Recording(TokenizerManager):  # type: ignore[misc]  # SGLang has no types
        """Sends nothing: it records the room, and takes each request as answered."""

        async def _send_one_request(self, tokenized: Any) -> None:
            rooms.append(tokenized.bootstrap_room)

        async def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
            yield {"meta_info": {"id": obj.rid}}

    flags = ("--device", "cpu", "--skip-tokenizer-init", "--disaggregation-mode", "decode")
    server_args = prepare_server_args(["--model-path", str(tiny_model.ensure()), *flags])
    publish(server_args, role="tokenizer")

    async def generate() -> None:
        manager = Recording(server_args, PortArgs.init_new(server_args))
        sent = GenerateReqInput(
            input_ids=[10, 11, 12],
            sampling_params={"n": 2, "max_new_tokens": 3},
            bootstrap_host="127.0.0.1",
            bootstrap_port=1,
            bootstrap_room=5,
        )
        async for _ in manager.generate_request(sent):
            pass

    asyncio.run(generate())
    report(rooms=rooms)
