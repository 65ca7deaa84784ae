"""A run whose scheduler is told nonsense by strangers: it answers or skips it, and the run ends."""

from __future__ import annotations

from collections import Counter

import pytest

from tailrace.bus.calls import CODE_HEADER, REASON_HEADER
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, LeaseReport, LeaseRequest, ServerStatus
from tailrace_protos.event import EventBody
from tests.fuzz.decoders import Target
from tests.integration.scheduler.conftest import MakeRun
from tests.integration.scheduler.fakes import FakeRun

NUM_INPUTS = 300
ANSWER_S = 60.0


def inputs(name: str, kind: object) -> list[bytes]:
    """Hostile inputs of a type: valid ones with odd values, and damaged ones."""
    target = Target(f"scheduler/{name}", kind, lambda _: None)
    return [target.input_of(7, index) for index in range(NUM_INPUTS)]


async def bother(run: FakeRun) -> Counter[str]:
    """Sends every input to the scheduler; counts the answers to requests."""
    client, answers = run.bus.connection.client, Counter[str]()
    registry = await run.bus.jetstream.key_value(subjects.registry_bucket(run.run))
    reports, activities = inputs("report", LeaseReport), inputs("activity", AgentActivity)
    statuses, events = inputs("status", ServerStatus), inputs("event", EventBody)
    for index, request in enumerate(inputs("lease", LeaseRequest)):
        await client.publish(subjects.lease_report(run.run), reports[index])
        await client.publish(subjects.activity(run.run), activities[index])
        await registry.put(f"stranger-{index}", statuses[index])
        damaged = b"\xc1" + events[index]
        await run.store.command("XADD", f"{{{run.run}}}:outbox", "*", "s", "x", "b", damaged)
        answer = await client.request(subjects.lease(run.run), request, timeout=ANSWER_S)
        headers = answer.headers or {}
        code = headers.get(CODE_HEADER, "")
        assert code != "500", headers.get(REASON_HEADER)
        answers[code] += 1
    return answers


@pytest.mark.timeout(900)
async def test_a_run_ends_whatever_strangers_tell_its_scheduler(make_run: MakeRun) -> None:
    async with make_run(max_steps=6) as run:
        run.agents.max_episodes = {"train": 64, "eval": 64}  # as workers do
        await run.learner.begin()
        answers = await bother(run)
        assert answers[""] > 0, "no request got behind the decoder"
        assert sum(answers.values()) - answers[""] > 0, "no request was refused"
        run.go(run.learner.train())
        await run.until_finished()
        assert (run.statuses[-1].step, run.learner.step) == (6, 6)
        trained = [one for body in run.bodies("step_finished") for one in body["group_ids"]]
        assert len(trained) == len(set(trained)) == 24
        assert set(run.agents.played.values()) == {1}
        assert run.scheduler.process is not None
        assert "Traceback" not in run.scheduler.log
