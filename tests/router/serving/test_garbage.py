"""What a request leaves behind for Python's garbage collector: nothing of the router's."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from ..conftest import Cluster
from ..fake_engine import FakeEngine, answering


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What would be collected is kept in ``gc.garbage`` instead, when it is asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_no_cycles(cluster: Cluster, stream: bool) -> None:
    p, d = FakeEngine("prefill", answering()), FakeEngine("decode", answering(cached=96))
    async with cluster(p, d) as client:
        await client.chat("hello", stream=stream)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for i in range(5):
            assert (await client.chat(f"a{i}", stream=stream)).route[0] == "remote"
            assert (await client.chat(f"a{i}", "www", "b", stream=stream)).route[0] == "local"
        gc.collect()
        left = Counter(type(one) for one in gc.garbage)
        assert not [kind for kind in left if kind.__module__.startswith("router.")]
