"""The keys that say what a row is, through the players that a worker makes of its configuration."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError, RunConfig
from tailrace.data import DatasetEntry
from tailrace.policy.activity import Stages
from tailrace.sdk import AgentLoop
from tailrace.tools import LocalTools
from tailrace_agents.adapters.player_factory import PlayerFactory, WorkflowStage
from tailrace_agents.config import AgentsConfig, EnvEntry, LoopArgs, WorkflowArgs, check_with_run
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import NoJournal
from tailrace_protos.base import as_int32, as_uint8
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow
from tests.unit.tailrace_agents.fakes import ScriptedPolicy, renderer
from tests.unit.tailrace_agents.loops.world import ChatPolicy, chat_renderer
from tests.unit.tailrace_agents.loops.world import task as loop_task
from tests.unit.tailrace_agents.test_workflow_player import World as WorkflowWorld


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
        factory = PlayerFactory(agents, run, "test", threads, Stages())
        players = factory.players(TokenModel(renderer(), policy), LocalTools([]), lambda: False)
        result = await players["lake"].play(task, NoJournal())
    return result.transcript.rows(1.0), policy.prompts


async def test_granularity_decides_what_a_row_is() -> None:
    (whole,), _ = await played(run_of())
    rows, _ = await played(run_of(granularity="step"))
    assert whole.first_turn == -1
    assert [row.first_turn for row in rows] == [0, 1, 2, 3]


class TwoTurns(AgentLoop):
    """Asks twice in one conversation."""

    async def run(self, row: dict[str, Any], policy: Any) -> float:
        messages = [ChatMessage("user", row["prompt"])]
        messages.append(await policy.chat(messages))
        messages.append(ChatMessage("user", "Sure?"))
        await policy.chat(messages)
        return 1.0


def rows_config(folder: Path, **settings: Any) -> AgentsConfig:
    """A data set of one row, played by `TwoTurns` unless a workflow does."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Go.", "agent_name": "two_turns"}))
    loops = {"two_turns": f"{__name__}:TwoTurns"}
    return AgentsConfig(datasets={"rows": DatasetEntry(path=str(path))}, agent_loops=loops, **settings)


async def played_rows(
    run: RunConfig, agents: AgentsConfig, stage: WorkflowStage | None = None
) -> tuple[tuple[TokenRow, ...], ChatPolicy]:
    """The rows of the data set's one episode, and who was asked."""
    policy = ChatPolicy("A", "B")
    with ThreadPoolExecutor(1) as threads:
        factory = PlayerFactory(agents, run, "test", threads, Stages())
    players = factory.players(TokenModel(chat_renderer(), policy), LocalTools([]), lambda: False, stage)
    result = await players["rows"].play(loop_task(), NoJournal())
    return result.transcript.rows(1.0), policy


@pytest.mark.parametrize(
    ("granularity", "style", "firsts"),
    [("trajectory", None, [-1]), ("step", None, [0, 1]), ("trajectory", "individual", [-1, -1])],
)
async def test_a_loop_s_model_calls_are_one_row_or_a_line_of_turns(
    granularity: str, style: Any, firsts: list[int], tmp_path: Path
) -> None:
    agents = rows_config(tmp_path, loop_args=LoopArgs(export_style=style))
    rows, policy = await played_rows(run_of(granularity=granularity), agents)
    assert [row.first_turn for row in rows] == firsts
    sampled = [chat_renderer().reply_ids(reply).tolist() for reply in "AB"]
    trained = [as_int32(row.token_ids)[as_uint8(row.loss_mask) == 1].tolist() for row in rows]
    assert trained == (sampled if len(firsts) == 2 else [sampled[0] + sampled[1]])
    last = as_int32(rows[-1].token_ids).tolist()
    assert last[: len(policy.prompt_ids[1])] == policy.prompt_ids[1]


@pytest.mark.parametrize(
    ("granularity", "style", "asked"),
    [
        ("trajectory", None, ExportStyle.CONCAT),
        ("step", None, ExportStyle.STEP),
        ("trajectory", "individual", ExportStyle.INDIVIDUAL),
    ],
)
async def test_a_workflow_s_session_is_exported_as_the_run_says(
    granularity: str, style: Any, asked: ExportStyle, tmp_path: Path
) -> None:
    agents = rows_config(tmp_path, workflow=WorkflowArgs(agent="a.B", export_style=style))
    gateway = WorkflowWorld()
    await played_rows(run_of(granularity=granularity), agents, WorkflowStage(gateway, gateway))
    assert [export.export_style for export in gateway.exports] == [asked]


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
