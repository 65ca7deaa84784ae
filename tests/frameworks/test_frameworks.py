"""Agents of 20 frameworks through real agents and a real gateway, each with its packages.

Every agent plays two episodes: one plainly, one with a model that thinks and talks, streamed where the
framework can stream. The rows train exactly the tokens that the engine sampled, and the one number that
the agent returns reaches each of them.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tailrace_gateway.core.calls import ModelCalls
from tailrace_protos.episode import Outcome
from tests.frameworks.table import FRAMEWORKS, Framework, thinking
from tests.integration.workflows.conftest import world
from tests.world.workflows import WorkflowWorld, trained

__all__ = ["world"]

ROOT = Path(__file__).parents[2]
PLAYERS = Path(__file__).parent / "agents"
CAMEL = ROOT / "examples" / "frameworks" / "camel"  # its player shares a part of the example


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "thoughts_and_stream"])
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.player)
async def test_the_reward_of_an_episode_reaches_every_sampled_token(
    world: WorkflowWorld, framework: Framework, rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (CAMEL, PLAYERS):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the Internet for prices
    begin, streamed = ModelCalls.begin, []

    async def noted(calls: ModelCalls, *call: Any, streams: bool, **more: Any) -> Any:
        streamed.append(streams)
        return await begin(calls, *call, streams=streams, **more)

    monkeypatch.setattr(ModelCalls, "begin", noted)
    world.model.reply = thinking(framework.script) if rich else framework.script
    await world.start(
        f"{framework.player}.Player",
        [{"prompt": "Twice twice 21?", "stream": rich and framework.streams}],
        mode="subproc",
        subproc_max_workers=1,
        python=str(ROOT / framework.environment / "bin" / "python"),
    )
    (played,) = (await world.play()).values()
    assert played.outcome is Outcome.OK, played.reason
    assert len(world.model.requests) == framework.num_calls
    assert set(streamed) == {rich and framework.streams}
    assert [token for row in played.rows for token in trained(row)] == list(chain(*world.sampled()))
    assert [row.reward for row in played.rows] == [framework.reward] * framework.num_rows(rich)
    assert played.metrics["num_forks"] == framework.num_forks(rich)
