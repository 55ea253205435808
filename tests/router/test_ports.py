"""Who is served on which port: operators apart from clients, TLS, tokens, networks."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest

from eval.cluster import free_port
from eval.fake_worker.worker import FakeWorker
from ppd.errors import ConfigError
from router.config.limits import Tenant
from router.config.options import RouterConfig
from router.server.run import running

from .conftest import CHAT_BODY, Cluster, new_certificate
from .fixtures import until
from .scripts import answering

TOKEN = {"Authorization": "Bearer s3cret"}
CHAT = "/v1/chat/completions"


def workers() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("prefill", answering()), FakeWorker("decode", answering())


async def status(http: aiohttp.ClientSession, method: str, url: str, **how: object) -> int:
    async with http.request(method, url, **how) as answer:  # type: ignore[arg-type]
        return answer.status


async def test_an_admin_port_takes_all_but_the_api(cluster: Cluster) -> None:
    port = free_port()
    inner = f"http://127.0.0.1:{port}"
    async with cluster(*workers(), admin_port=port) as client:
        http = client.http
        assert (await client.post(CHAT, CHAT_BODY)).status == 200
        for path in ("/metrics", "/workers", "/explain", "/table"):
            assert await status(http, "GET", client.url + path) == 404
            assert await status(http, "GET", inner + path) == 200
        for path in ("/health", "/live", "/v1/models", "/v1/models/fake"):
            assert await status(http, "GET", client.url + path) == 200
        assert await status(http, "POST", inner + CHAT, json=CHAT_BODY) == 404


async def test_with_a_token_operators_must_carry_it_to_look_too(cluster: Cluster) -> None:
    async with cluster(*workers(), admin_token="s3cret") as client:
        http, url = client.http, client.url
        for method, path in (
            ("GET", "/workers"),
            ("GET", "/explain"),
            ("GET", "/table"),
            ("POST", "/table/reset"),
            ("POST", "/explain" + CHAT),
        ):
            assert await status(http, method, url + path, json=CHAT_BODY) == 401
            assert await status(http, method, url + path, json=CHAT_BODY, headers=TOKEN) != 401
        for path in ("/health", "/live", "/metrics", "/v1/models"):
            assert await status(http, "GET", url + path) == 200
        assert await status(http, "GET", url + "/nothing") == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"])
async def test_workers_are_in_allowed_networks_only(cluster: Cluster, host: str) -> None:
    said = {"url": f"http://{host}:1", "role": "decode", "boot_id": "b"}
    for networks, refused in ((("10.0.0.0/8",), True), (("127.0.0.0/8",), False)):
        options = {"accept_workers": True, "worker_networks": networks}
        async with cluster(*workers(), **options) as client:
            reply = await client.post("/workers", said)
            assert (reply.status == 403) is refused
            assert (b"is not in 10.0.0.0/8" in reply.body) is refused


async def test_a_worker_keeps_the_address_that_was_checked_whatever_its_name_leads_to_later(
    cluster: Cluster,
) -> None:
    options = {"accept_workers": True, "worker_networks": ("127.0.0.0/8", "::1/128")}
    newcomer = FakeWorker("decode", answering())
    async with newcomer.serving(), cluster(*workers(), **options) as client:
        port = newcomer.url.rsplit(":", 1)[1]
        said = {"role": "decode", "boot_id": newcomer.boot_id, "models": [newcomer.model]}
        assert newcomer.url not in await client.workers()
        reply = await client.post("/workers", {**said, "url": f"http://localhost:{port}"})
        assert reply.status == 200
        assert newcomer.url in await client.workers()
        gone = {**said, "url": f"http://localhost:{port}", "leaving": True}
        assert (await client.post("/workers", gone)).status == 200
        assert newcomer.url not in await client.workers()
        reply = await client.post("/workers", {**said, "url": f"https://localhost:{port}"})
        assert (reply.status, b"announce an address" in reply.body) == (409, True)


async def test_workers_are_not_given_a_key_that_anybody_could_collect(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="set worker_token"):
        async with cluster(*workers(), accept_workers=True, worker_api_key="secret"):
            pass


async def test_operators_can_explain_where_clients_need_keys(cluster: Cluster) -> None:
    tenants = {"a": Tenant(keys=(sha256(b"KEY").hexdigest(),))}
    async with cluster(*workers(), admin_token="s3cret", tenants=tenants) as client:
        path = "/explain" + CHAT
        assert (await client.post(path, CHAT_BODY, {"Authorization": "Bearer KEY"})).status == 401
        reply = await client.post(path, CHAT_BODY, {**TOKEN, "x-api-key": "KEY"})
        assert (reply.status, reply.json["tenant"]) == (200, "a")


async def test_tls_for_streams_and_for_what_the_application_answers(
    cluster: Cluster, certificate: tuple[Path, Path]
) -> None:
    files = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    async with cluster(*workers(), **files) as client:
        assert client.url.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(connector=connector) as http:
            for _ in range(2):  # on one connection, then handed over
                async with http.post(
                    client.url + CHAT, json={**CHAT_BODY, "stream": True}
                ) as answer:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
                assert await status(http, "GET", client.url + "/health") == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.close()


async def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(
    certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ppd.router")
    file, key = certificate
    p, d = workers()
    async with p.serving(), d.serving():
        config = RouterConfig(
            prefill=(p.url,),
            decode=(d.url,),
            policy="pd",
            port=0,
            tls_certificate=str(file),
            tls_key=str(key),
        )
        async with running(config, read=lambda: config) as url:

            async def logged(what: str) -> bool:
                await asyncio.sleep(0)
                return what in caplog.text

            async def healthy(certificate: bytes) -> bool:
                """With a client that trusts that one only."""
                trusted = ssl.create_default_context(cadata=certificate.decode())
                async with aiohttp.ClientSession() as http:
                    try:
                        async with http.get(f"{url}/health", ssl=trusted) as answer:
                            return answer.status == 200
                    except aiohttp.ClientConnectorCertificateError:
                        return False

            before = file.read_bytes()
            assert await healthy(before)
            new_certificate(file, key)
            after = file.read_bytes()
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: logged("configuration reloaded"))
            assert (await healthy(before), await healthy(after)) == (False, True)
            file.write_text("nothing")
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: logged("configuration not reloaded: tls_certificate"))
            assert await healthy(after)


async def test_operators_have_an_address_of_their_own_and_the_same_certificate(
    cluster: Cluster, certificate: tuple[Path, Path]
) -> None:
    files = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    trusted.check_hostname = False
    port = free_port()
    options = {**files, "admin_port": port, "admin_host": "127.0.0.2"}
    async with cluster(*workers(), **options) as client:
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(connector=connector) as http:
            assert await status(http, "GET", f"https://127.0.0.2:{port}/workers") == 200
            assert await status(http, "GET", f"{client.url}/workers") == 404
    with pytest.raises(ConfigError, match="admin_host is of an admin_port"):
        async with cluster(*workers(), admin_host="127.0.0.2"):
            pass


async def test_a_wrong_certificate_is_reported_at_start(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    file.write_text("nothing")
    with pytest.raises(Exception, match=r"tls_certificate .*x\.pem"):
        async with cluster(*workers(), tls_certificate=str(file), tls_key=str(file)):
            pass
