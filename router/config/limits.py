"""Options of who may ask for how much: of all, and of a tenant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from ppd.score import Objective, Targets, Weights

_DIGEST = re.compile(r"[0-9a-f]{64}")


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """0: none. A minute's worth may be asked at once."""

    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0


class AdmissionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    max_in_flight: requests that are served at a time; 0: as many as come.
    max_waiting: requests that may wait for that, or for KV; those that come then get a 429.
    max_wait_s: how long one may.
    kv_headroom: wait while no decode worker has KV left for the request, by what it has told.
    """

    max_in_flight: int = 0
    max_waiting: int = 1024
    max_wait_s: float = 30.0
    kv_headroom: bool = True


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    weights, targets: what it wants; targets win. None: what everyone wants.
    keys: SHA-256 digests of its API keys, in hexadecimal.
    rate: its own limit, in place of everyone's.
    """

    weights: Weights | None = None
    targets: Targets | None = None
    keys: tuple[str, ...] = ()
    rate: RateLimit | None = None

    @property
    def objective(self) -> Objective | None:
        return self.targets or self.weights


def problems(
    rate_of_all: RateLimit, tenants: Mapping[str, Tenant], admission: AdmissionLimits
) -> Iterator[str]:
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        for i, digest in enumerate(tenant.keys):
            if not _DIGEST.fullmatch(digest):  # which may be the key itself: it is not shown
                yield f"tenants.{name}.keys[{i}]: not 64 hexadecimal digits of a SHA-256"
            if owners.setdefault(digest, name) != name:
                yield f"tenants.{name}.keys: a key of {owners[digest]} too"
    rates = {"": rate_of_all} | {f"tenants.{n}.": t.rate for n, t in tenants.items()}
    for where, rate in rates.items():
        for field in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(rate, field, 0.0)
            if not value >= 0:
                yield f"{where}rate.{field} must be 0 or more, got {value}"
    for field in ("max_in_flight", "max_waiting"):
        value = getattr(admission, field)
        if value < 0:
            yield f"admission.{field} must be 0 or more, got {value}"
    if not admission.max_wait_s > 0:
        yield f"admission.max_wait_s must be above 0, got {admission.max_wait_s}"
