"""Lines are written together, none is lost, and an error is reported once."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from pathlib import Path

import msgspec
import orjson
import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.errors import ConfigError
from ppd.journal import Opened, Reset, read
from router.config.options import LogFormat, RouterConfig
from router.observability.batch import MAX_BYTES, LineBatch
from router.observability.journal import Journal, opened_by
from router.observability.logs import BatchHandler, formatter_of, log_fields
from router.observability.tracing import Tracing

from ..conftest import Cluster
from ..scripts import answering


async def test_lines_of_some_milliseconds_are_one_write() -> None:
    written: list[bytes] = []
    done = asyncio.Event()

    def write(data: bytes) -> None:
        written.append(data)
        done.set()

    batch = LineBatch(write)
    for line in (b"a\n", b"b\n", b"c\n"):
        batch.add(line)
    assert written == []
    await done.wait()
    assert written == [b"a\nb\nc\n"]
    batch.flush()
    assert len(written) == 1, "there is nothing left"


async def test_a_batch_is_bounded() -> None:
    written: list[bytes] = []
    batch = LineBatch(written.append)
    for _ in range(10):
        batch.add(b"x" * (MAX_BYTES // 4))
    assert [len(one) for one in written] == [MAX_BYTES, MAX_BYTES]


def test_without_a_loop_each_line_is_written_at_once() -> None:
    written: list[bytes] = []
    batch = LineBatch(written.append)
    batch.add(b"a\n")
    assert written == [b"a\n"]

    async def end_before_it_is_due() -> None:
        batch.add(b"b\n")

    asyncio.run(end_before_it_is_due())
    batch.add(b"c\n")
    assert b"".join(written) == b"a\nb\nc\n"


async def test_a_warning_is_written_at_once_and_after_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logger = logging.Logger("one")
    with path.open("w") as stream:
        handler = BatchHandler(stream)
        handler.setFormatter(formatter_of(LogFormat.JSON))
        logger.addHandler(handler)
        log_fields(logger, "turn", {"turn": 1})
        assert path.read_bytes() == b""
        thread = threading.Thread(target=logger.info, args=("of another thread",))
        thread.start()
        thread.join()
        logger.warning("look")
        entries = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        logger.info("last")
        handler.flush()
    assert [one["message"] for one in entries] == ["turn", "of another thread", "look"]
    assert (entries[0]["turn"], entries[0]["level"], entries[0]["logger"]) == (1, "info", "one")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entries[0]["time"])
    assert path.read_bytes().endswith(b'"message":"last"}\n')


def test_a_line_of_text_is_that_of_the_standard_formatter() -> None:
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    for created in (1e9, 1e9 + 0.5, 1e9 + 1.25):
        record = logging.makeLogRecord({"name": "a", "msg": "b", "levelname": "INFO"})
        record.created, record.msecs = created, created % 1 * 1000
        assert formatter_of(LogFormat.TEXT).format(record) == logging.Formatter(form).format(record)


async def test_a_closed_stderr_ends_no_request() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    logger = logging.Logger("one")
    with os.fdopen(writing, "w") as stream:
        handler = BatchHandler(stream)
        logger.addHandler(handler)
        logger.warning("nobody reads")
        logger.warning("nor this")
        handler.flush()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
async def test_the_end_of_the_decision_log_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = Journal("/dev/full", opened_by(RouterConfig(), {}))
    for at_s in range(3):
        journal.reset(Reset(float(at_s)))
    journal.close()
    assert caplog.text.count("the decision log ends here") == 1


async def test_nothing_of_the_decision_log_is_lost_at_the_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    engines = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with cluster(*engines, decision_log=str(log)) as client:
        for i in range(20):
            await client.chat(f"question {i}")
    events = list(read(log.read_bytes().splitlines(keepends=True)))
    assert isinstance(events[0], Opened)
    assert len(events) == 1 + 2 * 20


def test_a_share_of_the_requests_has_a_span() -> None:
    draws = iter([0.009, 0.01, 0.5])
    tracing = Tracing("http://127.0.0.1:1/v1/traces", 0.01, draw=lambda: next(draws))
    sampled, left_out, also_left_out = (tracing.begin("/", {}) for _ in range(3))
    assert sampled.recorded
    assert int(sampled.headers["traceparent"][-2:], 16) & 1
    for trace in (left_out, also_left_out):
        assert not trace.recorded
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", trace.headers["traceparent"])
    assert left_out.headers != also_left_out.headers
    parent = f"00-{'a' * 32}-{'b' * 16}"
    followed = tracing.begin("/", {"traceparent": f"{parent}-01"})
    assert followed.recorded
    ignored = tracing.begin("/", {"traceparent": f"{parent}-00"})
    assert not ignored.recorded
    assert ignored.headers["traceparent"].split("-")[1] == "a" * 32
    assert not int(ignored.headers["traceparent"][-2:], 16) & 1


def test_a_share_is_above_0() -> None:
    with pytest.raises(ConfigError, match="trace_share must be above 0"):
        msgspec.structs.replace(RouterConfig(), trace_share=0.0).check()
