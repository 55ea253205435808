"""Feedback to the pool: how busy the KV links are, and how fast streams are.

The pool cannot measure either. It is sent at an interval; a pool that refuses it uses its own
measurements only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import orjson

from .link_use import LinkUse

logger = logging.getLogger("ppd.router.retrieval")


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals since the router started.

    Attributes:
        kv_bytes_sent: KV that was transferred, in bytes.
        decode_s: time of decoding, over all streams.
        decoded_tokens: tokens after the first one, over all streams.
    """

    kv_bytes_sent: float
    decode_s: float
    decoded_tokens: int


class Feedback:
    """Sends the feedback of one router.

    Args:
        url: of the pool, without a path.
        interval_s: seconds between two messages.
        link: measures the use of the KV links.
        totals: returns the current totals.
        client: an HTTP session.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        url: str,
        interval_s: float,
        link: LinkUse,
        totals: Callable[[], Totals],
        client: aiohttp.ClientSession,
        clock: Callable[[], float],
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/feedback"
        self._interval_s = interval_s
        self._link = link
        self._totals = totals
        self._client = client
        self._clock = clock
        self._last_totals, self._last_sent_s = totals(), clock()
        self._accepted = True

    async def run_forever(self) -> None:
        """Send the feedback at every interval."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.send()

    async def send(self) -> None:
        """Send the feedback since the last message; the first of several failures is logged."""
        totals, now_s = self._totals(), self._clock()
        last = self._last_totals
        sent_bytes = totals.kv_bytes_sent - last.kv_bytes_sent
        tokens = totals.decoded_tokens - last.decoded_tokens
        token_ms = 1e3 * (totals.decode_s - last.decode_s) / tokens if tokens else None
        body = orjson.dumps(
            {
                "kv_link_use": self._link.observe(sent_bytes, now_s - self._last_sent_s),
                "token_ms": token_ms,
            }
        )
        self._last_totals, self._last_sent_s = totals, now_s
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=self._interval_s)
        try:
            async with self._client.post(
                self._url, data=body, headers=headers, timeout=timeout
            ) as response:
                accepted, reason = response.status == 200, f"it answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            accepted, reason = False, str(error) or type(error).__name__
        if self._accepted and not accepted:
            logger.warning("%s takes no feedback: %s", self._url, reason)
        self._accepted = accepted
