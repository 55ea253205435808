"""Shipped tables that hold for the workers of the moment."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.machine import Machine
from router.config import table_files
from tests.unit.fixtures import table_record

from ..conftest import Client, Cluster
from ..fixtures import CHAT, LATER, always_remote, chat
from ..scripts import answering
from .test_operations import ident, operate


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shipped table of one prefill and one decode worker with the GPU H100."""
    monkeypatch.setattr(table_files, "SHIPPED", tmp_path)
    path = tmp_path / "fake-h100-1P1D.json"
    record = msgspec.structs.replace(
        table_record(always_remote), shape="1P1D", machine=Machine("H100", 2, 100.0)
    )
    path.write_bytes(msgspec.json.encode(record))
    return path


def worker(role: str, gpu: str = "NVIDIA H100 80GB HBM3") -> FakeWorker:
    return FakeWorker(role, answering(), tp_size=2, gpu=gpu, link_gbps=100.0)


async def chosen(client: Client) -> tuple[str | None, str]:
    """The table that ``/table`` and ``/explain`` name."""
    explained = (await client.post("/explain" + CHAT, chat("hello"))).json
    async with client.http.get(f"{client.url}/table") as answer:
        return (await answer.json())["path"], explained.get("table", "")


async def test_a_table_is_in_use_while_it_holds_for_the_workers(
    cluster: Cluster, table: Path
) -> None:
    p, d, late = worker("prefill"), worker("decode"), worker("decode")
    it = (str(table), "fake-h100-1P1D.json (a machine)")
    async with cluster(p, d, policy="ppd") as client, late.serving():
        assert await chosen(client) == it
        await operate(client, "PUT", "", {"url": late.url, "role": "decode"})
        assert await chosen(client) == (None, ""), "it is of one decode worker"
        assert (await client.chat(*LATER)).status == 200
        await operate(client, "DELETE", f"/{ident(late)}")
        assert await chosen(client) == it


async def test_no_shipped_table_is_chosen_if_told_so(cluster: Cluster) -> None:
    p, d = worker("prefill"), worker("decode")
    async with cluster(p, d, policy="ppd", shipped_tables=False) as client:
        assert await chosen(client) == (None, "")


@pytest.mark.parametrize("gpu", ["", "NVIDIA H20"])
async def test_a_table_is_not_for_other_gpus(cluster: Cluster, gpu: str) -> None:
    async with cluster(worker("prefill", gpu), worker("decode", gpu), policy="ppd") as client:
        assert await chosen(client) == (None, "")
