"""The configurations that a supervisor keeps for processes that start again."""

from __future__ import annotations

import signal

from router.config.options import RouterConfig
from router.server.supervisor import Supervisor


def config_of(policy: str) -> RouterConfig:
    return RouterConfig(prefill=("http://p:1",), decode=("http://d:1",), policy=policy)


def test_the_configuration_that_has_started_is_always_kept() -> None:
    started, read = config_of("full"), [config_of("pd")] * 9
    read += [config_of(f"partial:0.{share}") for share in range(1, 9)]
    supervisor = Supervisor(started, lambda: read.pop(0), lambda *_: None)
    for _ in range(9):
        supervisor._reload(signal.SIGHUP, None)
    assert supervisor._configs == [started, config_of("pd")], "it is the same each time"
    for _ in range(8):
        supervisor._reload(signal.SIGHUP, None)
    assert supervisor._configs[0] is started
    assert supervisor._configs[-1] == config_of("partial:0.8")
    assert len(supervisor._configs) <= 6
