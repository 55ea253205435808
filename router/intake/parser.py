"""From a client's bytes to a checked request and what its planning needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ppd.planning import Query
from ppd.score import Objective

from .inbound import Endpoint, Inbound, Offer
from .keys import KeyRing
from .objectives import Objectives
from .requests import parse
from .scrub import ANONYMOUS


class ParsedRequest(NamedTuple):
    """A checked request, and the query that its planning starts from."""

    inbound: Inbound
    query: Query


class RequestParser:
    """Checks requests against keys, objectives and what the workers serve.

    Args:
        offer: the models that may be named.

    Attributes:
        keys: API keys in force.
        objectives: in force.
    """

    def __init__(self, keys: KeyRing, objectives: Objectives, offer: Offer) -> None:
        self.keys = keys
        self.objectives = objectives
        self._offer = offer

    def objective(self, headers: Mapping[str, str]) -> Objective:
        """Return the objective of a sender.

        Raises:
            RequestError: the key is of no tenant, or a header is wrong.
        """
        return self.objectives.of(self.keys.tenant(headers) or ANONYMOUS, headers)

    def parse(self, endpoint: Endpoint, headers: Mapping[str, str], raw: bytes) -> ParsedRequest:
        """Check a request, and hash its prefixes.

        Args:
            endpoint: that it was sent to.
            headers: by lower-case name.
            raw: its body.

        Raises:
            RequestError: naming the field at fault and what is allowed.
        """
        tenant = self.keys.tenant(headers)
        session = headers.get("x-session-id", "")
        inbound = parse(endpoint, raw, tenant, self._offer, session)
        name = tenant or ANONYMOUS
        media, body_bytes = inbound.media, len(raw)
        if media:
            body_bytes -= sum(one.encoded_bytes for one in media)
        query = Query(
            kind=inbound.kind,
            chain=inbound.chain,
            body_bytes=body_bytes,
            tenant=name,
            max_reply_tokens=inbound.max_reply_tokens,
            objective=self.objectives.of(name, headers),
            root=inbound.root,
            prompts=inbound.prompts,
            media=media,
        )
        return ParsedRequest(inbound, query)
