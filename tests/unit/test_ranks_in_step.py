"""DP attention: all ranks run their steps together, whatever each of them has to do.

A model of the ranks' schedulers and of their synchronization runs the plugin's own scheduling. A
real rank that synchronizes twice in an iteration, or not at all, makes all of them hang.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .scheduler import FULL, PACED, Batch, Mode, Rank, Request, patch_engine

_RANKS = 3


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_engine(monkeypatch)


def iterate(ranks: list[Rank]) -> list[Batch | None]:
    """Run one iteration of all ranks, and check that each has synchronized once.

    Returns:
        What each rank ran.
    """
    batches = [rank.schedule() for rank in ranks]
    for rank, batch in zip(ranks, batches, strict=True):
        assert rank.offered == [batch], f"rank {rank.number} has synchronized {rank.offered}"
    tokens = [batch.tokens if batch else 0 for batch in batches]
    extends = any(batch is not None and batch.forward_mode.is_extend() for batch in batches)
    ran: list[Batch | None] = []
    for rank, batch in zip(ranks, batches, strict=True):
        if batch is None and any(tokens):
            batch = Batch([], Mode("idle"))
        if batch is not None:
            first, others = tokens[rank.number], sum(tokens) - tokens[rank.number]
            batch.global_num_tokens = [first, others]
            batch.is_extend_in_batch = extends
        rank.ppd.step.scheduled(batch, rank.running)
        rank.last_batch = batch
        ran.append(batch)
        if batch is not None:
            prefilled = batch.reqs[:1] if batch.forward_mode.is_extend() else []
            for req in batch.reqs[len(prefilled) :]:
                req.steps -= 1
    return ran


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_rank_synchronizes_once_in_each_iteration(source: random.Random, mixed: bool) -> None:
    ranks = [Rank(number, mixed) for number in range(_RANKS)]
    requests: list[Request] = []
    decoded = [False] * _RANKS  # in the iteration before
    for iteration in range(5000):
        arrivals = iteration < 100
        if not arrivals and all(r.finished() for r in requests):
            break
        for rank in ranks:
            if arrivals and source.random() < 0.08:
                req = Request(source.randint(1, 1500), source.randint(1, 30))
                requests.append(req)
                rank.queue.requests.append(req)
        ran = iterate(ranks)
        for rank, batch in zip(ranks, ran, strict=True):
            if batch is None or not batch.forward_mode.is_extend():
                continue
            others = [i for i in range(_RANKS) if i != rank.number]
            beside = any(decoded[i] for i in others)
            chunk = batch.reqs[0].extend_end - batch.reqs[0].prefix_len
            assert chunk <= (PACED if beside else FULL)
        decoded = [b is not None and any(b.reqs) and not b.forward_mode.is_extend() for b in ran]
    assert all(r.finished() for r in requests), "no request waits for ever"
