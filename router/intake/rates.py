"""Rate limits of tenants: requests and tokens a minute, as leaky buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppd.errors import Overloaded

from ..config.limits import RateLimit, Tenant
from ..observability.metrics import Metrics

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """A leaky bucket; a minute's worth may be taken at once."""

    per_minute: float
    level: float = 0.0
    at_s: float = 0.0

    def level_at(self, now_s: float) -> float:
        self.level = max(0.0, self.level - (now_s - self.at_s) * self.per_minute / _MINUTE_S)
        self.at_s = now_s
        return self.level

    def wait_s(self, now_s: float) -> float:
        """Time until a request may be served.

        A request larger than what is left is served: the next ones pay for it.
        """
        over = self.level_at(now_s) - self.per_minute
        return 0.0 if over < 0 else (over + 1) * _MINUTE_S / self.per_minute


_Buckets = tuple[_Bucket | None, _Bucket | None]  # of requests and of tokens


class Rates:
    """Charges requests to their tenants.

    Args:
        everyone: the limit of tenants that have none of their own.
        named: tenants are identified by keys that the router checks. If not, a client could take
            another name with every request, so all share one limit.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        everyone: RateLimit,
        tenants: Mapping[str, Tenant],
        *,
        named: bool,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._everyone = everyone
        self._tenants = tenants
        self._named = named
        self._metrics = metrics
        self._clock = clock
        self._buckets: dict[str, _Buckets] = {}

    def reload(self, everyone: RateLimit, tenants: Mapping[str, Tenant], *, named: bool) -> None:
        """Take new limits; what was charged stays charged."""
        if named != self._named:
            self._buckets.clear()
        self._everyone, self._tenants, self._named = everyone, tenants, named
        for name, before in self._buckets.items():
            self._buckets[name] = self._make(name, before)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge one request.

        Args:
            tenant: its sender.
            tokens: that it is expected to need.

        Raises:
            Overloaded: the tenant has reached a limit.
        """
        requests, used = self._of(tenant)
        now_s = self._clock()
        for bucket, what in ((requests, "requests"), (used, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 0:
                self._metrics.refused_entry.labels("rate").inc()
                raise Overloaded(
                    f"more than {bucket.per_minute:g} {what} a minute",
                    retry_after_s=math.ceil(wait_s),
                    code="rate_limit_exceeded",
                )
        if requests is not None:
            requests.level += 1
        if used is not None:
            used.level += tokens

    def refund(self, tenant: str, tokens: int) -> None:
        """Take back the charge of a request that was not served."""
        requests, used = self._of(tenant)
        if requests is not None:
            requests.level = max(0.0, requests.level - 1)
        if used is not None:
            used.level = max(0.0, used.level - tokens)

    def settle(self, tenant: str, tokens: int) -> None:
        """Charge what a request took beyond its estimate, or give back what it did not take."""
        _, used = self._of(tenant)
        if used is not None:
            used.level = max(0.0, used.level + tokens)

    def _of(self, tenant: str) -> _Buckets:
        name = tenant if self._named else ""
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = self._make(name, (None, None))
        return found

    def _make(self, name: str, before: _Buckets) -> _Buckets:
        own = self._tenants.get(name) if self._named else None
        limit = own.rate if own is not None and own.rate is not None else self._everyone
        now_s = self._clock()
        requests, tokens = (
            _Bucket(rate, 0.0 if old is None else old.level_at(now_s), now_s) if rate else None
            for rate, old in zip(
                (limit.requests_per_minute, limit.tokens_per_minute), before, strict=True
            )
        )
        return requests, tokens
