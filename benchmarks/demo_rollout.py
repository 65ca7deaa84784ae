"""FrozenLake episodes in lock step in one process: the rollout half of the yardstick loop.

A turn has at most two sampled tokens, an action word and the end of turn, so two passes of the model
make a turn of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.demo_model import KvSampler
from tailrace.chat import Renderer
from tailrace_envs import make_env


@dataclass(slots=True)
class Episode:
    """One finished episode: everything inserted and sampled, in order."""

    token_ids: list[int] = field(default_factory=list)  # [T]
    loss_mask: list[int] = field(default_factory=list)  # [T], 1 on sampled tokens
    inference_logprobs: list[float] = field(default_factory=list)  # [T], 0 on inserted tokens
    reward: float = 0.0
    success: float = 0.0

    def insert(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.token_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        self.inference_logprobs += [0.0] * len(token_ids)

    def sample(self, token_id: int, logprob: float) -> None:
        """Append a token of the model."""
        self.token_ids.append(token_id)
        self.loss_mask.append(1)
        self.inference_logprobs.append(logprob)


class Row:
    """A running episode: its environment and the tokens that the sampler has not seen yet."""

    def __init__(self, renderer: Renderer, env_config: Mapping[str, object], seed: int) -> None:
        self.episode = Episode()
        self._renderer = renderer
        self._env = make_env("frozen_lake", env_config)
        observation, _ = self._env.reset(seed=seed)
        self.pending = renderer.observation_ids(observation, True).tolist()
        self.episode.insert(self.pending)

    def play(self, token_ids: list[int], logprobs: list[float]) -> bool:
        """Take the model's turn; False when the episode is over."""
        end = self._renderer.end_of_turn_id
        closed = end in token_ids
        token_ids = token_ids[: token_ids.index(end) + 1] if closed else token_ids
        for token_id, logprob in zip(token_ids, logprobs, strict=False):
            self.episode.sample(token_id, logprob)
        reply = self._renderer.decode(np.array(token_ids, dtype=np.int32))
        observation, reward, terminated, truncated, info = self._env.step(reply)
        self.episode.reward += float(reward)
        if terminated or truncated:
            self.episode.success = info["success"]
            return False
        inserted = self._renderer.observation_ids(observation, False, closed).tolist()
        self.episode.insert(inserted)
        # The sampler saw the first token of a turn when it sampled the second.
        self.pending = token_ids[1:] + inserted
        return True


def play_episodes(
    sampler: KvSampler,
    renderer: Renderer,
    env_config: Mapping[str, object],
    seeds: Sequence[int],
    *,
    greedy: bool = False,
) -> list[Episode]:
    """Play one episode per seed, all at once."""
    rows = [Row(renderer, env_config, seed) for seed in seeds]
    episodes = [row.episode for row in rows]
    sampler.start(len(rows), greedy=greedy)
    while rows:
        first, first_logprobs = sampler.extend(*_padded([row.pending for row in rows]))
        second, second_logprobs = sampler.extend(first[:, None])
        turns = torch.stack((first, second), 1).tolist()
        logprobs = torch.stack((first_logprobs, second_logprobs), 1).tolist()
        replies = zip(rows, turns, logprobs, strict=True)
        going = [index for index, (row, *reply) in enumerate(replies) if row.play(*reply)]
        if len(going) < len(rows):
            sampler.keep(torch.tensor(going, dtype=torch.long))
            rows = [rows[index] for index in going]
    return episodes


def _padded(pending: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids [rows, t] with gaps on the left, and where they are (None without any)."""
    width = max(map(len, pending))
    if all(len(ids) == width for ids in pending):
        return torch.tensor(pending), None
    ids = torch.tensor([[0] * (width - len(row)) + row for row in pending])
    present = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in pending])
    return ids, present
