"""Workers that decode speculatively, and requests whose acceptance histogram is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from eval.draft_model import DraftSpec, ensure_pair
from eval.engine.client import bootstrap_port_of
from ppd.contract import LocalTerms, Role

from .workers import Workers, wait_ready, worker_launcher

STEPS = 4  # of a draft; its chain has as many tokens


def draft_flags(draft: Path, algorithm: str = "EAGLE") -> tuple[str, ...]:
    """SGLang's flags for chains of ``STEPS`` draft tokens."""
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(STEPS + 1)),
    )


def start_speculating(
    spec: DraftSpec, logs: Path, page_size: int, decode_flags: Sequence[str] = ()
) -> Iterator[Workers]:
    """Start prefill, decode and monolithic servers of a target with a draft; stop them at close."""
    target, draft = ensure_pair(spec)
    algorithm = "EAGLE3" if spec.eagle3 else "EAGLE"
    flags = ("--page-size", str(page_size), *draft_flags(draft, algorithm))
    with worker_launcher(logs) as launcher:
        prefill = launcher.worker(Role.PREFILL, target, *flags)
        decode = launcher.worker(Role.DECODE, target, *flags, *decode_flags)
        monolithic = launcher.worker(Role.REPLICA, target, *flags)
        wait_ready(*launcher.started)
        yield Workers(prefill, decode, monolithic, page_size, target)


@dataclass(frozen=True, slots=True)
class Speculated:
    """A reply's token ids, and how many verify steps accepted 0, 1, 2, ... draft tokens."""

    ids: list[int]
    histogram: list[int]

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of a verify step, with the bonus token."""
        accepted = sum(i * count for i, count in enumerate(self.histogram))
        return 1 + accepted / sum(self.histogram)


class Speculator:
    """Sends turns of token ids to the workers directly, and reads the histograms."""

    def __init__(self, http: aiohttp.ClientSession, workers: Workers) -> None:
        self._http = http
        self._workers = workers
        self._rooms = iter(range(1000, 1_000_000))

    async def alone(self, ids: list[int], tokens: int) -> Speculated:
        """Send a turn to the monolithic server."""
        assert self._workers.monolithic is not None
        return await self._send(self._workers.monolithic.url, ids, tokens, {})

    async def local(self, ids: list[int], tokens: int, min_cached: int = 0) -> Speculated:
        """Send a local turn to the decode worker."""
        terms = {"custom_params": LocalTerms(min_cached).to_custom_params()}
        return await self._send(self._workers.decode.url, ids, tokens, terms)

    async def remote(self, ids: list[int], tokens: int) -> Speculated:
        """Send a turn through the prefill worker."""
        prefill, decode = self._workers.prefill, self._workers.decode
        bootstrap = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": await bootstrap_port_of(self._http, prefill.url),
            "bootstrap_room": next(self._rooms),
        }
        _, reply = await asyncio.gather(
            *(self._send(w.url, ids, tokens, {}, **bootstrap) for w in (prefill, decode))
        )
        return reply

    async def _send(
        self, url: str, ids: list[int], tokens: int, params: dict[str, Any], **fields: Any
    ) -> Speculated:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
        body = {"input_ids": ids, "sampling_params": sampling, **fields}
        async with self._http.post(f"{url}/generate", json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
        return Speculated(
            reply["output_ids"], reply["meta_info"].get("spec_correct_drafts_histogram", [])
        )
