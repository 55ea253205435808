"""The hooks of the emulation on SGLang, checked as the plugin's are: all of them or none.

The forward is replaced by a launch on the device's timeline. Sampling gives letters, by position.
A transfer of KV takes its time on the link, then its few real bytes have been moved. All else is
SGLang's own: scheduler, memory pools, radix cache, queues, messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ppd.errors import ConfigError
from sglang_patches.targets import Hook, check_applied, source_link

from ..profiles.profile import Extend, Step
from .collective import Collective
from .device import Device, Work
from .drafts import DraftedOutputs
from .link import Link
from .model import LETTERS
from .settings import Settings

READ_AGAINST = ("0.5.23",)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_POLL_S = 0.001  # of a scheduler that waits for transfers, which would spin


class Emulation:
    """The functions of the hooks, around one device."""

    def __init__(self, device: Device, link: Link, settings: Settings) -> None:
        self._device = device
        self._link = link
        self._settings = settings
        drafts = settings.drafts
        self._drafts = None if drafts is None else DraftedOutputs(drafts)

    def init_scheduler(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """Stop a worker that cannot be emulated.

        Raises:
            SystemExit: a hook was not applied, or a flag does not go with the emulation.
        """
        try:
            check_applied(self.hooks())
            problems = _problems(scheduler.server_args, self._settings)
            if not scheduler.enable_overlap and self._settings.drafts is None:
                problems.append("--disable-overlap-schedule: results would be read at once")
            if problems:
                raise ConfigError("not emulated: " + "; ".join(problems))
        except ConfigError as error:
            raise SystemExit(f"emulation: {error}") from error
        scheduler.emulates_device = True  # read by sglang_patches/local_step.py
        if (ranks := self._settings.ranks) > 1:
            from sglang.srt.runtime_context import get_parallel

            rank = get_parallel().attn_dp_rank
            self._device.join(Collective(self._settings.steps_file, rank, ranks))

    def run_batch(self, original: Any, scheduler: Any, batch: Any, *rest: Any) -> Any:
        """Note which requests are in the step that follows; without overlap, wait for its end."""
        queued = [req.time_stats.wait_queue_entry_time for req in batch.reqs]
        known = [at_s for at_s in queued if at_s]
        self._device.plan(
            Work(frozenset(str(req.rid) for req in batch.reqs), min(known, default=0.0))
        )
        result = original(scheduler, batch, *rest)
        if not scheduler.enable_overlap:  # the scheduler reads the result at once
            self._device.wait_until(self._device.free_at_s)
        return result

    def forward(self, _original: Any, runner: Any, batch: Any, *_: Any, **__: Any) -> Any:
        """Launch a step instead of computing it."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunnerOutput

        step = step_of(batch)
        if step is not None and self._drafts is not None and runner.is_draft_worker:
            self._device.launch(step, self._drafts.drafts.share)
        elif step is not None:
            self._device.launch(step)
        else:
            self._device.launch_nothing()
        logits = hidden = None
        if self._drafts is not None:
            logits, hidden = self._drafts.outputs(runner, batch)
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
        return ModelRunnerOutput(logits_output=output, can_run_graph=True)

    def sample(self, _original: Any, _runner: Any, _logits: Any, batch: Any) -> Any:
        """Return a lower-case letter for each sequence, by its position."""
        return batch.seq_lens % len(LETTERS) + LETTERS.start

    def on_idle(self, _result: None, scheduler: Any) -> None:
        """Leave the core to others while transfers are under way."""
        if not scheduler.is_fully_idle():
            time.sleep(_POLL_S)

    def send_kvcache(
        self, original: Any, manager: Any, session_id: str, indices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Move the small model's KV, and take the time of the emulated model's."""
        tokens = len(indices) * manager.kv_args.page_size
        end_s = self._link.reserve(session_id, tokens)
        failed = original(manager, session_id, indices, *args, **kwargs)
        if not failed:
            self._link.wait_until(end_s)
        return failed

    def hooks(self) -> tuple[Hook, ...]:
        """Return the hooks."""
        return tuple(_hooks(self))


def _problems(server_args: Any, settings: Settings) -> list[str]:
    drafts, ranks = settings.drafts, settings.ranks
    refused = (
        ("tp_size", ranks, "the profile has the tensor parallelism; processes are ranks alone"),
        ("enable_dp_attention", ranks > 1, "one worker is one device, unless it has ranks"),
        ("pp_size", 1, "one worker is one device"),
        ("enable_hierarchical_cache", False, "its copies have no time"),
        ("grammar_backend_required", False, "replies are letters"),
    )
    found = [
        f"--{name.replace('_', '-')}: {reason}"
        for name, default, reason in refused
        if (getattr(server_args, name, default) or None) != (default or None)
    ]
    if server_args.dp_size not in (1, ranks):
        found.append("--dp-size: one worker is one device, unless it has ranks of DP attention")
    algorithm, steps = server_args.speculative_algorithm, server_args.speculative_num_steps
    if algorithm is not None and drafts is None:
        found.append("--speculative-algorithm: the settings have no accept rates")
    elif drafts is not None and (algorithm, steps) != ("EAGLE", drafts.steps):
        found.append(
            f"accept rates of {drafts.steps} draft tokens need --speculative-algorithm EAGLE and "
            f"--speculative-num-steps {drafts.steps}; got {algorithm}, {steps}"
        )
    return found


def step_of(batch: Any) -> Step | None:
    """Return the shape of a forward batch; None if it computes nothing.

    Args:
        batch: SGLang's ``ForwardBatch``. In a mixed batch a row with one new token decodes.
    """
    mode = batch.forward_mode
    if mode.is_idle():
        return None
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        sequences = len(batch.seq_lens)
        return Step((), sequences, int(batch.seq_lens.sum()), len(batch.input_ids) // sequences)
    if mode.is_decode():
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        return Step((), len(lengths), int(lengths.sum()))
    rows = zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)
    extends: list[Extend] = []
    sequences = context = 0
    for new, cached in rows:
        if new == 1 and mode.is_mixed():
            sequences, context = sequences + 1, context + int(cached) + 1
        else:
            extends.append(Extend(int(new), int(cached)))
    return Step(tuple(extends), sequences, context)


def _hooks(emulation: Emulation) -> list[Hook]:
    def hook(
        target: str, parameters: str | None, kind: Any, function: Callable[..., Any], reason: str,
        path: str, line: int,
    ) -> Hook:  # fmt: skip
        link = source_link(path, line).replace("v0.5.21", "v0.5.23")
        return Hook(
            target=target,
            parameters=parameters,
            kind=kind,
            function=function,
            reason=reason,
            read_against=READ_AGAINST,
            upstream=link,
        )

    return [
        hook(
            f"{_SCHEDULER}.__init__",
            "self, server_args, port_args",
            "after",
            emulation.init_scheduler,
            "stop a worker that is half emulated",
            *("managers/scheduler.py", 454),
        ),
        hook(
            f"{_SCHEDULER}.run_batch",
            "self, batch, pp_proxy_tensors",
            "around",
            emulation.run_batch,
            "tell an idle device from one whose next step was late",
            *("managers/scheduler.py", 4614),
        ),
        hook(
            f"{_SCHEDULER}.on_idle",
            "self",
            "after",
            emulation.on_idle,
            "a scheduler with transfers under way would take a whole core",
            *("managers/scheduler.py", 5241),
        ),
        hook(
            f"{_RUNNER}.forward",
            "self, forward_batch, skip_attn_backend_init, pp_proxy_tensors, reinit_attn_backend, "
            "split_forward_count",
            "around",
            emulation.forward,
            "a step takes the time of the profile",
            *("model_executor/model_runner.py", 1813),
        ),
        hook(
            f"{_RUNNER}.sample",
            "self, logits_output, forward_batch",
            "around",
            emulation.sample,
            "there are no logits",
            *("model_executor/model_runner.py", 2103),
        ),
        hook(
            "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache",
            "self, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor, "
            "dst_layer_ids, dst_device_kv_indices, dst_kv_item_len, dst_attn_tp_size",
            "around",
            emulation.send_kvcache,
            "a transfer takes the time of the emulated link",
            *("disaggregation/mooncake/conn.py", 1346),
        ),
    ]
