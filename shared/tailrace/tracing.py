"""Traces: each message carries one `traceparent` string (W3C) through all services.

Without `OTEL_EXPORTER_OTLP_ENDPOINT` no span is recorded; a span then only passes an incoming
`traceparent` on, at the cost of one context variable. With it, spans go to that endpoint in the
background, from `configure` to the end of the process.
"""

import importlib
import os
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER = "traceparent"

_propagator = TraceContextTextMapPropagator()
_carried: ContextVar[str] = ContextVar("traceparent", default="")
_tracer: trace.Tracer | None = None


def configure(service: str) -> None:
    """Starts to record spans if an endpoint is configured."""
    global _tracer
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    # The import of the SDK and its gRPC exporter costs 0.3 s and 40 MB.
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    provider = sdk.TracerProvider(
        resource=resources.Resource.create({"service.name": f"tailrace_{service}"})
    )
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    record_with(provider)


def record_with(provider: trace.TracerProvider | None) -> None:
    """Records spans with this provider; None: records none."""
    global _tracer
    _tracer = provider.get_tracer("tailrace") if provider is not None else None


def current_traceparent() -> str:
    """Returns the `traceparent` for a message, so that its spans join this trace; empty: no trace."""
    if _tracer is None:
        return _carried.get()
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(HEADER, "")


def headers() -> dict[str, str]:
    """Returns the headers that carry the trace in a message; none without a trace."""
    traceparent = current_traceparent()
    return {HEADER: traceparent} if traceparent else {}


class span:  # noqa: N801 - used like a statement
    """Span of a `with` body: `with span("play episode", message.traceparent, episode_id=...):`."""

    __slots__ = ("_attributes", "_carried", "_name", "_otel_span", "_otel_token", "_traceparent")

    def __init__(self, name: str, traceparent: str = "", **attributes: Any) -> None:
        self._name = name
        self._traceparent = traceparent
        self._attributes = attributes
        self._carried: Token[str] | None = None
        self._otel_span: trace.Span | None = None
        self._otel_token: Any = None

    def __enter__(self) -> "span":
        if _tracer is None:
            if self._traceparent:
                self._carried = _carried.set(self._traceparent)
            return self
        parent = _propagator.extract({HEADER: self._traceparent}) if self._traceparent else None
        self._otel_span = _tracer.start_span(self._name, context=parent, attributes=self._attributes)
        self._otel_token = otel_context.attach(trace.set_span_in_context(self._otel_span))
        return self

    def set(self, **attributes: Any) -> None:
        """Adds attributes after the start of the span."""
        if self._otel_span is not None:
            self._otel_span.set_attributes(attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._carried is not None:
            _carried.reset(self._carried)
        if self._otel_span is None:
            return
        if isinstance(error, Exception):
            self._otel_span.record_exception(error)
            self._otel_span.set_status(trace.StatusCode.ERROR, str(error))
        otel_context.detach(self._otel_token)
        self._otel_span.end()
