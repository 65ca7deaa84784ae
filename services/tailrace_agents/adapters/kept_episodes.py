"""Evaluation episodes as text: lines of JSON in `<run_dir>/episodes/<worker>.jsonl`, for reports.

Errors of the file system are logged only: an episode goes on without its text. A line is complete, or
the last one: what a crash or a full disk left torn is cut off before the next.
"""

import asyncio
import os
import threading
from pathlib import Path
from typing import BinaryIO

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
        self._lock = threading.Lock()

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
            with self._lock:
                file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
                with open(file, "r+b", buffering=0) as stream:
                    _cut_torn(stream)
                    stream.write(line)
        except OSError as error:
            log.warning("cannot keep an episode's text", path=str(self._path), reason=str(error))


def _cut_torn(stream: BinaryIO) -> None:
    """Cut off what follows the last complete line."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - 1, 0))
    if size and stream.read(1) != b"\n":
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
