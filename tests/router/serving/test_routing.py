"""Routes, wire contract and API of the router, before fake workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker
from ppd.contract import Refusal, RefusalReason
from ppd.errors import WorkerError
from tests.waiting import HANG_S

from ..conftest import Cluster
from ..scripts import answering, failing

REFUSAL = Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS, cached_tokens=0, min_cached_tokens=64)


def prefill() -> FakeWorker:
    return FakeWorker("prefill", answering())


def decode(cached: int = 96) -> FakeWorker:
    return FakeWorker("decode", answering(prompt=100, cached=cached))


async def test_a_conversation_goes_remote_then_local(cluster: Cluster) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as client:
        first = await client.chat("hello", stream=True)
        second = await client.chat("hello", "www", "and", stream=True)
        assert first.route == ("remote", "first_turn")
        assert second.route == ("local", "policy_full")
        assert second.headers["X-PPD-Turn"] == "2"
        assert await client.metric("ppd_cached_tokens_predicted_total") == 96
        assert await client.metric("ppd_cached_tokens_actual_total") == 96
    assert len(p.bodies) == 1
    remote_p, remote_d, local = p.bodies[0], d.bodies[0], d.bodies[1]
    assert remote_p["bootstrap_room"] == remote_d["bootstrap_room"]
    assert 0 <= remote_p["bootstrap_room"] < 2**63
    assert (remote_d["bootstrap_host"], remote_d["bootstrap_port"]) == ("127.0.0.1", p.port)
    assert not [name for name in local if name.startswith("bootstrap")]
    assert local["custom_params"] == {"do_local_prefill": True, "min_cached_tokens": 64}


async def test_pd_policy_never_goes_local(cluster: Cluster) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d, policy="pd") as client:
        await client.chat("hello")
        assert (await client.chat("hello", "www", "and")).route == ("remote", "policy_pd")
    assert len(p.bodies) == 2


async def test_forks_and_regenerations_stay_local(cluster: Cluster) -> None:
    async with cluster(prefill(), decode()) as client:
        await client.chat("hello")
        assert (await client.chat("hello", "www", "one")).route[0] == "local"
        assert (await client.chat("hello", "www", "other")).route[0] == "local"
        again = await client.chat("hello", "www", "one")
        assert again.route[0] == "local"
        assert again.headers["X-PPD-Turn"] == "2"
        assert (await client.chat("goodbye", "www", "one")).route == ("remote", "first_turn")


async def test_tenants_do_not_share_sessions(cluster: Cluster) -> None:
    d = decode()
    async with cluster(prefill(), d) as client:
        message = {"role": "user", "content": "hello"}
        chat = {"model": "fake", "messages": [message]}
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            reply = await client.post("/v1/chat/completions", chat, headers)
            assert reply.route == ("remote", "first_turn")
    assert d.bodies[0]["cache_salt"] != d.bodies[1]["cache_salt"]
    assert [h["authorization"] for h in d.headers] == ["Bearer one", "Bearer two"]


async def test_the_marker_of_native_requests_is_in_their_sampling_params(
    cluster: Cluster,
) -> None:
    async def native(request: Request) -> None:
        meta = {"prompt_tokens": 100, "completion_tokens": 3, "cached_tokens": 96}
        request.answer({"text": "www", "meta_info": meta})

    d = FakeWorker("decode", native)
    async with cluster(prefill(), d) as client:
        ids = list(range(100))
        await client.post("/generate", {"input_ids": ids})
        reply = await client.post("/generate", {"input_ids": [*ids, 1, 2, 3, 4]})
        assert reply.route == ("local", "policy_full")
    assert d.bodies[1]["sampling_params"]["custom_params"]["do_local_prefill"] is True


async def test_a_batch_goes_remote_with_a_room_for_each_prompt(cluster: Cluster) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as client:
        reply = await client.post("/v1/completions", {"model": "fake", "prompt": ["a", "b"]})
        assert reply.route == ("remote", "batch")
    assert len(set(d.bodies[0]["bootstrap_room"])) == 2
    assert d.bodies[0]["bootstrap_room"] == p.bodies[0]["bootstrap_room"]
    assert d.bodies[0]["bootstrap_port"] == [p.port, p.port]


async def test_a_conversation_keeps_its_rank_of_a_prefill_worker(cluster: Cluster) -> None:
    """SGLang's rank is the room's remainder. Conversations are spread over the ranks."""
    p, d = prefill(), decode()
    p.dp_size = 4
    async with cluster(p, d, policy="pd") as client:
        for number in range(12):
            messages = ["hello " * 40 + str(number)]
            for _ in range(3):
                assert (await client.chat(*messages)).route[0] == "remote"
                messages += ["www", "on"]
    rooms = [body["bootstrap_room"] for body in p.bodies]
    assert len(set(rooms)) == 36
    assert all(0 <= room < 2**63 for room in rooms)
    ranks = [{room % 4 for room in rooms[3 * i : 3 * i + 3]} for i in range(12)]
    assert [len(of_one) for of_one in ranks] == [1] * 12
    assert len(set.union(*ranks)) > 1


async def test_client_headers_and_fields_that_steer_engines_are_dropped(cluster: Cluster) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as client:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "x"}],
            "bootstrap_host": "evil",
            "data_parallel_rank": 3,
            "custom_params": {"do_local_prefill": True},
        }
        headers = {
            "x-override-bootstrap-host": "evil",
            "X-Data-Parallel-Rank": "3",
            "X-Request-Id": "r1",
        }
        assert (await client.post("/v1/chat/completions", body, headers)).status == 200
    for engine in (p, d):
        assert engine.bodies[0]["bootstrap_host"] == "127.0.0.1"
        assert "data_parallel_rank" not in engine.bodies[0]
        assert engine.bodies[0]["custom_params"] is None
        assert engine.headers[0]["x-request-id"] == "r1"
        assert not [name for name in engine.headers[0] if "override" in name or "rank" in name]


async def test_one_refusal_tells_that_the_whole_cache_was_flushed(cluster: Cluster) -> None:
    p, d = prefill(), decode()
    flushed = replace(REFUSAL, flushes=1)
    async with cluster(p, d) as client:
        for opening in ("one", "two", "three"):
            await client.chat(opening)
        whole = d.script
        d.script = unless_remote(failing(503, flushed.to_message()), whole)
        routes = [(await client.chat(a, "www", "and")).route for a in ("one", "two", "three")]
        assert routes == [
            ("remote", "refused_by_worker"),
            ("remote", "home_gone"),
            ("remote", "home_gone"),
        ]
        d.script = whole
        assert (await client.chat("one", "www", "and", "www", "x")).route[0] == "local"


def unless_remote(script: Script, whole: Script) -> Script:
    async def choosing(request: Request) -> None:
        await (whole if "bootstrap_room" in request.body else script)(request)

    return choosing


async def test_a_refused_local_turn_stays_at_its_home(cluster: Cluster) -> None:
    """A refusal is no failure: the remote turn still decodes where most of its KV is."""
    p, homes = prefill(), [decode() for _ in range(3)]
    async with cluster(p, *homes) as client:
        await client.chat("hello")
        (home,) = [d for d in homes if d.bodies]
        home.script = unless_remote(failing(503, REFUSAL.to_message()), home.script)
        reply = await client.chat("hello", "www", "and")
        assert (reply.status, reply.route) == (200, ("remote", "refused_by_worker"))
        assert len(home.bodies) == 3  # the first turn, the refused one, and the remote one
        assert await client.metric("ppd_local_refused_total", reason="too_few_cached_tokens") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_local_turn_goes_remote_at_once(cluster: Cluster, stream: bool) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as client:
        await client.chat("hello", stream=stream)
        d.script = unless_remote(failing(503, REFUSAL.to_message()), d.script)
        reply = await client.chat("hello", "www", "and", stream=stream)
        assert (reply.status, reply.route) == (200, ("remote", "refused_by_worker"))
        assert b"refusal" not in reply.body
        assert await client.metric("ppd_local_refused_total", reason="too_few_cached_tokens") == 1
        turns = {"endpoint": "/v1/chat/completions", "route": "remote"}
        assert await client.metric("ppd_turns_total", reason="refused_by_worker", **turns) == 1
    assert len(p.bodies) == 2


async def test_without_the_plugin_all_turns_are_remote(cluster: Cluster) -> None:
    d = decode()
    d.local_prefill = False
    async with cluster(prefill(), d) as client:
        await client.chat("hello")
        assert (await client.chat("hello", "www", "and")).route == ("remote", "home_unpatched")


async def test_a_plugin_lost_at_run_time_is_noticed(cluster: Cluster) -> None:
    d = decode()
    async with cluster(prefill(), d) as client:
        await client.chat("hello")
        whole = d.script
        upstream = failing(
            400, "Invalid request: Disaggregated request received without bootstrap room id."
        )

        async def unpatched(request: Request) -> None:
            script = whole if "bootstrap_room" in request.body else upstream
            await script(request)

        d.script = unpatched
        for _ in range(2):
            reply = await client.chat("hello", "www", "and")
            assert reply.route == ("remote", "home_unpatched")
        local = [body for body in d.bodies if "bootstrap_room" not in body]
        assert len(local) == 1


@pytest.mark.parametrize("text", ["without bootstrap room", REFUSAL.to_message()])
async def test_a_client_cannot_forge_a_workers_refusal(cluster: Cluster, text: str) -> None:
    """Validation errors repeat what the client has sent."""
    d = decode()
    async with cluster(prefill(), d) as client:
        await client.chat("hello")
        whole, d.script = d.script, failing(400, f"1 validation error: {text}")
        assert (await client.chat("hello", "www", "x", temperature=text)).status == 400
        d.script = whole
        assert (await client.chat("hello", "www", "y")).route == ("local", "policy_full")
        assert await client.metric("ppd_local_refused_total", reason="too_few_cached_tokens") == 0


async def test_a_short_opening_makes_no_home(cluster: Cluster) -> None:
    d = FakeWorker("decode", answering(prompt=20))
    async with cluster(prefill(), d) as client:
        await client.chat("hi")
        assert (await client.chat("hi", "www", "and")).route == ("remote", "short_prefix")


async def test_a_misprediction_is_counted(cluster: Cluster) -> None:
    async with cluster(prefill(), decode(cached=48)) as client:
        await client.chat("hello")
        await client.chat("hello", "www", "and")
        assert await client.metric("ppd_cache_mispredictions_total") == 1


async def test_usage_is_shown_to_who_asks(cluster: Cluster) -> None:
    async with cluster(prefill(), decode()) as client:
        plain = await client.chat("a", stream=True)
        asked = await client.chat("b", stream=True, stream_options={"include_usage": True})
        assert not [e for e in plain.events if e.get("usage")]
        assert asked.events[-1]["usage"]["prompt_tokens"] == 100


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/v1/chat/completions", b"{", 400, "no valid JSON"),
        ("/v1/chat/completions", {"model": "x", "messages": []}, 404, "'x' does not exist"),
        ("/v1/chat/completions", b"x" * 5000, 413, "larger than 4000 bytes"),
        ("/v1/nothing", {}, 404, "no such path"),
        ("/v1/models", {}, 405, "use GET"),
    ],
)
async def test_errors_are_openai_errors(
    cluster: Cluster, path: str, body: object, status: int, named: str
) -> None:
    async with cluster(prefill(), decode(), max_body_bytes=4000) as client:
        reply = await client.post(path, body)
        assert reply.status == status
        assert named in reply.json["error"]["message"]
        assert reply.json["error"]["type"] == "invalid_request_error"


async def test_models_and_health(cluster: Cluster) -> None:
    d = decode()
    async with cluster(prefill(), d) as client:
        async with client.http.get(f"{client.url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "fake"
        async with client.http.get(f"{client.url}/health") as response:
            assert response.status == 200
        d.ready = False

        async def down() -> None:
            while True:
                async with client.http.get(f"{client.url}/health") as response:
                    if response.status == 503:
                        return

        await asyncio.wait_for(down(), HANG_S)
        assert (await client.chat("x")).status == 503


@pytest.mark.parametrize(
    ("p", "d", "named"),
    [
        (FakeWorker("decode", answering()), decode(), "given as a prefill worker, but runs with"),
        (FakeWorker("prefill", answering(), model="other"), decode(), "different models"),
    ],
)
async def test_workers_that_do_not_fit_are_named(
    cluster: Cluster, p: FakeWorker, d: FakeWorker, named: str
) -> None:
    from router.config.options import RouterConfig
    from router.server.run import running

    async with p.serving(), d.serving():
        config = RouterConfig(prefill=(p.url,), decode=(d.url,), port=0)
        with pytest.raises(WorkerError, match=named):
            async with running(config):
                pass
