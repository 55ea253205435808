"""``POST /decide``: routes of turns that are given as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.decision import decide
from ppd.decision_service import features_of, parse
from ppd.errors import RequestError
from ppd.score import Targets, Weights
from ppd.table import Table
from ppd.table_policy import TablePolicy

from ..conftest import Client, Cluster
from ..scripts import answering

SHIPPED = Path(__file__).parents[3] / "tables/cpu-tiny-llama-1P1D.json"
TURN = {"context_tokens": 3000, "new_tokens": 40, "output_tokens": 100}


def workers() -> tuple[FakeWorker, FakeWorker]:
    model = Table.parse(SHIPPED.read_bytes()).record.model
    prefill, decode = (FakeWorker(role, answering(), model=model) for role in ("prefill", "decode"))
    return prefill, decode


async def ask(client: Client, body: Any, **headers: str) -> tuple[int, Any]:
    url = f"{client.url}/decide"
    data = body if isinstance(body, bytes) else None
    async with client.http.post(
        url, data=data, json=None if data else body, headers=headers
    ) as response:
        return response.status, await response.json()


async def test_the_policy_in_force_decides(cluster: Cluster) -> None:
    async with cluster(*workers(), policy="ppd", table=str(SHIPPED)) as client:
        routes = set()
        for home, prefill in (
            ({}, {"cached_tokens": 3000}),
            ({}, {"cached_tokens": 0, "queue_tokens": 5000}),
            ({}, {"cached_tokens": 3000, "queue_tokens": 5000, "wait_ms": 0.5}),
            ({"append_tokens": 20_000}, {"cached_tokens": 3000}),
            ({"free_tokens": 100}, {}),
            ({"state": "gone"}, {}),
        ):
            body = {"turn": TURN, "home": home, "prefill": prefill, "qps": 1.0}
            status, found = await ask(client, body)
            assert status == 200, found
            features = features_of(parse(_bytes(body)), 1.0)
            policy = TablePolicy(Table.parse(SHIPPED.read_bytes()))
            expected = decide(features, policy, Weights())
            decision = found["decision"]
            assert (decision["route"], decision["reason"]) == (expected.route, expected.reason)
            if expected.assessment is not None:
                assert decision["assessment"]["cell"] == expected.assessment.cell
                assert decision["assessment"]["score"]["local"] == pytest.approx(
                    expected.assessment.score.local
                )
            least = 2968 if expected.route == "local" else None  # 32 tokens less
            assert found["min_cached_tokens"] == least
            routes.add(expected.route)
        assert routes == {"local", "remote"}


def test_a_turn_may_have_its_number() -> None:
    numbered = features_of(parse(_bytes({"turn": TURN | {"number": 40}})), 1.0)
    usual = features_of(parse(_bytes({"turn": TURN})), 1.0)
    assert numbered is not None
    assert usual is not None
    assert (usual.turn, numbered.turn) == (2, 40)
    with pytest.raises(RequestError, match=r"Expected `int` >= 2 - at `\$\.turn\.number`"):
        parse(_bytes({"turn": TURN | {"number": 1}}))


def test_a_wait_counts_in_place_of_the_queue() -> None:
    policy = TablePolicy(Table.parse(SHIPPED.read_bytes()))
    remote_ms = []
    for prefill in ({}, {"queue_tokens": 5000, "wait_ms": 40.0}):
        features = features_of(parse(_bytes({"turn": TURN, "prefill": prefill})), 1.0)
        assessment = decide(features, policy, Weights()).assessment
        assert assessment is not None
        remote_ms.append(assessment.remote.ttft_ms)
    assert remote_ms[1] - remote_ms[0] == pytest.approx(40.0)
    with pytest.raises(RequestError, match=r"Expected `float` >= 0"):
        parse(_bytes({"turn": TURN, "prefill": {"wait_ms": -1}}))


async def test_a_first_turn_has_no_sizes(cluster: Cluster) -> None:
    async with cluster(*workers(), policy="full") as client:
        status, found = await ask(client, {"turn": None})
        assert (status, found["decision"]["reason"]) == (200, "first_turn")


async def test_a_share_of_the_conversations_is_local(cluster: Cluster) -> None:
    async with cluster(*workers(), policy="partial:0.5") as client:
        routes: dict[str, set[str]] = {}
        for name in [*"abcdefghijklmnop"] * 2:
            _, found = await ask(client, {"turn": TURN, "session": name})
            routes.setdefault(name, set()).add(found["decision"]["route"])
        assert all(len(of_one) == 1 for of_one in routes.values()), "of one name all are equal"
        assert set.union(*routes.values()) == {"local", "remote"}


async def test_objectives_come_from_body_or_headers(cluster: Cluster) -> None:
    async with cluster(*workers(), policy="ppd", table=str(SHIPPED)) as client:
        body: dict[str, Any] = {"turn": TURN, "qps": 1.0}
        _, found = await ask(client, body, **{"X-PPD-W-TPOT": "7"})
        weights = {"ttft": 1.0, "tpot": 7.0, "throughput": 0.0}
        assert found["objective"] == {"type": "weights", **weights}
        targets = {"type": "targets", "ttft_ms": 200.0, "tpot_ms": None}
        _, found = await ask(client, {**body, "objective": targets}, **{"X-PPD-W-TPOT": "7"})
        assert found["objective"] == targets
        assert Targets(ttft_ms=200.0).problem() is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "truncated"),
        (b"[]", "object"),
        ({}, "turn"),
        ({"turn": {"context_tokens": 1, "new_tokens": 1}}, "output_tokens"),
        ({"turn": {**TURN, "new_tokens": -1}}, "$.turn.new_tokens"),
        ({"turn": {**TURN, "tokens": 1}}, "tokens"),
        ({"turn": TURN, "home": {"state": "busy"}}, "$.home.state"),
        ({"turn": TURN, "home": {"page_size": 0}}, "$.home.page_size"),
        ({"turn": {**TURN, "earlier_prompt_tokens": 9000}}, "turn.earlier_prompt_tokens"),
        ({"turn": TURN, "home": {"evicted_tokens": 9000}}, "home.evicted_tokens"),
        ({"turn": TURN, "qps": -1}, "$.qps"),
        ({"turn": TURN, "objective": {"type": "weights", "ttft": -1}}, "objective"),
    ],
)
async def test_bad_input_names_the_field(cluster: Cluster, body: Any, named: str) -> None:
    async with cluster(*workers(), policy="full") as client:
        status, found = await ask(client, body)
        assert status == 400
        assert named in found["error"]["message"]


async def test_the_operators_token_is_required(cluster: Cluster) -> None:
    async with cluster(*workers(), policy="full", admin_token="s3cret") as client:
        assert (await ask(client, {"turn": None}))[0] == 401
        status, _ = await ask(client, {"turn": None}, Authorization="Bearer s3cret")
        assert status == 200


def _bytes(body: Any) -> bytes:
    import orjson

    return orjson.dumps(body)
