"""The examples' agents with the real packages, through real agents and gateway: what they say, call and
are paid for, and that the rows hold exactly what the engine sampled."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tailrace_protos.episode import Outcome
from tailrace_protos.generation import GenerateRequest
from tailrace_protos.trajectory import Trajectory
from tests.world.byte_model import call_text
from tests.world.workflows import WorkflowWorld, trained

ROOT = Path(__file__).parents[3]
CAMEL = ROOT / ".venv-camel" / "bin" / "python"
READY = ROOT / ".venv-camel" / "ready"


def calls_double(prompt: str, request: GenerateRequest) -> str:
    """First the tool, then its result."""
    if "<tool_response>" in prompt:
        return prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0]
    return call_text("double", number=21)


async def play(world: WorkflowWorld, agent: str, prompt: str, **workflow: Any) -> Trajectory:
    await world.start(agent, [{"prompt": prompt}], **workflow)
    (played,) = (await world.play()).values()
    assert played.outcome is Outcome.OK, played.reason
    assert [trained(row) for row in played.rows] == [list(chain.from_iterable(world.sampled()))]
    assert played.metrics["num_forks"] == 0
    return played


async def test_the_openai_sdk(world: WorkflowWorld) -> None:
    world.model.reply = lambda prompt, request: "42"
    played = await play(world, "openai_sdk_agent.DigitAgent", "A number?")
    assert len(world.model.requests) == 2
    assert [row.reward for row in played.rows] == [2.0]


async def test_the_anthropic_sdk(world: WorkflowWorld) -> None:
    world.model.reply = lambda prompt, request: "4 2"
    world.model.chunk = 1
    played = await play(world, "anthropic_sdk_agent.DigitAgent", "A number?")
    assert played.reward == pytest.approx(2 / 3)
    assert "Answer in digits." in world.model.prompt()


@pytest.mark.parametrize(
    ("agent", "settings"),
    [
        ("openai_agents_agent.Clerk", {}),
        ("langgraph_agent.GraphWorkflow", {}),
        pytest.param(
            "camel_agent.Clerk",
            {"mode": "subproc", "subproc_max_workers": 1, "python": str(CAMEL)},
            marks=pytest.mark.skipif(not READY.exists(), reason="no .venv-camel: run make test-camel"),
        ),
    ],
)
async def test_a_framework_calls_a_tool_and_answers(
    world: WorkflowWorld, agent: str, settings: dict[str, Any]
) -> None:
    world.model.reply = calls_double
    played = await play(world, agent, "Twice 21?", **settings)
    assert len(world.model.requests) == 2
    assert "double" in world.model.prompt(0)
    assert "42" in world.model.prompt(1)
    assert played.reward == 1.0
    assert [row.reward for row in played.rows] == [1.0]


async def test_a_graph_as_an_agent_loop(world: WorkflowWorld) -> None:
    world.model.reply = calls_double
    rows = [{"prompt": "Twice 21?", "agent_name": "graph_loop"}]
    settings = {**world.settings("unused", rows), "workflow": None}
    settings["agent_loops"] = {"graph_loop": "langgraph_agent:GraphLoop"}
    await world.agents.start_agents(**settings)
    (played,) = (await world.play()).values()
    assert played.outcome is Outcome.OK, played.reason
    assert played.reward == 1.0
    (row,) = played.rows
    assert trained(row) == [token for call in world.sampled() for token in call]
