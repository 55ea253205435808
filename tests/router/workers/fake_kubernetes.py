"""A fake Kubernetes API: pods of one namespace, listed and watched over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: fake, user: me}}}}]
clusters: [{{name: fake, cluster: {{server: "{url}"}}}}]
users: [{{name: me, user: {{token: "{token}"}}}}]
"""
TOKEN = "s3cret"


@dataclass(slots=True)
class FakeKubernetes:
    """
    Attributes:
        oldest: changes up to this version are forgotten: who asks from there gets 410.
        refusal: a status that every request gets for now.
        asked: of each request: ``list``, or ``watch`` and the version.
    """

    url: str = ""
    version: int = 100
    oldest: int = 0
    refusal: int | None = None
    asked: list[str] = field(default_factory=list)
    _pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    _changes: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _happened: asyncio.Condition = field(default_factory=asyncio.Condition)
    _connections: set[asyncio.Transport] = field(default_factory=set)

    async def put(self, name: str, role: str, url: str, **state: Any) -> None:
        """A pod is new, or has changed."""
        pod = made(name, role, url, **state)
        await self._tell("MODIFIED" if name in self._pods else "ADDED", pod)

    async def delete(self, name: str) -> None:
        await self._tell("DELETED", self._pods[name])

    async def bookmark(self) -> None:
        nothing = {"spec": {"containers": None}, "status": {}}
        await self._tell("BOOKMARK", {"kind": "Pod", "metadata": {"labels": {}}, **nothing})

    async def expire(self) -> None:
        """All changes until now are forgotten, and watches end by saying so."""
        async with self._happened:
            self.oldest = self.version = self.version + 1
            self._happened.notify_all()

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.abort()

    async def _tell(self, kind: str, pod: dict[str, Any]) -> None:
        async with self._happened:
            self.version += 1
            metadata = {**pod["metadata"], "resourceVersion": str(self.version)}
            pod = {**pod, "metadata": metadata}
            match kind:
                case "ADDED" | "MODIFIED":
                    self._pods[metadata["name"]] = pod
                case "DELETED":
                    del self._pods[metadata["name"]]
            self._changes.append((self.version, {"type": kind, "object": pod}))
            self._happened.notify_all()

    async def pods(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        watched = query.get("watch") in ("true", "True")
        self.asked.append(f"watch {query['resourceVersion']}" if watched else "list")
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.refusal is not None:
            refused = failure(self.refusal, "pods is forbidden")
            return web.json_response(refused, status=self.refusal)
        role = query["labelSelector"].removeprefix("role=")
        if watched:
            return await self._watch(request, role, int(query["resourceVersion"]))
        items = [pod for pod in self._pods.values() if _is(pod, role)]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, role: str, version: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        connection = request.transport
        assert connection is not None
        self._connections.add(connection)
        try:
            while version >= self.oldest:
                for at, change in [one for one in self._changes if one[0] > version]:
                    version = at
                    if _is(change["object"], role):
                        await response.write(orjson.dumps(change) + b"\n")
                async with self._happened:
                    await self._happened.wait_for(partial(self._is_past, version))
            gone = failure(410, "too old resource version")
            await response.write(orjson.dumps({"type": "ERROR", "object": gone}) + b"\n")
        finally:
            self._connections.discard(connection)
        return response

    def _is_past(self, version: int) -> bool:
        return self.version > version

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeKubernetes]:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/models/pods", self.pods)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def kubeconfig(self, folder: Path) -> str:
        path = folder / "kubeconfig"
        path.write_text(KUBECONFIG.format(url=self.url, token=TOKEN))
        return str(path)


def _is(pod: dict[str, Any], role: str) -> bool:
    labels = pod["metadata"]["labels"]
    return not labels or labels["role"] == role  # a bookmark is everyone's


def made(
    name: str, role: str, url: str, *, ready: bool = True, ending: bool = False, port: str = "http"
) -> dict[str, Any]:
    """A pod as the API tells of it, with much that nobody looks at left out."""
    host, _, number = url.removeprefix("http://").rpartition(":")
    metadata = {
        "name": name,
        "uid": f"uid-{name}",
        "labels": {"role": role},
        "managedFields": [{"manager": "kubelet"}],
    }
    if ending:
        metadata["deletionTimestamp"] = "2026-11-21T20:00:00Z"
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "metadata": metadata,
        "spec": {
            "containers": [
                {"name": "proxy"},
                {"name": "sglang", "ports": [{"name": port, "containerPort": int(number)}]},
            ]
        },
        "status": {
            "phase": "Running",
            "podIP": host,
            "conditions": [{"type": "PodScheduled", "status": "True"}, condition],
        },
    }


def failure(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}
