"""The keys that say what a row is, through the players that a worker makes of its configuration."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tailrace.config import ConfigError, RunConfig
from tailrace.policy.activity import Stages
from tailrace.tools import LocalTools
from tailrace_agents.adapters.casting import Cast
from tailrace_agents.config import AgentsConfig, EnvEntry, LoopArgs, WorkflowArgs, check_with_run
from tailrace_agents.ports import NoJournal
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow
from tests.unit.tailrace_agents.fakes import ScriptedPolicy, renderer


def run_of(**settings: Any) -> RunConfig:
    return RunConfig(exp_name="unit", **settings)


async def played(run: RunConfig, **entry: Any) -> tuple[tuple[TokenRow, ...], list[list[int]]]:
    """Rows of one episode of four turns, and the prompts of its turns."""
    config = {"size": 4, "max_turns": 4}
    agents = AgentsConfig(
        custom_envs={"lake": EnvEntry(env_type="frozen_lake", env_config=config, **entry)}
    )
    task = EpisodeTask("g.0", "g", 0, 0, "train", EnvTask("lake", 5), time.time() + 60)
    policy = ScriptedPolicy(*["Left"] * 4)
    with ThreadPoolExecutor(1) as threads:
        cast = Cast(agents, run, "test", threads, Stages())
        players = cast.players(renderer(), policy, LocalTools([]), lambda: False)
        result = await players["lake"].play(task, NoJournal())
    return result.tokens.rows(1.0).rows, policy.prompts


async def test_granularity_decides_what_a_row_is() -> None:
    (whole,), _ = await played(run_of())
    rows, _ = await played(run_of(granularity="step"))
    assert whole.first_turn == -1
    assert [row.first_turn for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("default", [ExportStyle.CONCAT, ExportStyle.INDIVIDUAL])
def test_loops_and_workflows_export_turns_too(default: ExportStyle) -> None:
    def style(given: str | None, **settings: Any) -> ExportStyle:
        with ThreadPoolExecutor(1) as threads:
            cast = Cast(AgentsConfig(), run_of(**settings), "test", threads, Stages())
        return cast._style(given, default)

    assert style(None, granularity="step") is ExportStyle.STEP
    assert style(None) is default
    assert style("individual") is ExportStyle.INDIVIDUAL


async def test_history_turns_decides_what_the_policy_sees() -> None:
    run = run_of(granularity="step")
    _, all_turns = await played(run)
    _, one_turn = await played(run, history_turns=1)
    assert all_turns[:2] == one_turn[:2]
    assert len(one_turn[3]) < len(all_turns[3])


@pytest.mark.parametrize(
    ("agents", "named"),
    [
        (AgentsConfig(loop_args=LoopArgs(export_style="concat")), "loop_args.export_style"),
        (
            AgentsConfig(workflow=WorkflowArgs(agent="a.B", export_style="individual")),
            "workflow.export_style",
        ),
    ],
)
def test_two_ways_to_say_what_a_row_is_are_refused(agents: AgentsConfig, named: str) -> None:
    check_with_run(agents, run_of())
    with pytest.raises(ValueError, match=named):
        check_with_run(agents, run_of(granularity="step"))


async def test_a_window_without_rows_of_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="history_turns needs granularity"):
        await played(run_of(), history_turns=2)


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="history_turns"):
        EnvEntry(env_type="frozen_lake", history_turns=-1)
