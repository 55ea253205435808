"""Options of admission, rate limits and tenants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from ppd.score import Objective, Targets, Weights

from .ranges import NonNegative, NonNegativeInt, Positive, range_problems

_DIGEST = re.compile(r"[0-9a-f]{64}")


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests and tokens that a tenant may use in a minute; 0 is no limit.

    A burst may use a whole minute's quota at once.

    Attributes:
        requests_per_minute: limit on requests.
        tokens_per_minute: limit on tokens of prompts and replies.
    """

    requests_per_minute: NonNegative = 0.0
    tokens_per_minute: NonNegative = 0.0


class AdmissionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on requests in flight and requests that wait for admission.

    Attributes:
        max_in_flight: requests served at a time; 0 is no limit.
        max_waiting: requests that wait for a free place or for KV. Further ones get a 429.
        max_wait_s: after which a waiting request gets a 429.
        kv_headroom: requests wait while no decode worker reports enough free KV for them.
    """

    max_in_flight: NonNegativeInt = 0
    max_waiting: NonNegativeInt = 1024
    max_wait_s: Positive = 30.0
    kv_headroom: bool = True


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Objective, API keys and rate limit of one tenant.

    Attributes:
        weights: the tenant's weights. Without weights and targets, the router's default applies.
        targets: the tenant's targets; they take precedence over weights.
        keys: SHA-256 digests of its API keys, in hexadecimal.
        rate: replaces the default rate limit.
    """

    weights: Weights | None = None
    targets: Targets | None = None
    keys: tuple[str, ...] = ()
    rate: RateLimit | None = None

    @property
    def objective(self) -> Objective | None:
        """The tenant's objective; None if it has none of its own."""
        return self.targets or self.weights


def problems(
    default_rate: RateLimit, tenants: Mapping[str, Tenant], admission: AdmissionLimits
) -> Iterator[str]:
    """Yield a message for each limit or key that is wrong.

    Args:
        default_rate: of tenants without a rate limit of their own.
        tenants: by name.
        admission: limits of all tenants together.
    """
    owners: dict[str, str] = {}
    yield from range_problems(default_rate, "rate.")
    for name, tenant in tenants.items():
        for i, digest in enumerate(tenant.keys):
            if not _DIGEST.fullmatch(digest):  # not shown: it may be the key itself
                yield f"tenants.{name}.keys[{i}]: not 64 hexadecimal digits of a SHA-256"
            if owners.setdefault(digest, name) != name:
                yield f"tenants.{name}.keys: a key of {owners[digest]} too"
        if tenant.rate is not None:
            yield from range_problems(tenant.rate, f"tenants.{name}.rate.")
    yield from range_problems(admission, "admission.")
