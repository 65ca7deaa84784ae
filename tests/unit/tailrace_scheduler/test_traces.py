"""Root spans of episodes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace.tracing import FinishedSpan, Sink
from tailrace_protos.episode import EnvTask, EpisodeTask, Outcome
from tailrace_protos.event import EpisodeSettled
from tailrace_scheduler.adapters.traces import RootSpans


@pytest.fixture
def spans() -> Iterator[list[FinishedSpan]]:
    found: list[FinishedSpan] = []
    args = TracingArgs(mlflow="sqlite://", sample_rate=1.0)
    tracing.configure(RunConfig(exp_name="unit", tracing=args), "scheduler", "s")
    tracing.add_sink(Sink(found.append, lambda: None))
    yield found
    tracing.close()


def settled(started_unix_s: float) -> EpisodeSettled:
    return EpisodeSettled(
        "t1.0", "t1", 0, "train", Outcome.OK, "", 1.0, 1.0, 9, 2, 0, 0, started_unix_s, 30.0
    )


def test_the_root_lasts_from_admission_to_settlement(spans: list[FinishedSpan]) -> None:
    roots = RootSpans()
    task = EpisodeTask("t1.0", "t1", 0, 0, "train", EnvTask("lake", 1), 99.0)
    roots.admitted([task], 10.0)
    roots.admitted([task], 14.0)  # again, as a new attempt
    roots.take(settled(20.0))
    queue, root = spans
    assert root.traceparent == tracing.episode("t1.0")
    assert (root.parent, root.start_ns, root.end_ns) == ("", 10e9, 30e9)
    assert (queue.parent, queue.start_ns, queue.end_ns) == (root.traceparent, 10e9, 20e9)
    assert root.attributes["reward"] == 1.0


def test_a_scheduler_that_took_over_begins_the_root_with_the_play(spans: list[FinishedSpan]) -> None:
    RootSpans().take(settled(20.0))
    assert spans[-1].start_ns == 20e9


def test_an_episode_that_the_scheduler_ended_has_its_reason_and_no_wait_that_nobody_knows(
    spans: list[FinishedSpan],
) -> None:
    roots = RootSpans()
    task = EpisodeTask("t1.0", "t1", 0, 0, "train", EnvTask("lake", 1), 99.0)
    roots.admitted([task], 10.0)
    late = msgspec.structs.replace(settled(30.0), outcome=Outcome.TIMEOUT, reason="too late")
    roots.take(late)
    (root,) = spans
    assert (root.start_ns, root.end_ns) == (10e9, 30e9)
    assert (root.attributes["outcome"], root.attributes["reason"]) == ("timeout", "too late")
