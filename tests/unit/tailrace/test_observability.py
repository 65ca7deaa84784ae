"""Log lines and spans."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tailrace import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

LOGGING = """
import asyncio, logging
from tailrace import log
logger = log.get_logger("made.at.import")
log.configure(service="agents", run="r1", instance_id="w3")
async def main():
    with log.bound(episode_id="e1"):
        await asyncio.create_task(inside())
    logger.info("outside")
async def inside():
    logger.warning("inside", group_id="g")
asyncio.run(main())
logging.getLogger("vendor").warning("from a vendor")
logging.getLogger("vendor").info("chatter")
try:
    1 / 0
except ZeroDivisionError as error:
    logger.error("failed", exc_info=error)
"""


def test_every_line_is_json_with_the_ids_of_who_and_what() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOGGING],
        capture_output=True,
        text=True,
        check=True,
        env={"TAILRACE_LOG": "json", "PATH": ""},
    )
    assert result.stdout == ""
    inside, outside, vendor, failed = map(json.loads, result.stderr.splitlines())
    for line in (inside, outside, vendor, failed):
        assert (line["service"], line["run"], line["instance_id"]) == ("agents", "r1", "w3")
        assert line["timestamp"].endswith("Z")
    assert (inside["event"], inside["level"], inside["module"]) == (
        "inside",
        "warning",
        "made.at.import",
    )
    assert (inside["episode_id"], inside["group_id"]) == ("e1", "g")
    assert "episode_id" not in outside
    assert vendor["event"] == "from a vendor"
    assert failed["exception"][0]["exc_type"] == "ZeroDivisionError"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.record_with(provider)
    yield exporter
    tracing.record_with(None)


def test_without_an_endpoint_a_span_only_carries_its_parent_on() -> None:
    with tracing.span("a", PARENT), tracing.span("b"):
        assert tracing.current_traceparent() == PARENT
    assert tracing.current_traceparent() == ""


def test_recorded_spans_join_the_trace_they_came_from(spans: InMemorySpanExporter) -> None:
    with tracing.span("outer", PARENT, episode_id="e1") as outer:
        sent = tracing.current_traceparent()
        outer.set(num_tokens=5)
    with tracing.span("elsewhere", sent), tracing.span("inner"):
        pass
    inner, elsewhere, first = sorted(
        spans.get_finished_spans(), key=lambda span: -(span.start_time or 0)
    )
    trace_id = int(PARENT.split("-")[1], 16)
    assert {span.context.trace_id for span in (inner, elsewhere, first)} == {trace_id}
    assert elsewhere.parent is not None
    assert first.context.span_id == elsewhere.parent.span_id
    assert inner.parent is not None
    assert inner.parent.span_id == elsewhere.context.span_id
    assert dict(first.attributes or {}) == {"episode_id": "e1", "num_tokens": 5}


def test_a_span_records_the_exception_that_ended_it(spans: InMemorySpanExporter) -> None:
    with pytest.raises(KeyError), tracing.span("fails"):
        raise KeyError("x")
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.events[0].name == "exception"


def test_garbage_from_a_caller_starts_a_new_trace(spans: InMemorySpanExporter) -> None:
    with tracing.span("a", "garbage"):
        pass
    (span,) = spans.get_finished_spans()
    assert span.parent is None
