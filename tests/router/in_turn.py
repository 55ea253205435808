"""Scripts that several workers share: which of them gets a request first is the router's choice."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from .fake_engine import FakeEngine, Script


class InTurn:
    """The first request is answered by the first script, and so on; the last one goes on."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.asked: list[tuple[FakeEngine, dict[str, Any]]] = []

    async def __call__(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        script = self._scripts[min(len(self.asked), len(self._scripts) - 1)]
        self.asked.append((engine, body))
        return await script(engine, request, body)

    @property
    def engines(self) -> list[FakeEngine]:
        return [engine for engine, _ in self.asked]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.asked]
