"""Workloads: groups of episodes, each a sequence of turns with tool waits between them.

Lengths of siblings are correlated: the logarithm of a length is a share of the group's and the rest its
own. `logn` and `pareto` have one turn, `agent` has many.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CORRELATION = 0.5  # of log lengths between siblings
LONGEST = 32_768
# With these the mean reply has 4,096 tokens after it is cut at `LONGEST`.
LOGN_MEDIAN = 2530.6  # sigma 1
PARETO_ALPHA, PARETO_LEAST = 1.6, 1719.3
NORMAL = NormalDist()


class TurnPlan(NamedTuple):
    """One turn of an episode."""

    input_tokens: int  # new: prompt or observation
    output_tokens: int
    tool_s: float  # after it; 0 after the last


EpisodePlan = tuple[TurnPlan, ...]


class Workload(NamedTuple):
    """Groups to draw, one after the other."""

    name: str
    context_limit: int
    draw: Callable[[np.random.Generator, int], list[EpisodePlan]]  # a group of so many members


def correlated(rng: np.random.Generator, members: int) -> np.ndarray:
    """Return standard normal numbers of siblings: [members]."""
    shared = rng.standard_normal()
    return math.sqrt(CORRELATION) * shared + math.sqrt(1 - CORRELATION) * rng.standard_normal(members)


def _logn(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
    lengths = LOGN_MEDIAN * np.exp(correlated(rng, members))
    return [(TurnPlan(512, _reply(one), 0.0),) for one in lengths]


def _pareto(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
    ranks = (NORMAL.cdf(one) for one in correlated(rng, members))
    lengths = [PARETO_LEAST * (1 - rank) ** (-1 / PARETO_ALPHA) for rank in ranks]
    return [(TurnPlan(512, _reply(one), 0.0),) for one in lengths]


def _reply(tokens: float) -> int:
    return max(min(int(tokens), LONGEST), 1)


def _agent(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
    counts = np.exp(math.log(9) + 0.75 * correlated(rng, members)).round().clip(2, 40)
    return [_agent_episode(rng, int(count)) for count in counts]


def _agent_episode(rng: np.random.Generator, num_turns: int) -> EpisodePlan:
    seen = np.exp(math.log(300) + rng.standard_normal(num_turns)).clip(1, 4096).astype(int).tolist()
    replies = (np.exp(math.log(170) + 0.9 * rng.standard_normal(num_turns)) + 8).astype(int).tolist()
    tools = np.exp(math.log(2.0) + 1.2 * rng.standard_normal(num_turns))
    slow = rng.random(num_turns) < 0.03
    tools = np.where(slow, np.minimum(30 * (1 + rng.pareto(1.2, num_turns)), 600), tools).tolist()
    turns, context = [], 0
    for turn in range(num_turns):
        new = 1500 if turn == 0 else seen[turn]
        if turn and context + new + 8 > LONGEST:
            break
        reply = min(replies[turn], LONGEST - context - new)
        context += new + reply
        turns.append(TurnPlan(new, reply, tools[turn]))
    turns[-1] = turns[-1]._replace(tool_s=0.0)
    return tuple(turns)


BUILT_IN = {
    "logn": Workload("logn", LONGEST + 512, _logn),
    "pareto": Workload("pareto", LONGEST + 512, _pareto),
    "agent": Workload("agent", LONGEST, _agent),
}


def natural_tokens(plan: EpisodePlan) -> int:
    """Return the tokens that an episode samples if nothing cuts it."""
    return sum(turn.output_tokens for turn in plan)
