"""Environments of verifiers that only a workflow can play, since they offer tools or rewrite what was
said: with the real package in its own environment, through real agents and gateway."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tailrace_protos.episode import Outcome
from tailrace_protos.generation import GenerateRequest
from tailrace_protos.trajectory import Trajectory
from tests.world.byte_model import call_text, renderer
from tests.world.workflows import WorkflowWorld, trained

ENVS = Path(__file__).parents[3] / ".venv-envs"
pytestmark = pytest.mark.skipif(
    not (ENVS / "ready").exists(), reason="no .venv-envs: run make test-envs"
)

REWRITING = """
import verifiers
from datasets import Dataset


class Forgetful(verifiers.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": "And now?"}]

    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


def num_replies(state):
    return float(len(state["trajectory"]))


def load_environment():
    rows = Dataset.from_list([{"question": "Begin.", "answer": ""}])
    return Forgetful(dataset=rows, max_turns=2, rubric=verifiers.Rubric(funcs=[num_replies]))
"""


async def play(
    world: WorkflowWorld, env_id: str, row: dict[str, Any], max_new_tokens: int = 4096
) -> Trajectory:
    settings = world.settings(
        "verifiers_agent.Player",
        [row],
        kwargs={"env_id": env_id},
        mode="subproc",
        subproc_max_workers=1,
        python=str(ENVS / "bin" / "python"),
    )
    await world.gateway.start_gateway()
    await world.agents.start_agents(**settings, generating_args={"max_new_tokens": max_new_tokens})
    (played,) = (await world.play()).values()
    # A conversation is a row: its replies follow each other there.
    assert [token for row in played.rows for token in trained(row)] == list(chain(*world.sampled()))
    return played


def asks_add(prompt: str, request: GenerateRequest) -> str:
    """First the tool, then its result."""
    if "<tool_response>" in prompt:
        return prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0]
    return call_text("add", left=3, right=3)


async def test_its_tool_is_called_and_its_rubric_pays_every_call(world: WorkflowWorld) -> None:
    world.model.reply = asks_add
    played = await play(world, "sums_env", {"row": 2, "split": "train"})
    assert played.outcome is Outcome.OK, played.reason
    assert "The sum of two numbers." in world.model.prompt(0)
    assert "3 + 3?" in world.model.prompt(0)
    assert "<tool_response>6</tool_response>" in world.model.prompt(1)
    assert [row.reward for row in played.rows] == [1.0]
    assert played.metrics["num_forks"] == 0


async def test_rows_of_evaluation_are_those_that_the_environment_has_for_it(
    world: WorkflowWorld,
) -> None:
    world.model.reply = lambda prompt, request: "6"
    played = await play(world, "sums_env", {"row": 2, "split": "held_out"})
    assert "11 + 11?" in world.model.prompt(0)
    assert (played.outcome, played.reward) == (Outcome.OK, 0.0)


async def test_messages_that_it_rewrites_are_trained_as_they_were_sent(
    world: WorkflowWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forgetful_env.py").write_text(REWRITING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    played = await play(world, "forgetful_env", {"row": 0, "split": "train"})
    assert (played.outcome, played.reward) == (Outcome.OK, 2.0), played.reason
    assert ["Begin." in world.model.prompt(number) for number in range(2)] == [True, False]


async def test_a_policy_that_never_comes_to_an_end_fails_and_is_paid_nothing(
    world: WorkflowWorld,
) -> None:
    call = call_text("add", left=3, right=3)
    world.model.reply = lambda prompt, request: call
    budget = 2 * len(renderer().reply_ids(call))
    played = await play(world, "sums_env", {"row": 2, "split": "train"}, max_new_tokens=budget)
    assert (played.outcome, played.reward) == (Outcome.POLICY_FAILURE, 0.0), played.reason
