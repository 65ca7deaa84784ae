"""With a short history the policy still reads its task: once, at the beginning of what it sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailrace.sdk.env import Env
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.model import EnvView
from tailrace_envs import frozen_lake, make_env
from tailrace_envs.maths.environment import INSTRUCTION
from tailrace_envs.sokoban import environment as sokoban
from tailrace_envs.webshop import environment as webshop
from tailrace_protos.base import as_int32, as_int64, as_uint8
from tailrace_protos.session import ExportStyle
from tests.unit.tailrace_agents.env_world import LIMITS, play_env
from tests.unit.tailrace_agents.fakes import ListJournal
from tests.unit.tailrace_agents.loops.world import ChatPolicy, chat_renderer

ROOM = LIMITS._replace(max_episode_tokens=100_000)
TWO_TURNS = EnvView(ExportStyle.STEP, 2)
TASK = "Open the right door."


class Doors:
    """Eight doors; what `reset` says besides its observation is up to the test."""

    def __init__(self, info: dict[str, Any] | None = None) -> None:
        self.info = info or {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.door = 0
        return f"{TASK} Door 0.", self.info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.door += 1
        return f"Door {self.door}.", 0.0, self.door == 8, False, {}

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass


async def play(
    env: Env,
    policy: ChatPolicy,
    journal: ListJournal | None = None,
    view: EnvView = TWO_TURNS,
) -> EpisodeResult:
    return await play_env(env, chat_renderer(), policy, seed=0, limits=ROOM, view=view, journal=journal)


def hesitant() -> ChatPolicy:
    return ChatPolicy(by_prompt=lambda prompt: "Hm.")


@pytest.mark.parametrize(
    ("env_type", "config", "task", "num_seen"),
    [
        ("frozen_lake", {"instructions": True}, frozen_lake.RULES, 1),
        ("sokoban", {"instructions": True}, sokoban.RULES, 1),
        ("webshop", {"instructions": True}, webshop.RULES, 1),
        ("webshop", {"repeat_instruction": False}, "Instruction: ", 1),
        ("webshop", {"repeat_instruction": True}, "Instruction: ", 3),  # of every page in sight
        ("maths", {"max_attempts": 8, "instructions": True}, INSTRUCTION, 1),
        ("maths", {"max_attempts": 8}, "", 1),
        ("gymnasium", {"id": "FrozenLake-v1", "instructions": "Be quick.\n"}, "Be quick.\n", 1),
    ],
)
async def test_the_task_stands_once_in_a_window_that_begins_after_it(
    env_type: str, config: dict[str, Any], task: str, num_seen: int
) -> None:
    env = make_env(env_type, config)
    task = task or env.reset(seed=0)[0]  # the question of `maths`
    policy = hesitant()
    await play(env, policy)
    assert policy.prompts[5].count("<|start|>assistant") == 3  # two turns and the one to sample
    assert [prompt.count(task) for prompt in policy.prompts[3:6]] == [num_seen] * 3


async def test_a_window_of_a_game_without_instructions_begins_with_its_board() -> None:
    env = make_env("frozen_lake", {})
    policy = hesitant()
    await play(env, policy)
    assert policy.prompts[0].startswith("<|start|>user\nP")
    assert policy.prompts[5].startswith("<|start|>user\nInvalid action.\nP")


@pytest.mark.parametrize(
    ("info", "opening"),
    [
        ({}, f"{TASK} Door 0.\n"),
        ({"instructions": TASK}, f"{TASK}\n"),
        ({"instructions": f"{TASK}\n"}, f"{TASK}\n"),
        ({"instructions": ""}, ""),
    ],
)
async def test_an_environment_of_yours_says_what_stays_in_sight(
    info: dict[str, Any], opening: str
) -> None:
    policy = hesitant()
    await play(Doors(info), policy)
    reply = "<|start|>assistant\nHm.<|end|>"
    assert policy.prompts[2].startswith(f"<|start|>user\n{TASK} Door 0.<|end|>{reply}")
    assert policy.prompts[4] == (
        f"<|start|>user\n{opening}Door 2.<|end|>{reply}<|start|>user\nDoor 3.<|end|>{reply}"
        "<|start|>user\nDoor 4.<|end|><|start|>assistant\n"
    )


async def test_rows_hold_what_was_asked_and_observations_keep_their_names() -> None:
    policy = hesitant()
    windows = await play(Doors(), policy)
    (whole,) = (await play(Doors(), hesitant(), view=EnvView())).transcript.rows(1.0)
    rows = windows.transcript.rows(1.0)
    for row, prompt in zip(rows, policy.prompt_ids, strict=True):
        context = as_int32(row.token_ids)[as_uint8(row.loss_mask) == 0]
        assert context.tolist() == prompt
    names = np.concatenate([as_int64(row.turn_hashes) for row in rows])
    assert names.tolist() == as_int64(whole.turn_hashes).tolist()


async def test_a_resumed_episode_asks_what_the_first_worker_would_have_asked() -> None:
    journal, first, second = ListJournal(), hesitant(), hesitant()
    await play(Doors(), first, journal)
    resumed = await play(Doors(), second, ListJournal(journal.records[:5]))
    assert resumed.num_replayed_turns == 5
    assert second.prompt_ids == first.prompt_ids[5:]


async def test_what_stays_in_sight_counts_towards_the_longest_prompt() -> None:
    policy = hesitant()
    await play(Doors(), policy)
    longest = max(map(len, policy.prompt_ids))
    limits = ROOM._replace(max_episode_tokens=longest)
    cut = await play_env(Doors(), chat_renderer(), hesitant(), seed=0, limits=limits, view=TWO_TURNS)
    asked = [len(ids) for ids in policy.prompt_ids]
    assert cut.transcript.num_turns == asked.index(longest)
