"""The router's own page: its files, and what it tells of workers and decisions."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import router.admin.dashboard
from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from ppd.contract import Refusal, RefusalReason
from ppd.decision import Reason, Route

from ..conftest import Client, Cluster
from ..fixtures import LATER, workers
from ..scripts import answering, failing, hanging

PAGE = Path(router.admin.dashboard.__file__).with_name("page")
REFUSAL = Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS, cached_tokens=0, min_cached_tokens=64)


async def state_of(client: Client, headers: Any = None) -> dict[str, Any]:
    async with client.http.get(f"{client.url}/dashboard/state", headers=headers) as response:
        assert response.status == 200
        assert response.headers["Cache-Control"] == "no-store"
        state: dict[str, Any] = await response.json()
        return state


async def test_before_any_request(cluster: Cluster) -> None:
    p, d = workers()
    async with cluster(p, d) as client:
        state = await state_of(client)
    assert (state["policy"], state["table"], state["models"]) == ("full", None, ["fake"])
    assert state["roles"] == ["decode", "prefill"]
    assert state["decisions"] == state["ttft"]["groups"] == state["window"]["reasons"] == []
    assert state["window"]["requests"] == state["waiting"] == 0
    assert state["rates"]["per_s"] == dict.fromkeys(Route, 0)
    assert [(w["role"], w["url"], w["ready"]) for w in state["workers"]] == [
        ("prefill", p.url, True),
        ("decode", d.url, True),
    ]


async def test_requests_are_counted_by_reason_turn_and_route(cluster: Cluster) -> None:
    async with cluster(*workers()) as client:
        contents = ["hello " * 40]
        for _ in range(4):
            assert (await client.chat(*contents, stream=True)).status == 200
            contents += ["w0w1w2", "and on"]
        await client.chat("another " * 40, stream=True)
        state = await state_of(client)
    window = state["window"]
    assert (window["requests"], window["under_way"]) == (5, 0)
    assert window["outcomes"] == {"answered": 5}
    assert (window["prompt_tokens"], window["cached_tokens"]) == (500, 5 * 96)
    assert window["reasons"] == [
        {"reason": "policy_full", "route": "local", "count": 3},
        {"reason": "first_turn", "route": "remote", "count": 2},
    ]
    assert window["turns"] == [
        {"turn": 1, "route": "remote", "count": 2},
        {"turn": 2, "route": "local", "count": 1},
        {"turn": 3, "route": "local", "count": 2},
    ]
    over_s = state["rates"]["over_s"]
    assert state["rates"]["per_s"] == {"remote": 2 / over_s, "local": 3 / over_s, "replica": 0}
    groups = state["ttft"]["groups"]
    assert [(g["turn"], g["route"], g["n"]) for g in groups] == [
        (1, "remote", 2),
        (2, "local", 1),
        (3, "local", 2),
    ]
    for group in groups:
        assert 0 < group["p50_ms"] <= group["p90_ms"]
        assert sum(point["n"] for point in group["points"]) == group["n"]
    newest = state["decisions"][0]
    assert [one["decided"]["number"] for one in state["decisions"]] == [5, 4, 3, 2, 1]
    assert newest["decided"]["decision"]["reason"] == "first_turn"
    assert newest["finished"]["outcome"] == "answered"
    assert state["decisions"][1]["decided"]["features"]["turn"] == 4


async def test_an_answer_that_does_not_stream_has_no_ttft(cluster: Cluster) -> None:
    """Its first token came at an unknown time, and its whole time is none to the first token."""
    kind = {"reason": "first_turn", "route": "remote", "turn": "1"}
    async with cluster(*workers()) as client:
        for number, stream in enumerate((False, True, False)):
            assert (await client.chat(f"{number} " * 40, stream=stream)).status == 200
        state = await state_of(client)
        assert await client.metric("ppd_ttft_seconds_count", **kind) == 1
        assert await client.metric("ppd_e2e_seconds_count", **kind) == 3
    assert [(g["turn"], g["n"]) for g in state["ttft"]["groups"]] == [(1, 1)]
    finished = [one["finished"] for one in state["decisions"]]
    assert [one["completion_tokens"] for one in finished] == [3, 3, 3]
    assert [one["ttft_ms"] is None for one in finished] == [True, False, True]


async def test_a_decision_holds_the_tables_scores_and_nothing_of_the_request(
    cluster: Cluster, table: Path
) -> None:
    async with cluster(*workers(), policy="ppd", table=str(table)) as client:
        await client.chat("a secret")
        await client.chat("a secret", *LATER[1:])
        async with client.http.get(f"{client.url}/dashboard/state") as response:
            assert "secret" not in await response.text()
        state = await state_of(client)
    assert state["table"] == f"{table.name} (a machine)"
    assessment = state["decisions"][0]["decided"]["decision"]["assessment"]
    assert assessment["local"]["ttft_ms"] < assessment["remote"]["ttft_ms"]
    assert assessment["score"]["prefers_local"] is True


async def test_a_refused_turn_counts_as_what_it_became(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())

    async def scripted(request: Request) -> None:
        refuses = "custom_params" in request.body
        script = failing(503, REFUSAL.to_message()) if refuses else answering()
        await script(request)

    d.script = scripted
    async with cluster(p, d) as client:
        await client.chat("hello")
        await client.chat(*LATER)
        state = await state_of(client)
    assert {"reason": "refused_by_worker", "route": "remote", "count": 1} in state["window"][
        "reasons"
    ]
    assert state["decisions"][0]["decided"]["decision"]["route"] == "local"
    assert state["decisions"][0]["finished"]["route"] == "remote"


async def test_work_under_way_is_seen(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", hanging), FakeWorker("decode", hanging)
    async with cluster(p, d) as client:
        asked = asyncio.create_task(client.chat("hello " * 100))
        await p.arrived.wait()
        await d.arrived.wait()
        state = await state_of(client)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    by_role = {worker["role"]: worker for worker in state["workers"]}
    assert by_role["prefill"]["in_flight"] == by_role["decode"]["in_flight"] == 1
    assert by_role["prefill"]["backlog_tokens"] > 0
    assert state["window"]["under_way"] == 1
    assert state["decisions"][0]["finished"] is None


async def test_workers_as_they_are_and_as_they_announce_themselves(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    other = FakeWorker("decode", answering(), local_prefill=False, free_tokens=7000)
    async with cluster(p, other, accept_workers=True) as client, d.serving():
        load = {"running": 3, "kv_used_tokens": 600, "kv_total_tokens": 1000}
        said = {"url": d.url, "role": "decode", "boot_id": d.boot_id, "load": load}
        assert (await client.post("/workers", said)).status == 200
        async with client.http.post(
            f"{client.url}/workers/{other.url.removeprefix('http://')}/drain"
        ) as response:
            assert response.status == 200
        await other.load_is_known()
        _, of_other, of_d = (await state_of(client))["workers"]
    assert (of_other["alive"], of_other["draining"], of_other["ready"]) == (True, True, False)
    assert (of_other["local_prefill"], of_other["free_tokens"]) == (False, 7000)
    assert of_other["announced"] is of_other["announced_ago_s"] is None
    assert (of_d["ready"], of_d["breaker_open"], of_d["local_prefill"]) == (True, False, True)
    assert of_d["announced"]["kv_used_tokens"] == 600
    assert of_d["announced_ago_s"] >= 0


async def test_a_worker_that_fails_its_requests_is_no_more_ready(cluster: Cluster) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", failing(500, "no"))
    async with cluster(p, d, breaker_failures=1) as client:
        assert (await client.chat("hello")).status == 500
        state = await state_of(client)
    of_d = state["workers"][1]
    assert (of_d["alive"], of_d["breaker_open"], of_d["ready"]) == (True, True, False)
    assert state["window"]["outcomes"] == {"worker_error": 1}


async def test_it_is_for_operators_where_there_is_an_admin_token(cluster: Cluster) -> None:
    async with cluster(*workers(), admin_token="s3cret") as client:
        for headers in ({}, {"Authorization": "Bearer s3cre"}):
            async with client.http.get(
                f"{client.url}/dashboard/state", headers=headers
            ) as response:
                assert response.status == 401
        await state_of(client, {"Authorization": "Bearer s3cret"})
        async with client.http.get(f"{client.url}/dashboard") as response:
            assert response.status == 200  # asks for the token


async def test_memory_and_windows_are_bounded(cluster: Cluster) -> None:
    """With more requests than are kept, the document says how short a time it covers."""
    async with cluster(*workers()) as client:
        for number in range(1010):
            await client.chat(f"{number}")
        state = await state_of(client)
    assert state["window"]["requests"] <= 1000
    assert state["window"]["covers_s"] < state["up_s"]
    assert state["ttft"]["step_s"] * state["ttft"]["points"] >= state["window"]["covers_s"]
    assert len(state["decisions"]) == 40
    assert state["rates"]["over_s"] <= state["window"]["covers_s"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", "text/html"),
        ("/page.css", "text/css"),
        ("/main.js", "text/javascript"),
        ("/icon.svg", "image/svg+xml"),
    ],
)
async def test_the_page_needs_nothing_from_elsewhere(
    cluster: Cluster, path: str, kind: str
) -> None:
    async with (
        cluster(*workers()) as client,
        client.http.get(f"{client.url}/dashboard{path}") as response,
    ):
        assert response.status == 200
        assert response.content_type == kind
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        sources = {word for part in policy.split(";") for word in part.split()[1:]}
        assert sources == {"'none'", "'self'"}
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/nothing.js", "/page.html/", "/..%2Fdashboard.py", "/a/b"])
async def test_no_other_file_is_served(cluster: Cluster, path: str) -> None:
    async with (
        cluster(*workers()) as client,
        client.http.get(f"{client.url}/dashboard{path}") as response,
    ):
        assert response.status == 404


async def test_all_parts_of_the_page_are_there(cluster: Cluster) -> None:
    """Whatever its files name is served: nothing is left out, or asked of another host."""
    named = re.compile(r'(?:href|src)="dashboard/([^"]+)"|from "\./([^"]+)"')
    async with cluster(*workers()) as client:
        wanted, seen = {"page.html"}, set[str]()
        while missing := wanted - seen:
            name = missing.pop()
            seen.add(name)
            async with client.http.get(f"{client.url}/dashboard/{name}") as response:
                assert response.status == 200, name
                text = await response.text()
            wanted |= {one or other for one, other in named.findall(text)}
            assert "innerHTML" not in text
            assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert seen == {path.name for path in PAGE.iterdir()}


def test_the_page_has_words_for_every_reason_and_route() -> None:
    known = set(re.findall(r"^  (\w+): ", (PAGE / "words.js").read_text(), re.MULTILINE))
    assert known == set(Route)
    descriptions = [reason.description for reason in Reason]
    assert all(descriptions)
    assert len(set(descriptions)) == len(descriptions)


async def test_replicas_are_a_route_of_their_own(cluster: Cluster) -> None:
    async with cluster(FakeWorker("null", answering()), policy="replica") as client:
        await client.chat("hello")
        state = await state_of(client)
    assert state["roles"] == ["replica"]
    assert state["rates"]["per_s"]["replica"] > 0
