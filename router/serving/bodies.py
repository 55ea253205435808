"""The bodies of legs: a client's request with what makes it local or remote.

The wire contract is in docs/REFERENCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppd.contract import LocalTerms
from ppd.decision import Route
from ppd.placement import Plan
from ppd.sessions import session_name

from ..intake.inbound import Endpoint, Inbound
from ..workers.worker import Worker

_ROOMS = 2**63  # all rooms are below

SessionField = Mapping[str, str]  # the name of the conversation, or nothing


def body_of(inbound: Inbound, plan: Plan, session: int, new_room: Callable[[], int]) -> bytes:
    """The body of all legs of a plan.

    Args:
        inbound: the client's request.
        plan: where it is sent.
        session: the number of the conversation.
        new_room: gives a random bootstrap room below 2**63.
    """
    name = session_field(inbound, session, *plan.workers)
    if plan.prefill is not None:
        assert isinstance(plan.prefill, Worker)
        return with_room(inbound, plan.prefill, new_room, name)
    if plan.route is Route.LOCAL:
        return with_terms(inbound, LocalTerms(plan.min_cached_tokens), name)
    return inbound.with_fields(name)


def session_field(inbound: Inbound, session: int, *workers: object) -> SessionField:
    """The field by which KV events name the blocks that one of these workers stores.

    Not where a name means more: on workers that keep sessions, and with SGLang's beam search,
    which refuses it.
    """
    if inbound.chain is None:
        return {}
    subscribed = False
    for worker in workers:
        assert isinstance(worker, Worker)
        if worker.handshake.keeps_sessions:
            return {}
        subscribed = subscribed or worker.evictions is not None
    if (
        not subscribed
        or (inbound.fields.get("sampling_params") or {}).get("beam_width") is not None
    ):
        return {}
    return {"session_id": session_name(session)}


def with_terms(inbound: Inbound, terms: LocalTerms, name: SessionField) -> bytes:
    """The body of a local turn. ``/generate`` carries the marker in its sampling parameters."""
    if inbound.endpoint is not Endpoint.GENERATE:
        custom = (inbound.fields.get("custom_params") or {}) | terms.to_custom_params()
        return inbound.with_fields({"custom_params": custom, **name})
    sampling = inbound.fields.get("sampling_params") or {}
    custom = (sampling.get("custom_params") or {}) | terms.to_custom_params()
    sampling = {**sampling, "custom_params": custom}
    return inbound.with_fields({"sampling_params": sampling, **name})


def with_room(
    inbound: Inbound, prefill: Worker, new_room: Callable[[], int], name: SessionField
) -> bytes:
    """The body of both legs of a remote turn: the bootstrap address, and a room a prompt."""
    host, port = prefill.server.bootstrap_host, prefill.handshake.bootstrap_port
    address: dict[str, Any]
    if inbound.chain is not None:
        room = _room_of(prefill, new_room())
        address = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    else:
        n = inbound.prompts
        address = {
            "bootstrap_host": [host] * n,
            "bootstrap_port": [port] * n,
            "bootstrap_room": [_room_of(prefill, new_room()) for _ in range(n)],
        }
    return inbound.with_fields({**address, **name})


def for_rank(body: bytes, worker: Worker) -> bytes:
    """The body of a leg to a worker that decodes: it names the rank, if the server has several.

    A prefill worker's rank is that of the room, and it may have fewer ranks.
    """
    if worker.handshake.dp_size == 1:
        return body
    return b'{"routed_dp_rank":%d,%b' % (worker.rank, body[1:])


def _room_of(prefill: Worker, room: int) -> int:
    """Return a room like this one that a server takes on the rank of a worker.

    The rank of a room is ``room % dp_size`` (managers/data_parallel_controller.py:901).
    """
    ranks = prefill.handshake.dp_size
    if ranks > 1:
        room += prefill.rank - room % ranks
        room -= ranks if room >= _ROOMS else 0
    return room
