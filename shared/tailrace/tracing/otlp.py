"""Spans to an OTLP receiver over HTTP, by the exporter of the OpenTelemetry SDK.

The variables `OTEL_EXPORTER_OTLP_*` (headers, certificates, compression) and `OTEL_RESOURCE_ATTRIBUTES`
count. Names of attributes are OpenTelemetry's for generative models where it has one, otherwise
`tailrace.<name>`.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace.config import ConfigError
from tailrace.tracing import CONTENT, FinishedSpan, Sink
from tailrace.tracing.background import BackgroundQueue
from tailrace_protos.chat import ChatMessage

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags
except ImportError as error:
    raise ConfigError(
        f"tracing.endpoint: cannot import OpenTelemetry ({error}): pip install 'tailrace[otel]'"
    ) from error

_TIMEOUT_S = 5.0  # of one request, with its retries
_REMEDY = "check tracing.endpoint (OTLP over HTTP, usually port 4318) and OTEL_EXPORTER_OTLP_HEADERS"
_BAD_HEADER = "OTEL_EXPORTER_OTLP_HEADERS has a character that no header may have, such as a line break"
_MAX_REASON = 500  # characters
_NAMES = {
    "num_prompt_tokens": "gen_ai.usage.input_tokens",
    "num_sampled_tokens": "gen_ai.usage.output_tokens",
    "tool": "gen_ai.tool.name",
    "arguments": "gen_ai.tool.call.arguments",
    "result": "gen_ai.tool.call.result",
}
_OPERATIONS = {"play": "invoke_agent", "turn": "chat", "tool": "execute_tool"}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SpansRefusedError(Exception):
    """The receiver did not take a batch."""


class _NewestReason(logging.Handler):
    """Keeps what the exporter told last; `export` itself gives no reason.

    A header that is refused may be a key: its value is left out.
    """

    text = "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())[:_MAX_REASON]
        self.text = _BAD_HEADER if "header value" in text or "Header part" in text else text


class _OwnResource(Resource):
    """Resource of this process. The encoder asks for its hash for each span, which is text of JSON."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def otlp_sink(endpoint: str, of: Mapping[str, str], has_content: bool, max_queued_spans: int) -> Sink:
    """Starts to send the spans of this process, whose attributes are `of`, to a receiver."""
    reason = _NewestReason()
    vendor = logging.getLogger("opentelemetry")
    vendor.addHandler(reason)
    vendor.propagate = False  # it logs each failure; ours are counted, and the first is logged
    url = f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
    exporter = OTLPSpanExporter(url, timeout=_TIMEOUT_S)
    resource = _resource(of)

    def send(spans: list[FinishedSpan]) -> None:
        made = [_readable(span, resource, has_content) for span in spans]
        if exporter.export(made) is not SpanExportResult.SUCCESS:
            raise SpansRefusedError(f"{url} did not take {len(spans)} spans: {reason.text}")

    queue = BackgroundQueue("otlp", send, (SpansRefusedError,), _REMEDY, max_queued_spans)
    return Sink(queue.put, queue.close)


def _resource(of: Mapping[str, str]) -> Resource:
    known = Resource.create(dict(of))
    return _OwnResource(known.attributes, known.schema_url)


def _readable(span: FinishedSpan, resource: Resource, has_content: bool) -> ReadableSpan:
    attributes: dict[str, Any] = {}
    operation = _OPERATIONS.get(span.name.partition(" ")[0])
    if operation:
        attributes["gen_ai.operation.name"] = operation
    for key, value in span.attributes.items():
        if key in CONTENT and not has_content:
            continue
        if key == "messages":
            attributes |= _conversation(value)
        else:
            attributes[_NAMES.get(key, f"tailrace.{key}")] = value
    return ReadableSpan(
        span.name,
        _context(span.traceparent),
        _context(span.parent) if span.parent else None,
        resource,
        attributes,
        links=[Link(_context(link)) for link in span.links],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


def _context(traceparent: str) -> SpanContext:
    _, trace_id, span_id, _ = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, _SAMPLED)


def _conversation(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """The messages before the first reply as input, all later ones as output."""
    first = next((at for at, each in enumerate(messages) if each.role == "assistant"), len(messages))
    return {
        "gen_ai.input.messages": _as_json(messages[:first]),
        "gen_ai.output.messages": _as_json(messages[first:]),
    }


def _as_json(messages: Sequence[ChatMessage]) -> str:
    return msgspec.json.encode([_message(message) for message in messages]).decode()


def _message(message: ChatMessage) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if message.content and message.role != "tool":
        parts.append({"type": "text", "content": message.content})
    parts += (
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    )
    if message.role == "tool":
        parts.append(
            {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}
        )
    return {"role": message.role, "parts": parts}
