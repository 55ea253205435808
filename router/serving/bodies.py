"""A leg's body: the client's request with what makes it local or remote (docs/REFERENCE.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppd.contract import LocalTerms
from ppd.sessions import session_name

from ..intake.inbound import Endpoint, Inbound
from ..workers.worker import Worker
from .context import RequestContext

Name = Mapping[str, str]  # of the conversation, or nothing


def name_for(context: RequestContext, *workers: Worker) -> Name:
    """What has the blocks named that one of these workers stores for a request.

    Not where a name means more: workers that keep sessions, and SGLang's beam search, which
    refuses it.
    """
    inbound = context.inbound
    heard = any(worker.evictions is not None for worker in workers)
    if not heard or inbound.chain is None or any(w.handshake.keeps_sessions for w in workers):
        return {}
    if (inbound.fields.get("sampling_params") or {}).get("beam_width") is not None:
        return {}
    return {"session_id": session_name(context.session)}


def with_terms(inbound: Inbound, terms: LocalTerms, name: Name) -> bytes:
    """The body of a local leg. ``/generate`` carries the marker in its sampling parameters."""
    if inbound.endpoint is not Endpoint.GENERATE:
        custom = (inbound.fields.get("custom_params") or {}) | terms.to_custom_params()
        return inbound.with_fields({"custom_params": custom, **name})
    sampling = inbound.fields.get("sampling_params") or {}
    custom = (sampling.get("custom_params") or {}) | terms.to_custom_params()
    sampling = {**sampling, "custom_params": custom}
    return inbound.with_fields({"sampling_params": sampling, **name})


def with_room(inbound: Inbound, prefill: Worker, new_room: Callable[[], int], name: Name) -> bytes:
    """The body of both legs of a remote turn."""
    host, port = prefill.bootstrap_host, prefill.handshake.bootstrap_port
    address: dict[str, Any]
    if inbound.chain is not None:
        address = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": new_room()}
    else:
        n = inbound.prompts
        address = {
            "bootstrap_host": [host] * n,
            "bootstrap_port": [port] * n,
            "bootstrap_room": [new_room() for _ in range(n)],
        }
    return inbound.with_fields({**address, **name})
