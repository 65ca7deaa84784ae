"""Traces: the spans of sampled episodes in all services, connected by W3C `traceparent` strings.

Whether an episode is sampled, its trace id and the id of its root span follow from the episode's id, so
every service knows them without a message. `traceparent` strings travel in NATS headers and in
`GenerateRequest`s, and bring the spans between the root and a leaf into their places.

Invariants: without a receiver (`tracing.endpoint`, `tracing.mlflow`) no span exists and no package of
OpenTelemetry is imported; a span has a parent, so work outside of sampled episodes has none; a finished
span goes to bounded queues, and nothing waits for a receiver.
"""

import importlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import msgspec
import xxhash

from tailrace.config import RunConfig

HEADER = "traceparent"
SALT_VARIABLE = "TAILRACE_TRACE_SALT"  # distinguishes the traces of two runs with one name
CONTENT = ("messages", "arguments", "result")  # attributes with texts of the model and of tools

_VALID = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01")
_NUM_HASHES = 1 << 64


class FinishedSpan(msgspec.Struct, frozen=True):
    """One span. `parent` and `links` are `traceparent` strings; a root has no parent."""

    name: str
    traceparent: str
    parent: str
    start_ns: int  # since 1970
    end_ns: int
    attributes: dict[str, Any]
    error: str = ""
    links: tuple[str, ...] = ()

    @property
    def trace_id(self) -> str:
        """The 32 hexadecimal digits of the trace."""
        return self.traceparent[3:35]


class Sink(msgspec.Struct, frozen=True):
    """Receiver of finished spans; `put` returns at once."""

    put: Callable[[FinishedSpan], None]
    close: Callable[[], None]  # sends the rest, within seconds


_carried: ContextVar[str] = ContextVar("traceparent", default="")
_sinks: list[Sink] = []
_limit = 0  # of the hashes of sampled episodes
_seed = 0
_prefix = ""


def configure(run: RunConfig, service: str, instance_id: str) -> None:
    """Sets the share of sampled episodes, and starts to send spans if there is an endpoint."""
    global _limit, _seed, _prefix
    args = run.tracing
    if not (args.resolved_endpoint or args.mlflow):
        return
    _prefix = f"{run.exp_name}/{os.environ.get(SALT_VARIABLE, '')}/"
    _seed, _limit = xxhash.xxh3_64_intdigest(_prefix.encode()), round(args.sample_rate * _NUM_HASHES)
    if args.resolved_endpoint:
        otlp = importlib.import_module("tailrace.tracing.otlp")  # brings the SDK
        resource = {
            "service.name": f"tailrace_{service}",
            "service.namespace": run.exp_name,
            "service.instance.id": instance_id,
        }
        add_sink(otlp.otlp_sink(args.resolved_endpoint, resource, args.messages, args.max_queued_spans))


def add_sink(sink: Sink) -> None:
    """Sends every later span to `sink` too."""
    _sinks.append(sink)


def close() -> None:
    """Sends what is left, within seconds; later spans are not recorded."""
    global _limit
    _limit = 0
    while _sinks:
        _sinks.pop().close()


def episode(episode_id: str) -> str:
    """`traceparent` of an episode's root span; empty if the episode is not sampled."""
    if not _limit or xxhash.xxh3_64_intdigest(episode_id.encode(), _seed) >= _limit:
        return ""
    digest = xxhash.xxh3_128_hexdigest((_prefix + episode_id).encode())
    return f"00-{digest}-{xxhash.xxh3_64_hexdigest(digest.encode())}-01"


def current_traceparent() -> str:
    """The `traceparent` for a message, so that its spans join this trace; empty: no trace."""
    return _carried.get()


def headers(traceparent: str = "") -> dict[str, str]:
    """Headers that carry this trace, or the current one, in a message; none without a trace."""
    traceparent = traceparent or _carried.get()
    return {HEADER: traceparent} if traceparent else {}


def is_recorded(traceparent: str) -> bool:
    """True if spans below this one are recorded in this process."""
    return bool(_sinks and traceparent and _VALID.fullmatch(traceparent))


@contextmanager
def carried(traceparent: str) -> Iterator[None]:
    """Makes this the current trace, without a span of its own."""
    token = _carried.set(traceparent)
    try:
        yield
    finally:
        _carried.reset(token)


def record(
    name: str,
    parent: str,
    start_unix_s: float,
    end_unix_s: float,
    *,
    traceparent: str = "",
    links: Sequence[str] = (),
    **attributes: Any,
) -> str:
    """Records a span that is over; returns its `traceparent`, empty if it is not recorded.

    A span without a parent is a root, and names its own `traceparent`.
    """
    if not is_recorded(parent or traceparent):
        return ""
    context = traceparent or _child(parent)
    _emit(
        FinishedSpan(
            name,
            context,
            parent,
            round(1e9 * start_unix_s),
            round(1e9 * max(start_unix_s, end_unix_s)),
            attributes,
            links=tuple(links),
        )
    )
    return context


def span(name: str, traceparent: str = "", **attributes: Any) -> "Span":
    """Span of a `with` body: `with span("turn", request.traceparent, turn=3):`.

    Its parent is the given one, otherwise the current one; without a sampled parent there is none.
    """
    parent = traceparent or _carried.get()
    return _JoinedSpan(name, parent, attributes) if parent else _NO_SPAN


class Span:
    """Span that is not recorded: one object for all episodes that are not sampled."""

    traceparent = ""  # its own; empty: it is not recorded

    def __enter__(self) -> "Span":
        return self

    def set(self, **attributes: Any) -> None:
        """Adds attributes after the start of the span."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Ends the span."""


_NO_SPAN = Span()


class _JoinedSpan(Span):
    """Span below a parent; without a receiver here it only carries the parent on."""

    def __init__(self, name: str, parent: str, attributes: dict[str, Any]) -> None:
        self._name = name
        self._parent = parent
        self._attributes = attributes

    def __enter__(self) -> "Span":
        if is_recorded(self._parent):
            self.traceparent = _child(self._parent)
            self._start_ns = time.time_ns()
        self._token = _carried.set(self.traceparent or self._parent)
        return self

    def set(self, **attributes: Any) -> None:
        self._attributes.update(attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        _carried.reset(self._token)
        if self.traceparent:
            failure = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else ""
            made = (self._name, self.traceparent, self._parent, self._start_ns, time.time_ns())
            _emit(FinishedSpan(*made, self._attributes, failure))


def _child(parent: str) -> str:
    return f"{parent[:36]}{random.getrandbits(64) or 1:016x}-01"


def _emit(finished: FinishedSpan) -> None:
    for sink in _sinks:
        sink.put(finished)
