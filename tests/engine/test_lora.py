"""Turns with LoRA adapters: more adapters than slots, on both routes at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from eval import tiny_model
from eval.tiny_model import ModelSpec
from ppd.contract import Role

from .routes import RouteClient
from .workers import Workers, wait_ready, worker_launcher

_ADAPTERS = ("red", "green", "blue")
_SLOTS = 2  # of a batch; turns without an adapter take one, too
_RANK = 4


def write_adapter(folder: Path, spec: ModelSpec, seed: int) -> None:
    """Write a random adapter of the query and value projections, in the format of PEFT."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    head_dim = spec.hidden // spec.heads
    rows = {"q_proj": spec.heads * head_dim, "v_proj": spec.kv_heads * head_dim}
    tensors = {}
    for layer in range(spec.layers):
        for name, out in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(_RANK, spec.hidden, generator=generator) / spec.hidden**0.5
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, _RANK, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*rows],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Prefill, decode and a monolithic server with three adapters and two slots."""
    folder, spec = tmp_path_factory.mktemp("lora"), ModelSpec()
    model = tiny_model.ensure(spec)
    for seed, name in enumerate(_ADAPTERS):
        write_adapter(folder / name, spec, seed)
    flags = (
        *("--enable-lora", "--max-loras-per-batch", str(_SLOTS), "--lora-backend", "torch_native"),
        *("--lora-paths", *(f"{name}={folder / name}" for name in _ADAPTERS)),
    )
    with worker_launcher(folder) as launcher:
        prefill = launcher.worker(Role.PREFILL, model, *flags)
        decode = launcher.worker(Role.DECODE, model, *flags)
        monolithic = launcher.worker(Role.REPLICA, model, *flags)
        wait_ready(*launcher.started)
        yield Workers(prefill, decode, monolithic, 1, model)


async def test_turns_with_adapters_take_both_routes(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """Six conversations at once with three adapters or none, and two slots."""
    await workers.settle(http)
    routes = (
        ("remote", "local", "local", "remote", "local"),
        ("remote", "remote", "local", "local", "remote"),
    )
    clients = [
        RouteClient(http, workers, {} if name is None else {"lora_path": name})
        for name in (*_ADAPTERS, None, *_ADAPTERS[:2])
    ]
    got = await asyncio.gather(
        *(client.converse(i, routes[i % 2]) for i, client in enumerate(clients))
    )
    for i, (client, replies) in enumerate(zip(clients, got, strict=True)):
        alone = await client.converse(i, ("alone",) * 5)
        assert [r.ids for r in replies] == [r.ids for r in alone], f"conversation {i}"
    same_prompt = [(await client.converse(1, ("alone",)))[0].ids for client in clients[:4]]
    assert len({tuple(ids) for ids in same_prompt}) == 4, "adapters must change the reply"
    await workers.settle(http)
