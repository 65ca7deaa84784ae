"""Spans of an optimizer step and of the episodes that it trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace.tracing import FinishedSpan, Sink
from tailrace_learner.adapters.observation import StepTrace
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.event import StepFinished
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup

FINISHED = StepFinished("l", 3, 3, ("t1", "t2"), 0, 20.0, 30.0, {})


@pytest.fixture
def spans() -> Iterator[list[FinishedSpan]]:
    found: list[FinishedSpan] = []
    tracing.configure(
        RunConfig(exp_name="unit", tracing=TracingArgs(mlflow="sqlite://", sample_rate=0.5)),
        "learner",
        "l",
    )
    tracing.add_sink(Sink(found.append, lambda: None))
    yield found
    tracing.close()


def group(group_id: str, size: int) -> TrajectoryGroup:
    def member(number: int) -> Trajectory:
        task = EnvTask("lake", 1)
        name = f"{group_id}.{number}"
        return Trajectory(name, group_id, number, 0, "train", task, Outcome.OK, "", 1.0, {}, 5.0, 12.0)

    return TrajectoryGroup(group_id, 1, tuple(map(member, range(size))))


def test_a_step_is_below_its_first_sampled_episode_and_linked_to_the_others(
    spans: list[FinishedSpan],
) -> None:
    trace, groups = StepTrace(), [group("t1", 8), group("t2", 8)]
    for number, each in enumerate(groups):
        trace.take([each], 15.0 + number)
    step = trace.end(FINISHED)
    names = [member.episode_id for each in groups for member in each.members]
    roots = [root for root in map(tracing.episode, names) if root]
    assert 1 < len(roots) < len(names)
    buffered = [span for span in spans if span.name == "buffer"]
    assert [span.parent for span in buffered] == roots
    assert {(span.start_ns, span.end_ns) for span in buffered} == {(12e9, 15e9), (12e9, 16e9)}
    (found,) = (span for span in spans if span.name == "train step")
    assert (found.traceparent, found.parent, list(found.links)) == (step, roots[0], roots[1:])
    others = [span for span in spans if span.name == "train"]
    assert [span.parent for span in others] == roots[1:]
    assert {span.links for span in others} == {(step,)}


def test_a_step_without_a_sampled_episode_has_no_span(spans: list[FinishedSpan]) -> None:
    trace = StepTrace()
    trace.take([group("t1", 0)], 15.0)
    assert trace.end(FINISHED) == ""
    assert spans == []
