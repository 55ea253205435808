"""A span for every request, as OpenTelemetry names things (its HTTP and GenAI conventions).

Optional: the SDK is the extra ``otel``. What a worker is sent carries our span as its parent, so
that SGLang's own (``--enable-trace``) hang below it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ppd import __version__
from ppd.errors import ConfigError
from ppd.outcome import Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_ERRORS = (Outcome.WORKER_ERROR, Outcome.TRUNCATED, Outcome.INTERNAL_ERROR)


class Tracing:
    """Makes spans.

    Args:
        endpoint: where spans go by OTLP over HTTP, as ``http://HOST:4318/v1/traces``.
        exporter: takes them instead.

    Raises:
        ConfigError: the SDK is not installed.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                "otlp_endpoint needs the extra otel: pip install 'sglang-ppd[otel]'"
            ) from error
        resource = Resource.create({"service.name": "ppd-router", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ppd.router", __version__)
        self._context = TraceContextTextMapPropagator()

    def begin(self, path: str, headers: Mapping[str, str]) -> Trace:
        """Begin the span of a request.

        Args:
            path: of the request.
            headers: of the client, by lower-case name.
        """
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
    """One request's span.

    Attributes:
        headers: for workers, whose own spans then hang below this one.
    """

    def __init__(self, span: Span, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers

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
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.set_attribute("ppd.outcome", outcome.value)
        if attributes is not None:
            span.set_attributes(attributes)
        if first_byte_s is not None:
            ago_s = time.monotonic() - first_byte_s
            span.add_event("first event", timestamp=time.time_ns() - round(1e9 * ago_s))
        if outcome in _ERRORS:
            span.set_status(Status(StatusCode.ERROR, outcome.value))
        span.end()
