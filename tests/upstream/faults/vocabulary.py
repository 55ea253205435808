"""A number outside the vocabulary raises in the scheduler, which ends it, and so the server.

SGLang checks ``token_ids_logprob`` and ``logit_bias`` against the vocabulary, but not the ids of a
prompt, the number of logprobs, and the ids that end a reply.
"""

from __future__ import annotations

from typing import Any

from tests.upstream.in_process import monolithic_step, report, request, with_scheduler


def reproduce(scheduler: Any, name: str) -> None:
    """Send a request with a number outside the vocabulary, as the tokenizer process would."""
    size, ordinary = scheduler.model_config.vocab_size, list(range(10, 30))
    logprobs: dict[str, Any] = {}
    ids, sampling = ordinary, {}
    if name == "input_ids":
        ids = [*ordinary, size + 1000]  # the embedding has some more rows than ids
    elif name == "top_logprobs_num":
        logprobs = {"return_logprob": True, "top_logprobs_num": size + 1}
    else:
        sampling = {"stop_token_ids": [size], "min_new_tokens": 2}
    sent = request(name, ids, 4, sampling, **logprobs)
    sent.sampling_params.verify(size)  # all that the tokenizer process checks
    scheduler.handle_generate_request(sent)
    while monolithic_step(scheduler):
        pass
    report(served=True)


def main(name: str = "input_ids") -> None:
    """Run the reproduction for one field."""
    flags = ("--max-total-tokens", "2000", "--chunked-prefill-size", "512")
    with_scheduler(lambda scheduler: reproduce(scheduler, name), *flags, decode=False)
