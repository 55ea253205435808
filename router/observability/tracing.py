"""A span for every request, as OpenTelemetry names things (its HTTP and GenAI conventions).

Optional: the SDK is the extra ``otel``. What a worker is sent carries our span as its parent, so
that SGLang's own (``--enable-trace``) hang below it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ppd import __version__
from ppd.errors import ConfigError
from ppd.extras import install
from ppd.outcome import Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_ERRORS = (Outcome.WORKER_ERROR, Outcome.TRUNCATED, Outcome.INTERNAL_ERROR)


class Tracing:
    """Makes spans.

    A client's ``traceparent`` decides whether its request has a span. Without one, chance decides.
    Workers of a request without a span get a ``traceparent`` that is not sampled, so that they
    make none either.

    Args:
        endpoint: where spans go by OTLP over HTTP, as ``http://HOST:4318/v1/traces``.
        share: of the requests without a ``traceparent`` that have a span.
        exporter: takes them instead.
        draw: returns a number from 0 to below 1.

    Raises:
        ConfigError: the SDK is not installed.
    """

    def __init__(
        self,
        endpoint: str,
        share: float = 1.0,
        exporter: SpanExporter | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"otlp_endpoint needs more packages: {install('otel')}") from error
        resource = Resource.create({"service.name": "ppd-router", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ppd.router", __version__)
        self._context = TraceContextTextMapPropagator()
        self._share = share
        self._draw = draw

    def begin(self, path: str, headers: Mapping[str, str]) -> Trace:
        """Begin the span of a request.

        Args:
            path: of the request.
            headers: of the client, by lower-case name.
        """
        if "traceparent" not in headers and self._draw() >= self._share:
            return Trace(None, {"traceparent": _unsampled()})
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._context.extract(headers)
        span = self._tracer.start_span(f"POST {path}", parent, SpanKind.SERVER)
        carried: dict[str, str] = {}
        self._context.inject(carried, set_span_in_context(span, parent))
        return Trace(span, carried)

    def close(self) -> None:
        """Send what is left, and stop."""
        self._provider.shutdown()


class Trace:
    """One request's span, or none if it is not sampled.

    Attributes:
        headers: for workers, whose own spans then hang below this one.
        recorded: the request has a span.
    """

    __slots__ = ("_span", "headers", "recorded")

    def __init__(self, span: Span | None, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers
        self.recorded = span is not None and span.is_recording()

    def end(
        self,
        outcome: Outcome,
        attributes: Mapping[str, Any] | None = None,
        first_byte_s: float | None = None,
    ) -> None:
        """End the span.

        Args:
            outcome: how the request ended.
            attributes: of the request, if a route was decided for it.
            first_byte_s: when the first answer began, by ``time.monotonic``.
        """
        span = self._span
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("ppd.outcome", outcome.value)
        if attributes is not None:
            span.set_attributes(attributes)
        if first_byte_s is not None:
            ago_s = time.monotonic() - first_byte_s
            span.add_event("first event", timestamp=time.time_ns() - round(1e9 * ago_s))
        if outcome in _ERRORS:
            span.set_status(Status(StatusCode.ERROR, outcome.value))
        span.end()


def _unsampled() -> str:
    """Return a new ``traceparent`` whose flags are 00 (W3C Trace Context, 3.2.2)."""
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-00"
