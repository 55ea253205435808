"""A real scheduler of SGLang in this process, whose steps a reproduction runs one at a time.

The model is small and random. No HTTP server and no tokenizer process run. Requests name SGLang's
own host of fake transfers, as its warm-up requests do: such a transfer is done when it begins, and
the KV of a prompt is what the pool held before. Nothing of the scheduler is replaced.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from eval import tiny_model

_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--max-running-requests", "8"),
    *("--host", "127.0.0.1", "--log-level", "warning", "--chunked-prefill-size", "512"),
    *("--max-total-tokens", "2000"),
)
_DECODE = (
    *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"),
    "--disaggregation-decode-enable-radix-cache",
)


def with_scheduler(
    reproduce: Callable[[Any], None],
    *flags: str,
    decode: bool = True,
    dp_rank: int | None = None,
    overlap: bool = False,
) -> None:
    """Build a scheduler as SGLang's own process does, and call ``reproduce`` as its event loop.

    SGLang loads its plugins first. With ``PPD_ENABLE=1`` the hooks are applied. An exception that
    reaches the event loop is reported. As in a server, SGLang logs it and kills the parent process.

    Args:
        reproduce: gets the scheduler.
        flags: added to those of a small server on a CPU.
        decode: a decode server; else one without disaggregation, if ``flags`` name none.
        dp_rank: the rank of data parallelism.
        overlap: whether scheduling overlaps with forwards.
    """
    from sglang.srt.managers import scheduler as module
    from sglang.srt.server_args import PortArgs, prepare_server_args

    model = str(tiny_model.ensure())
    role = (*(_DECODE if decode else ()), *(() if overlap else ("--disable-overlap-schedule",)))
    server_args = prepare_server_args(["--model-path", model, *_FLAGS, *role, *flags])

    def run_event_loop(scheduler: Any) -> None:
        try:
            reproduce(scheduler)
        except Exception as error:
            report(ended_by=type(error).__name__)
            raise

    setattr(module.Scheduler, "run_event_loop", run_event_loop)  # noqa: B010 (mypy: a method)
    receiver, sender = Pipe(duplex=False)
    with receiver, sender:
        module.run_scheduler_process(
            server_args, PortArgs.init_new(server_args), 0, 0, 0, dp_rank, sender
        )


def request(rid: str, ids: list[int], new_tokens: int, **fields: Any) -> Any:
    """A request of token ids as the tokenizer process sends it, decoded greedily to its limit."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens)
    sampling.normalize(None)
    given = {
        "input_text": "",
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
        "bootstrap_host": FAKE_BOOTSTRAP_HOST,
        "bootstrap_port": 1,
        "bootstrap_room": 1,
    }
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=array("q", ids), sampling_params=sampling, **given | fields
    )


def decode_step(scheduler: Any) -> bool:
    """Run one iteration of ``event_loop_normal_disagg_decode``, without the intake of requests.

    Returns:
        Whether the scheduler had a batch to run.
    """
    scheduler.process_decode_queue()
    plan = scheduler.get_next_disagg_decode_batch_to_run(running_batch=scheduler.running_batch)
    return _run(scheduler, plan)


def _run(scheduler: Any, plan: Any) -> bool:
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch:
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    else:
        scheduler._sched_idled = True
        scheduler.on_idle()
    scheduler.last_batch = batch
    return bool(batch)


def report(**fields: Any) -> None:
    """Print the outcome of a reproduction, which ``outcome_of`` of the tests reads."""
    print(json.dumps({"outcome": fields}), flush=True)


def hold_transfer(scheduler: Any, rid: str) -> Callable[[], None]:
    """Keep the transfer of a request that was just received under way.

    Returns:
        The function that lets the transfer end.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    waiting = scheduler.disagg_decode_prealloc_queue.queue
    (receiver,) = [entry.kv_receiver for entry in waiting if entry.req.rid == rid]
    poll, is_held = receiver.poll, [True]

    def poll_held() -> Any:
        is_under_way = receiver.has_sent_metadata and is_held
        return KVPoll.Transferring if is_under_way else poll()

    receiver.poll = poll_held
    return is_held.clear


def monolithic_step(scheduler: Any) -> bool:
    """Run one iteration of ``event_loop_normal``, without the intake of requests.

    Returns:
        Whether the scheduler had a batch to run.
    """
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    return _run(scheduler, plan)
