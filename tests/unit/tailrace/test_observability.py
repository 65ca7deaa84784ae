"""Log lines and spans."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace.tracing import FinishedSpan, Sink, background
from tailrace.tracing.background import BackgroundQueue

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

LOGGING = """
import asyncio, logging, threading
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
thread = threading.Thread(target=logger.warning, args=("in a thread",))
thread.start()
thread.join()
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
    inside, outside, vendor, thread, failed = map(json.loads, result.stderr.splitlines())
    for line in (inside, outside, vendor, thread, failed):
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
def spans() -> Iterator[list[FinishedSpan]]:
    found: list[FinishedSpan] = []
    tracing.add_sink(Sink(found.append, lambda: None))
    yield found
    tracing.close()


@pytest.fixture
def sampled(spans: list[FinishedSpan], monkeypatch: pytest.MonkeyPatch) -> list[FinishedSpan]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    args = TracingArgs(mlflow="sqlite://", sample_rate=0.25)
    tracing.configure(RunConfig(exp_name="unit", tracing=args), "agents", "a1")
    return spans


def test_without_a_receiver_a_span_only_carries_its_parent_on() -> None:
    with tracing.span("a", PARENT), tracing.span("b"):
        assert tracing.current_traceparent() == PARENT
    assert tracing.current_traceparent() == ""
    assert tracing.episode("e1") == ""


def test_a_service_without_a_receiver_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, tailrace.runtime, tailrace.tracing as t; from tailrace.config import RunConfig; "
        "t.configure(RunConfig(exp_name='x'), 'agents', 'a'); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    assert result.stdout.strip() == "[]"


def test_recorded_spans_join_the_trace_they_came_from(spans: list[FinishedSpan]) -> None:
    with tracing.span("outer", PARENT, episode_id="e1") as outer:
        sent = tracing.current_traceparent()
        outer.set(num_tokens=5)
    with tracing.span("elsewhere", sent), tracing.span("inner"):
        pass
    first, inner, elsewhere = spans
    assert {span.trace_id for span in spans} == {PARENT.split("-")[1]}
    assert first.parent == PARENT
    assert elsewhere.parent == first.traceparent == sent
    assert inner.parent == elsewhere.traceparent
    assert first.attributes == {"episode_id": "e1", "num_tokens": 5}
    assert elsewhere.start_ns <= inner.start_ns <= inner.end_ns <= elsewhere.end_ns


def test_a_span_records_the_exception_that_ended_it(spans: list[FinishedSpan]) -> None:
    with pytest.raises(KeyError), tracing.span("fails", PARENT):
        raise KeyError("x")
    assert spans[0].error == "KeyError: 'x'"
    assert tracing.current_traceparent() == ""


@pytest.mark.parametrize("parent", ["", "garbage", PARENT[:-1] + "0", PARENT.upper()])
def test_work_outside_of_a_sampled_trace_has_no_span(spans: list[FinishedSpan], parent: str) -> None:
    with tracing.span("a", parent):
        tracing.record("b", parent, 1.0, 2.0)
    assert spans == []


def test_the_share_of_sampled_episodes_is_that_of_the_setting(sampled: list[FinishedSpan]) -> None:
    roots = {name: tracing.episode(name) for name in map("t{:08d}.0".format, range(2000))}
    kept = [root for root in roots.values() if root]
    assert 400 < len(kept) < 600
    assert len(set(kept)) == len(kept)
    assert roots == {name: tracing.episode(name) for name in roots}, "every service finds the same"


def test_two_starts_of_a_run_have_different_traces(
    sampled: list[FinishedSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.SALT_VARIABLE, "second")
    run = RunConfig(exp_name="unit", tracing=TracingArgs(mlflow="sqlite://", sample_rate=1.0))
    tracing.configure(run, "agents", "a1")
    second = tracing.episode("t00000000.0")
    monkeypatch.setenv(tracing.SALT_VARIABLE, "third")
    tracing.configure(run, "agents", "a1")
    assert second[3:35] != tracing.episode("t00000000.0")[3:35]


def test_log_lines_inside_of_a_trace_have_its_id() -> None:
    code = (
        "from tailrace import log, tracing; log.configure(service='agents'); "
        "logger = log.get_logger('x'); logger.info('outside')\n"
        f"with tracing.carried('{PARENT}'): logger.info('inside')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"TAILRACE_LOG": "json", "PATH": ""},
    )
    outside, inside = map(json.loads, result.stderr.splitlines())
    assert "trace_id" not in outside
    assert inside["trace_id"] == PARENT.split("-")[1]


def test_a_receiver_that_hangs_costs_dropped_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, taken = threading.Event(), threading.Event()

    def send(batch: list[int]) -> None:
        taken.set()
        hanging.wait()

    queue = BackgroundQueue("hangs", send, (OSError,), "", max_items=8, close_s=0.1)
    queue.put(0)
    assert taken.wait(60)
    for number in range(100):
        queue.put(number)
    queue.close()  # it hangs still
    labels = {"receiver": "hangs", "result": "dropped"}
    assert REGISTRY.get_sample_value("tailrace_tracing_spans_total", labels) == 101, (
        "with the one in flight"
    )
    hanging.set()


def test_a_queue_that_fills_before_its_interval_is_over_is_sent_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_INTERVAL_S", 3600.0)
    sent = threading.Event()
    queue = BackgroundQueue("fills", lambda _: sent.set(), (OSError,), "", max_items=8)
    for number in range(8):
        queue.put(number)
    assert sent.wait(60)
    queue.close()
    labels = {"receiver": "fills", "result": "dropped"}
    assert REGISTRY.get_sample_value("tailrace_tracing_spans_total", labels) == 0


def test_an_item_that_is_refused_takes_no_other_with_it_in_batches_of_one() -> None:
    sent, is_over = [], threading.Event()

    def send(batch: list[int]) -> None:
        if 1 in batch:
            raise OSError("too large")
        sent.extend(batch)
        if 2 in batch:
            is_over.set()

    queue = BackgroundQueue("one by one", send, (OSError,), "", max_items=4, max_batch=1)
    for number in range(3):
        queue.put(number)
    assert is_over.wait(60)
    queue.close()
    assert sent == [0, 2]


def test_a_receiver_that_fails_is_counted_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_CLOSE_FAILING_S", 60.0)  # a busy machine runs its thread late
    fails, sent = threading.Event(), []
    fails.set()
    failed = threading.Event()

    def send(batch: list[int]) -> None:
        if fails.is_set():
            failed.set()
            raise OSError("refused")
        sent.extend(batch)

    queue = BackgroundQueue("fails", send, (OSError,), "start it")
    queue.put(1)
    assert failed.wait(60)
    fails.clear()
    queue.put(2)
    queue.close()
    samples = {
        result: REGISTRY.get_sample_value(
            "tailrace_tracing_spans_total", {"receiver": "fails", "result": result}
        )
        for result in ("sent", "failed", "dropped")
    }
    assert sent == [2]
    assert samples == {"sent": 1, "failed": 1, "dropped": 0}
