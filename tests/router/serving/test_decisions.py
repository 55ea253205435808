"""Decisions in a running router: tables, objectives, explanations, replicas."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.errors import TableError
from ppd.score import Targets, Weights
from ppd.table_policy import Correction
from router.config.limits import Tenant

from ..conftest import Cluster
from ..fixtures import CHAT, LATER, always_remote, chat, local_unless_long, workers, write_table
from ..scripts import answering


async def test_the_table_decides_by_default(cluster: Cluster, table: Path) -> None:
    async with cluster(*workers(), policy="ppd", table=str(table)) as client:
        await client.chat("hello")
        assert (await client.chat(*LATER)).route == ("local", "table")
        assert (await client.chat("hello", "www", "x" * 3000)).route == ("remote", "table")
        counted = {"endpoint": CHAT, "route": "local", "reason": "table"}
        assert await client.metric("ppd_turns_total", **counted) == 1


async def test_a_restart_with_another_table_changes_routes(
    cluster: Cluster, tmp_path: Path
) -> None:
    for costs, route in ((local_unless_long, "local"), (always_remote, "remote")):
        path = write_table(tmp_path / "table.json", costs)
        async with cluster(*workers(), policy="ppd", table=str(path)) as client:
            await client.chat("hello")
            assert (await client.chat(*LATER)).route == (route, "table")


async def test_a_table_of_another_model_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.json", local_unless_long, model="llama")
    with pytest.raises(TableError, match=r"table\.json: .*with llama, the workers serve fake"):
        async with cluster(*workers(), policy="ppd", table=str(path)):
            pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": Weights(1, 1, 0.5)}, "weights.throughput"),
        ({"tenants": {"t": Tenant(Weights(1, 1, 0.5))}}, "tenants.t.weights.throughput"),
    ],
)
async def test_throughput_that_no_table_has_is_not_weighed(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    path = write_table(tmp_path / "table.json", local_unless_long)
    with pytest.raises(TableError, match=rf"table\.json, of {named}: it has no throughput"):
        async with cluster(*workers(), policy="ppd", table=str(path), **options):
            pass


async def test_throughput_is_weighed(cluster: Cluster, tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.json", local_unless_long, rates=(400.0, 300.0))
    options: dict[str, Any] = {"table": str(path), "corrections": frozenset()}
    async with cluster(*workers(), policy="ppd", **options) as client:
        await client.chat("hello")
        for weight, route in (("0", "local"), ("9", "remote")):
            headers = {"X-PPD-W-THROUGHPUT": weight}
            assert (await client.post(CHAT, chat(*LATER), headers)).route == (route, "table")


async def test_a_table_that_is_none_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for text, named in (("{}", "no decision table"), (None, "No such file")):
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        with pytest.raises(TableError, match=rf"table\.json: .*{named}"):
            async with cluster(*workers(), policy="ppd", table=str(path)):
                pass


async def test_without_a_table_a_threshold_decides_and_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(*workers(), policy="ppd") as client:
        await client.chat("hello")
        assert (await client.chat(*LATER)).route == ("local", "unknown_cell")
    assert "no decision table for fake" in caplog.text


async def test_a_cluster_of_another_shape_is_reported(
    cluster: Cluster, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = workers()
    async with cluster(p, d, FakeWorker("decode", answering()), policy="ppd", table=str(table)):
        pass
    assert "measured on 1P1D, this cluster is 1P2D" in caplog.text


async def test_a_table_for_show_is_marked(
    cluster: Cluster, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noted = write_table(table, local_unless_long, sweep={"note": "short points"})
    async with cluster(*workers(), policy="ppd", table=str(noted)):
        pass
    assert f"note in {noted}: short points" in caplog.text


@pytest.mark.parametrize(
    ("headers", "route"),
    [
        ({}, "local"),
        ({"X-PPD-W-TPOT": "6"}, "remote"),
        ({"X-PPD-W-TTFT": "0"}, "remote"),
        ({"X-PPD-W-TTFT": "10", "X-PPD-W-TPOT": "6"}, "local"),
        ({"X-SLO-TTFT-MS": "60"}, "local"),
        ({"X-SLO-TPOT-MS": "9"}, "remote"),
    ],
)
async def test_a_request_brings_its_own_wishes(
    cluster: Cluster, table: Path, headers: dict[str, str], route: str
) -> None:
    options: dict[str, Any] = {"policy": "ppd", "table": str(table), "corrections": frozenset()}
    async with cluster(*workers(), **options) as client:
        await client.chat("hello")
        reply = await client.post(CHAT, chat(*LATER), headers)
        assert reply.route == (route, "table")


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"X-PPD-W-TTFT": "much"}, "X-PPD-W-TTFT must be a number, got 'much'"),
        ({"X-PPD-W-TTFT": "-1"}, "weights must be numbers from 0 to 1e+06"),
        ({"X-PPD-W-TTFT": "nan"}, "weights must be numbers from 0 to 1e+06"),
        ({"X-PPD-W-TPOT": "1.7e308"}, "weights must be numbers from 0 to 1e+06"),
        ({"X-SLO-TTFT-MS": "0"}, "targets must be numbers from 0.001 to 1e+09 ms"),
        ({"X-SLO-TTFT-MS": "5e-324"}, "targets must be numbers from 0.001 to 1e+09 ms"),
        ({"X-SLO-TTFT-MS": "nan"}, "targets must be numbers from 0.001 to 1e+09 ms"),
        ({"X-SLO-TTFT-MS": "5", "X-PPD-W-TPOT": "1"}, "weights or targets, not both"),
    ],
)
async def test_wishes_that_make_no_sense_are_refused(
    cluster: Cluster, headers: dict[str, str], named: str
) -> None:
    async with cluster(*workers()) as client:
        reply = await client.post(CHAT, chat("hello"), headers)
        assert reply.status == 400
        assert named in reply.json["error"]["message"]


async def test_tenants_have_wishes_too(cluster: Cluster, table: Path) -> None:
    key = {"Authorization": "Bearer one"}
    async with cluster(*workers()) as client:
        name = (await client.post("/explain" + CHAT, chat("hello"), key)).json["tenant"]
    tenants = {name: Tenant(Weights(1, 9)), "anonymous": Tenant(Weights())}
    everyone: dict[str, Any] = {
        "policy": "ppd", "table": str(table), "tenants": tenants, "corrections": frozenset(),
        "targets": Targets(tpot_ms=9),
    }  # fmt: skip
    async with cluster(*workers(), **everyone) as client:
        for headers, route in (
            (key, "remote"),
            ({}, "local"),
            ({"Authorization": "Bearer two"}, "remote"),
        ):
            await client.post(CHAT, chat("hello"), headers)
            assert (await client.post(CHAT, chat(*LATER), headers)).route == (route, "table")


async def test_a_decision_is_explained_before_and_after(cluster: Cluster, table: Path) -> None:
    p, d = workers()
    async with cluster(p, d, policy="ppd", table=str(table)) as client:
        await client.chat("hello", stream=True)
        sent = len(d.bodies)
        asked = (await client.post("/explain" + CHAT, chat(*LATER, max_tokens=9))).json
        assert len(d.bodies) == sent, "an explanation sends nothing"
        assert (asked["tenant"], asked["decision"]["route"]) == ("anonymous", "local")
        assert asked["features"]["context_tokens"] == 102
        assert asked["features"]["output_tokens"] == 3
        seen = asked["decision"]["assessment"]
        assert seen["cell"].startswith("context=[0,2048) new=[0,256)")
        saved = 1 - seen["local"]["ttft_ms"] / seen["remote"]["ttft_ms"]
        assert seen["score"]["ttft_saved"] == pytest.approx(saved)
        assert saved > 0

        await client.chat(*LATER, stream=True)
        async with client.http.get(f"{client.url}/explain?limit=1") as answer:
            (newest,) = (await answer.json())["decisions"]
        decision = newest["decided"]["decision"]
        assert (decision["route"], decision["reason"]) == ("local", "table")
        assert decision["assessment"]["score"] == seen["score"]
        assert newest["finished"]["route"] == "local"
        assert newest["finished"]["cached_tokens"] == 96
        session = newest["decided"]["features"]["session"]
        async with client.http.get(f"{client.url}/explain?session={session}") as answer:
            assert len((await answer.json())["decisions"]) == 1
        async with client.http.get(f"{client.url}/explain?limit=many") as answer:
            assert answer.status == 400
        async with client.http.get(f"{client.url}/table") as answer:
            shown = await answer.json()
        assert (shown["model"], shown["shape"]) == ("fake", "1P1D")
        assert shown["provenance"]["hardware"] == "a machine"


async def test_observations_are_shown_and_reset(cluster: Cluster, table: Path) -> None:
    corrections = frozenset({Correction.SHRINKAGE})
    options: dict[str, Any] = {"policy": "ppd", "table": str(table), "corrections": corrections}
    async with cluster(*workers(), **options) as client:
        await client.chat("hello", stream=True)
        await client.chat(*LATER, stream=True)
        async with client.http.get(f"{client.url}/table") as answer:
            (factor,) = (await answer.json())["observed"]
        assert (factor["route"], factor["turns"]) == ("local", 1)
        assert factor["ttft"] < 1, "a fake engine is faster than 50 ms"
        labels = {"cell": factor["cell"], "route": "local", "value": "ttft"}
        assert 0 < await client.metric("ppd_observed_factor", **labels) < 1
        assert (await client.post("/table/reset", b"")).json == {"forgotten": 1}
        assert (await client.post("/table/reset", b"")).json == {"forgotten": 0}


async def test_replicas_keep_their_conversations(cluster: Cluster) -> None:
    one = FakeWorker("null", answering(prompt=100), local_prefill=False)
    two = FakeWorker("null", answering(prompt=100), local_prefill=False)
    async with cluster(one, two, policy="replica") as client:
        for i in range(6):
            assert (await client.chat(f"hello {i}")).route == ("replica", "first_turn")
        before = [len(one.bodies), len(two.bodies)]
        home = one if any("hello 3" in str(b["messages"]) for b in one.bodies) else two
        for _ in range(3):
            later = await client.chat("hello 3", "www", "and")
            assert later.route == ("replica", "policy_replica")
        assert sum(before) == 6
        assert len(home.bodies) == before[home is two] + 3
        body = home.bodies[-1]
        assert not {"bootstrap_room", "custom_params"} & body.keys()


async def test_a_lost_replica_costs_one_retry(cluster: Cluster) -> None:
    engines = [FakeWorker("null", answering(prompt=100), local_prefill=False) for _ in range(2)]
    async with AsyncExitStack() as stack:
        for worker in engines:
            await stack.enter_async_context(worker.serving())
        async with cluster(*engines, policy="replica") as client:
            await client.chat("hello")
            (home,) = (e for e in engines if e.bodies)
            (other,) = (e for e in engines if not e.bodies)
            await home.close()
            later = await client.chat(*LATER)
            assert (later.status, later.route[0]) == (200, "replica")
            assert len(other.bodies) == 1
