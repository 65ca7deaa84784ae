"""Episodes of the calibration: the groups that the simulator draws, by group index, and their player.

The n-th group of a real run has the same prompts, replies and tool calls as the n-th simulated one. All
times, of engines and of tool calls, are shortened by `FASTER` on both sides.
"""

import asyncio
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tailrace.sdk import AgentLoop, EpisodeEnd, EpisodePolicy
from tailrace_cli.simulation.workload import BUILT_IN, EpisodePlan, TurnPlan, Workload

SEED_VARIABLE = "CALIBRATION_SEED"
FASTER = 8.0
TOKEN = 1  # every token of a prompt and of a reply
_EPISODE = re.compile(r"t(\d{8}).*\.(\d+)$")
_SHORT: EpisodePlan = (TurnPlan(16, 4, 0.0),)  # evaluation episodes


def _draw(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
    plans = BUILT_IN["agent"].draw(rng, members)
    return [tuple(one._replace(tool_s=one.tool_s / FASTER) for one in plan) for plan in plans]


WORKLOAD = Workload("planned", BUILT_IN["agent"].context_limit, _draw)


class PlanBook:
    """Plans of `WORKLOAD` for one seed, drawn in order."""

    def __init__(self, seed: int, group_size: int = 16) -> None:
        self._rng = np.random.default_rng(seed)
        self._group_size = group_size
        self._groups: list[list[EpisodePlan]] = []

    def group(self, index: int) -> list[EpisodePlan]:
        """Return the members' plans of a group."""
        while len(self._groups) <= index:
            self._groups.append(WORKLOAD.draw(self._rng, self._group_size))
        return self._groups[index]

    def of(self, episode_id: str) -> EpisodePlan:
        """Return the plan of an episode of a run."""
        found = _EPISODE.match(episode_id)
        return self.group(int(found[1]))[int(found[2])] if found else _SHORT


def rows(split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of the data set; plans follow from the episode instead."""
    for number in range(8):
        yield {"prompt": f"{split} {number}", "agent_name": "planned"}


class PlannedLoop(AgentLoop):
    """Plays the plan of its episode: replies of planned lengths, and waits for tool calls."""

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> EpisodeEnd:
        """See `AgentLoop`."""
        ids = np.empty(0, np.int32)
        for turn in _plans().of(policy.episode_id):
            ids = np.concatenate([ids, np.full(turn.input_tokens, TOKEN, np.int32)])
            reply = await policy.generate(ids, turn.output_tokens)
            ids = np.concatenate([ids, reply.token_ids])
            if turn.tool_s:
                await asyncio.sleep(turn.tool_s)
        return policy.finish(reward=float(policy.episode_id.endswith(("0", "2", "4", "6", "8"))))


_books: list[PlanBook] = []


def _plans() -> PlanBook:
    if not _books:
        _books.append(PlanBook(int(os.environ[SEED_VARIABLE])))
    return _books[0]
