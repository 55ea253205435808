"""The pool's options: a file, flags and their checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ppd.ann.engine import StepShape
from ppd.ann.schedule import Bounds, Controls
from ppd.errors import ConfigError
from router.pool.config import Device, PoolConfig, read_config


def test_flags_replace_values_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'data = "{tmp_path}"\nport = 70000\nthreads = 2\n[step]\nslots = 4\n')
    config = read_config(str(file), {"threads": 3, "port": 0})
    config.check()
    assert (config.threads, config.port, config.step_shape.slots) == (3, 0, 4)
    assert (config.cores, config.engines) == (3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70000}, "port must be 0..65535, got 70000"),
        ({"threads": -1}, "threads must be 0 or more, got -1"),
        ({"rebuild_share": float("nan")}, "rebuild_share must be 0 or more, got nan"),
        ({"shard_slack_s": 0.0}, "shard_slack_s must be above 0, got 0.0"),
        ({"default_itopk": 0}, "default_itopk must be 1..1024, got 0"),
        ({"step": StepShape(each=0)}, "step.each must be above 0, got 0"),
        ({"bounds": Bounds(decode=0)}, "bounds.decode must be above 0, got 0"),
        ({"controls": Controls(reserved=2)}, "controls.reserved must be 0..0.9, got 2"),
        ({"data": ""}, "either a data folder or shards are needed"),
        ({"data": "nowhere"}, "data: nowhere is no folder"),
        ({"data": "", "shards": ((),)}, "every shard needs a URL"),
        (
            {"embeddings_url": "http://e", "sentence_model": "m"},
            "one of embeddings_url and sentence_model embeds, not both",
        ),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = PoolConfig(**{"data": str(tmp_path), **changes})
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        config.check()


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("prot = 1\nport = 'a'\ndevice = 'tpu'\n")
    with pytest.raises(ConfigError) as caught:
        read_config(str(file), {})
    assert str(caught.value) == (
        f"{file}: device: Invalid enum value 'tpu'; port: Expected `int`, got `str`; "
        "there is no option prot"
    )


def test_a_gpu_has_one_engine_and_larger_steps(tmp_path: Path) -> None:
    cpu, gpu = (PoolConfig(data=str(tmp_path), threads=8, device=device) for device in Device)
    assert (cpu.engines, gpu.engines) == (8, 1)
    assert gpu.step_shape.slots > cpu.step_shape.slots
