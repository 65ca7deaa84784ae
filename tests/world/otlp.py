"""An OTLP receiver over HTTP in a thread: it keeps every span, or hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


class ReceivedSpan(msgspec.Struct, frozen=True):
    """One span, with the service that sent it; `parent` is empty for a root."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    links: tuple[str, ...]  # trace ids


class Receiver:
    """`url` of a receiver; `hang` makes it answer nothing from now on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[ReceivedSpan] = []
        self.status = 200  # of its answers
        self.hang = threading.Event()
        self.closed = threading.Event()

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Spans by trace id."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id, []).append(span)
        return found

    def take(self, body: bytes) -> None:
        """Keeps the spans of one request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            of = {each.key: _value(each.value) for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += (
                    ReceivedSpan(
                        str(of["service.name"]),
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        {each.key: _value(each.value) for each in span.attributes},
                        tuple(link.trace_id.hex() for link in span.links),
                    )
                    for span in scope.spans
                )


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A receiver on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.hang.is_set():
                receiver.closed.wait()
                return
            receiver.take(body)
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.closed.set()
        server.shutdown()
        thread.join()
        server.server_close()
