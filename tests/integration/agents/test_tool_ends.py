"""Episodes whose tools misbehave, in a real agents service: their outcomes, and what is left."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import pytest

from tailrace.bus import Bus
from tailrace.sdk import tool
from tailrace.store import StoreConnection
from tailrace.tools import ToolWorker
from tailrace_protos.base import as_int32
from tailrace_protos.episode import Outcome
from tests.integration.agents.test_loops import ChatServer, start_chat, world
from tests.integration.tools.test_workers import line_of, worker_process
from tests.unit.tailrace_agents.loops.world import calls, text_of
from tests.world.agents import AgentsWorld
from tests.world.servers import ServerProcess
from tests.world.serving import eventually

__all__ = ["world"]

NUM_BYTES = 10_000_000
MAX_CHARS = 300


@tool
def flood() -> str:
    """Say far more than any message may hold."""
    return "x" * NUM_BYTES


@tool(timeout_s=0.2)
async def endless() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


def uses_its_tool(prompt: str) -> str:
    """Calls the tool that the question names, then is done."""
    name = prompt.partition("Use ")[2].partition(".")[0]
    return "done" if "<|start|>tool\n" in prompt else calls((name, {}))


@pytest.fixture
async def worker(world: AgentsWorld, bus: Bus, redis: StoreConnection) -> AsyncIterator[ToolWorker]:
    made = ToolWorker([flood, endless], bus, run=world.run, redis=redis)
    await made.start()
    yield made
    await made.close()


def told(server: ChatServer, question: str) -> set[str]:
    """Results of tools that the model read, in the last prompts of a question."""
    prompts = [text_of(as_int32(request.prompt_ids)) for request in server.requests]
    answers = [prompt.partition("<|start|>tool\n")[2] for prompt in prompts if question in prompt]
    return {answer.partition("<|end|>")[0] for answer in answers if answer}


async def test_every_bad_end_of_a_tool_is_an_outcome_and_all_groups_close(
    world: AgentsWorld, worker: ToolWorker, nats_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"Use {name}.", "tools": [name]} for name in ("flood", "endless", "stuck")]
    path = world.folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(ChatServer, "reply", staticmethod(uses_its_tool))
    server = await start_chat(world)
    with worker_process(nats_server.url, world.run) as victim:
        await world.start_agents(loop_args={"max_tool_output_chars": MAX_CHARS})
        tasks = await world.admit(num_groups=3, group_size=2, env_name="questions")
        assert {await line_of(victim), await line_of(victim)} == {"stuck"}
        victim.send_signal(signal.SIGKILL)
        settled = await world.settled(len(tasks))
    stuck = {
        one.episode_id for one in server.requests if "Use stuck" in text_of(as_int32(one.prompt_ids))
    }
    assert {settled[episode_id].outcome for episode_id in stuck} == {Outcome.INFRA_FAILURE}
    assert all("died" in settled[episode_id].reason for episode_id in stuck)
    trajectories = await world.trajectories(2)
    assert {*trajectories} | stuck == {*settled}
    assert {one.outcome for one in trajectories.values()} == {Outcome.OK}
    assert told(server, "Use endless") == {"endless did not answer within 0.2 s"}
    (flooded,) = told(server, "Use flood")
    assert flooded.count("x") <= MAX_CHARS
    assert str(NUM_BYTES - MAX_CHARS)[:4] in flooded
    await eventually(lambda: not worker.host.num_running and not worker.host.session_ids)
    assert worker.host.num_abandoned == 0
