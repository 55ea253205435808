"""A number outside the vocabulary raises in the scheduler, which ends it, and so the server.

SGLang checks ``token_ids_logprob`` and ``logit_bias`` against the vocabulary, but not the ids of a
prompt, the number of logprobs, and the ids that end a reply.
"""

from __future__ import annotations

from typing import Any

from tests.upstream.in_process import monolithic_step, report, request, with_scheduler


def reproduce(scheduler: Any, name: str) -> None:
    """Send a request with a number outside the vocabulary, as the tokenizer process would."""
    size, ids = scheduler.model_config.vocab_size, list(range(10, 30))
    fields: dict[str, Any] = {}
    if name == "input_ids":
        ids = [*ids, size + 1000]  # the embedding has some more rows than there are ids
    elif name == "top_logprobs_num":
        fields = {"return_logprob": True, "top_logprobs_num": size + 1}
    sent = request(name, ids, 4, **fields)
    if name == "stop_token_ids":
        sent.sampling_params.stop_token_ids = {size + 1000}
        sent.sampling_params.min_new_tokens = 2
    sent.sampling_params.verify(size)  # all that the tokenizer process checks
    scheduler.handle_generate_request(sent)
    while monolithic_step(scheduler):
        pass
    report(served=True)


def main(name: str = "input_ids") -> None:
    """Run the reproduction for one field."""
    with_scheduler(lambda scheduler: reproduce(scheduler, name), decode=False)
