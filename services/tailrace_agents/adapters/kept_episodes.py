"""Evaluation episodes as text: lines of JSON in `<run_dir>/episodes/<worker>.jsonl`, for reports.

Errors of the file system are logged only: an episode goes on without its text.
"""

import asyncio
import os
from pathlib import Path

import msgspec

from tailrace.log import get_logger
from tailrace_agents.core.episode import EpisodeResult
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import Outcome
from tailrace_protos.trajectory import Trajectory

log = get_logger(__name__)

FOLDER = "episodes"  # in the run's directory


class KeptEpisode(msgspec.Struct, frozen=True):
    """One settled episode of an evaluation, as a person reads it."""

    episode_id: str
    group_id: str  # begins with the evaluation's id
    tag: str
    seed: int
    is_greedy: bool
    outcome: Outcome
    reason: str
    reward: float
    success: float | None
    metrics: dict[str, float]
    turn_rewards: tuple[float, ...]
    messages: tuple[ChatMessage, ...]


class EpisodeKeeper:
    """Keeps the episodes of the first `num_tasks` tasks of each evaluation."""

    def __init__(self, run_dir: Path, worker: str, num_tasks: int) -> None:
        self._path = run_dir / FOLDER / f"{worker}.jsonl"
        self._num_tasks = num_tasks

    async def keep(self, trajectory: Trajectory, result: EpisodeResult) -> None:
        """Appends an episode if it belongs to those that are kept."""
        task = trajectory.task
        if trajectory.phase != "eval" or task.seed >= self._num_tasks:
            return
        kept = KeptEpisode(
            trajectory.episode_id,
            trajectory.group_id,
            task.env_name,
            task.seed,
            task.greedy,
            trajectory.outcome,
            trajectory.reason,
            trajectory.reward,
            trajectory.success,
            trajectory.metrics,
            result.transcript.turn_rewards,
            tuple(result.messages),
        )
        await asyncio.to_thread(self._append, msgspec.json.encode(kept) + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(file, "wb", buffering=0) as stream:
                stream.write(line)
        except OSError as error:
            log.warning("cannot keep an episode's text", path=str(self._path), reason=str(error))
