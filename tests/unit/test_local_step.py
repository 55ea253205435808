"""A scheduler's steps: local prefill beside decodes, finished transfers and retractions."""

from __future__ import annotations

import pytest

from .scheduler import PACED, Batch, Mode, Rank, Request, patch_engine


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_engine(monkeypatch)


def run(rank: Rank) -> Batch | None:
    """Run one step, after which each decode has one token more."""
    batch = rank.schedule()
    rank.ppd.step.scheduled(batch, rank.running)
    rank.last_batch = batch
    if batch is not None:
        prefilled = batch.forward_mode.is_extend()
        for req in batch.reqs[prefilled:]:
            req.steps -= 1
    return batch


def busy_rank(*, mixed: bool) -> Rank:
    """A scheduler with a running decode, and a long local prefill whose first chunk has run."""
    rank = Rank(0, mixed)
    rank.require_mlp_sync = False
    rank.running = Batch([Request(1, 1000)], Mode("decode"))
    rank.queue.requests.append(Request(100 * PACED, 1))
    for _ in range(2):
        run(rank)
    assert rank.chunked_req is not None
    return rank


@pytest.mark.parametrize("mixed", [True, False])
def test_finished_transfers_decode_beside_a_long_local_prefill(mixed: bool) -> None:
    rank = busy_rank(mixed=mixed)
    transferred = Request(1, 1000)
    rank.waiting_queue.append(transferred)
    for _ in range(20):
        run(rank)
    assert transferred.steps <= 990, "it decodes in every step, or in every second one"
    assert rank.chunked_req is not None


def test_no_local_request_joins_a_chunk_while_retracted_ones_wait_for_memory() -> None:
    rank = busy_rank(mixed=True)
    rank.disagg_decode_prealloc_queue.retracted_queue.append(Request(1, 5))
    late = Request(1, 1)
    rank.queue.requests.append(late)
    offered: list[int] = []
    prefill = rank.get_new_batch_prefill

    def record(running: Batch) -> object:
        offered.append(len(rank.waiting_queue))
        return prefill(running)

    rank.get_new_batch_prefill = record  # type: ignore[method-assign]
    for _ in range(300):
        run(rank)
    assert rank.chunked_req is None
    assert set(offered) == {0}
    assert rank.queue.requests == [late]


@pytest.mark.parametrize("mixed", [True, False])
def test_the_last_row_is_that_of_a_finished_transfer(mixed: bool) -> None:
    rank = Rank(0, mixed)
    rank.require_mlp_sync = False
    rank.max_running_requests = 2
    rank.running = Batch([Request(1, 1000)], Mode("decode"))
    transferred, local = Request(1, 3), Request(5 * PACED, 1)
    rank.waiting_queue.append(transferred)
    rank.queue.requests.append(local)
    run(rank)
    assert transferred in rank.running.reqs
    assert rank.queue.requests == [local]
    for _ in range(3):
        run(rank)
    assert transferred.finished()
    run(rank)
    assert rank.chunked_req is local


def test_transfers_and_local_requests_take_turns_at_the_last_row() -> None:
    """However many of the one kind wait, the others are not left out."""
    rank = Rank(0, mixed=False)
    rank.require_mlp_sync = False
    rank.max_running_requests = 2
    rank.running = Batch([Request(1, 1000)], Mode("decode"))
    transfers = [Request(1, 2) for _ in range(6)]
    local = [Request(PACED, 2) for _ in range(6)]
    waiting = list(transfers)
    rank.queue.requests += local
    for _ in range(60):
        rank.waiting_queue += waiting[:1] if not rank.waiting_queue else []
        waiting = [one for one in waiting if one not in rank.waiting_queue]
        run(rank)
        done = [sum(one.finished() for one in kind) for kind in (transfers, local)]
        assert abs(done[0] - done[1]) <= 2
        if done == [6, 6]:
            break
    else:
        pytest.fail(f"finished: {done}")


def test_the_request_in_mid_prefill_gives_way_to_a_transfer_that_ended() -> None:
    rank = busy_rank(mixed=False)
    rank.token_to_kv_pool_allocator.available_size = lambda: 1
    assert rank.ppd.step._decodes_fit(rank.running)
    transferred = Request(1, 5, output_ids=(7,))
    rank.waiting_queue.append(transferred)
    assert not rank.ppd.step._decodes_fit(rank.running)
    rank.token_to_kv_pool_allocator.available_size = lambda: 2
    assert rank.ppd.step._decodes_fit(rank.running)
    rank.page_size = 16  # its first token is in the page of its prompt's end
    rank.token_to_kv_pool_allocator.available_size = lambda: 1
    assert rank.ppd.step._decodes_fit(rank.running)
    rank.waiting_queue.append(Request(16, 5, output_ids=(7,)))  # this one needs a page
    assert not rank.ppd.step._decodes_fit(rank.running)
    rank.page_size, rank.max_running_requests = 1, 2  # neither can join
    assert rank.ppd.step._decodes_fit(rank.running)
