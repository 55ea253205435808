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

from tests.apps import serving_app

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
    """The pods of one namespace, which can be listed and watched.

    Attributes:
        url: of the API server.
        version: of the last change.
        oldest: a watch from an older version gets status 410.
        refusal: the status that every request gets; None if requests are served.
        requests: ``list``, or ``watch`` and the version, for each request so far.
    """

    url: str = ""
    version: int = 100
    oldest: int = 0
    refusal: int | None = None
    requests: list[str] = field(default_factory=list)
    _pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    _changes: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _change: asyncio.Condition = field(default_factory=asyncio.Condition)
    _connections: set[asyncio.Transport] = field(default_factory=set)

    async def put(self, name: str, role: str, url: str, **state: Any) -> None:
        """Add or change a pod."""
        await self.put_pod(pod_object(name, role, url, **state))

    async def put_pod(self, pod: dict[str, Any]) -> None:
        """Add or change a pod that is given as the API sends it."""
        await self._publish("MODIFIED" if pod["metadata"]["name"] in self._pods else "ADDED", pod)

    async def delete(self, name: str) -> None:
        """Delete a pod."""
        await self._publish("DELETED", self._pods[name])

    async def bookmark(self) -> None:
        """Send all watches a new version without a change."""
        nothing = {"spec": {"containers": None}, "status": {}}
        await self._publish("BOOKMARK", {"kind": "Pod", "metadata": {"labels": {}}, **nothing})

    async def expire(self) -> None:
        """End all watches with status 410, and refuse those from earlier versions."""
        async with self._change:
            self.oldest = self.version = self.version + 1
            self._change.notify_all()

    def hang_up(self) -> None:
        """Reset the connections of all watches."""
        for connection in self._connections:
            connection.abort()

    async def _publish(self, kind: str, pod: dict[str, Any]) -> None:
        async with self._change:
            self.version += 1
            metadata = {**pod["metadata"], "resourceVersion": str(self.version)}
            pod = {**pod, "metadata": metadata}
            match kind:
                case "ADDED" | "MODIFIED":
                    self._pods[metadata["name"]] = pod
                case "DELETED":
                    del self._pods[metadata["name"]]
            self._changes.append((self.version, {"type": kind, "object": pod}))
            self._change.notify_all()

    async def pods(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        watched = query.get("watch") in ("true", "True")
        self.requests.append(f"watch {query['resourceVersion']}" if watched else "list")
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.refusal is not None:
            refused = failure(self.refusal, "pods is forbidden")
            return web.json_response(refused, status=self.refusal)
        selector = dict(part.split("=", 1) for part in query["labelSelector"].split(","))
        if watched:
            return await self._watch(request, selector, int(query["resourceVersion"]))
        items = [pod for pod in self._pods.values() if _is(pod, selector)]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": items})

    async def _watch(
        self, request: web.Request, selector: dict[str, str], version: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        connection = request.transport
        assert connection is not None
        self._connections.add(connection)
        try:
            while version >= self.oldest:
                for number, change in [entry for entry in self._changes if entry[0] > version]:
                    version = number
                    if _is(change["object"], selector):
                        await response.write(orjson.dumps(change) + b"\n")
                async with self._change:
                    await self._change.wait_for(partial(self._is_past, version))
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
        async with serving_app(app, handler_cancellation=True, shutdown_timeout=0.05) as self.url:
            yield self

    def kubeconfig(self, folder: Path) -> str:
        """Write a kubeconfig file, and return its path."""
        path = folder / "kubeconfig"
        path.write_text(KUBECONFIG.format(url=self.url, token=TOKEN))
        return str(path)


def _is(pod: dict[str, Any], selector: dict[str, str]) -> bool:
    labels = pod["metadata"]["labels"]
    # A bookmark has no labels, and every watch gets it.
    return not labels or selector.items() <= labels.items()


def pod_object(
    name: str, role: str, url: str, *, ready: bool = True, ending: bool = False, port: str = "http"
) -> dict[str, Any]:
    """A pod as the API sends it, without most of the fields that no reader uses."""
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
