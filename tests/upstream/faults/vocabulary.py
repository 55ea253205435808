"""A token id outside the vocabulary ends the scheduler, and so the server.

SGLang checks ``token_ids_logprob`` and ``logit_bias`` against the vocabulary, but not the ids of a
prompt, the number of logprobs, and the ids that end a reply.
"""

from __future__ import annotations

from typing import Any

from tests.upstream.in_process import monolithic_step, report, request, with_scheduler


def reproduce(scheduler: Any) -> None:
    """Send three requests with numbers outside the vocabulary, as the tokenizer process would."""
    size = scheduler.model_config.vocab_size
    ordinary = list(range(10, 30))
    stop = request("stop", ordinary, 4)
    stop.sampling_params.stop_token_ids = {size}
    stop.sampling_params.min_new_tokens = 2
    logprobs: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": size + 1}
    ended = {}
    for name, sent in (
        ("input_ids", request("prompt", [*ordinary, size], 4)),
        ("top_logprobs_num", request("logprobs", ordinary, 4, **logprobs)),
        ("stop_token_ids", stop),
    ):
        sent.sampling_params.verify(size)  # all that the tokenizer process checks
        scheduler.handle_generate_request(sent)
        try:
            while monolithic_step(scheduler):
                pass
        except (IndexError, RuntimeError) as error:
            ended[name] = type(error).__name__
            scheduler.abort_request
    report(ended=ended)


def main() -> None:
    """Run the reproduction."""
    with_scheduler(reproduce, decode=False)
