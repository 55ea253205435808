"""What the pool cannot see itself: how busy KV links are, how long decoding stood still.

Sent again and again; a pool that does not take it runs on what it measures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import orjson

logger = logging.getLogger("ppd.router.retrieval")


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the router started."""

    kv_bytes_sent: float
    decode_s: float
    stalled_s: float


class Feedback:
    """
    Args:
        url: of the pool, without path.
        link_bytes_per_s: of all KV links; None: taken as idle.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        url: str,
        interval_s: float,
        link_bytes_per_s: float | None,
        totals: Callable[[], Totals],
        client: aiohttp.ClientSession,
        clock: Callable[[], float],
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/feedback"
        self._interval_s = interval_s
        self._link_bytes_per_s = link_bytes_per_s
        self._totals = totals
        self._client = client
        self._clock = clock
        self._before, self._at_s = totals(), clock()
        self._heard = True

    async def run_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.send()

    async def send(self) -> None:
        """What has happened since the last time."""
        now, now_s = self._totals(), self._clock()
        body = orjson.dumps(
            {
                "kv_link_use": self._link_use(now, now_s),
                "decode_stall": _share(
                    now.stalled_s - self._before.stalled_s, now.decode_s - self._before.decode_s
                ),
            }
        )
        self._before, self._at_s = now, now_s
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=self._interval_s)
        try:
            async with self._client.post(
                self._url, data=body, headers=headers, timeout=timeout
            ) as response:
                heard, told = response.status == 200, f"it answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            heard, told = False, str(error) or type(error).__name__
        if self._heard and not heard:
            logger.warning("%s takes no feedback: %s", self._url, told)
        self._heard = heard

    def _link_use(self, now: Totals, now_s: float) -> float:
        if self._link_bytes_per_s is None:
            return 0.0
        carried = self._link_bytes_per_s * (now_s - self._at_s)
        return _share(now.kv_bytes_sent - self._before.kv_bytes_sent, carried)


def _share(part: float, whole: float) -> float:
    """From 0 to 1; of nothing, 0."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
