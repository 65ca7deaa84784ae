"""Text of evaluation episodes: lines that a report can read, whatever became of their writers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from tailrace_agents.adapters.kept_episodes import EpisodeKeeper, KeptEpisode
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask, Outcome


async def keep(folder: Path, number: int) -> None:
    """Keeps an episode by a worker that has just started."""
    task = EnvTask("lake", number, number)
    trajectory = SimpleNamespace(
        phase="eval", task=task, episode_id=f"e.{number}", group_id="e", outcome=Outcome.OK, reason="",
        reward=1.0, success=1.0, metrics={},
    )  # fmt: skip
    result = SimpleNamespace(
        transcript=SimpleNamespace(turn_rewards=(1.0,)), messages=[ChatMessage("user", "x" * 9999)]
    )
    await EpisodeKeeper(folder, "agents", 8).keep(cast(Any, trajectory), cast(Any, result))


async def test_a_line_that_a_killed_worker_left_torn_hides_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "episodes" / "agents.jsonl"
    await keep(tmp_path, 0)
    await keep(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-7])
    await keep(tmp_path, 2)
    kept = [msgspec.json.decode(line, type=KeptEpisode) for line in path.read_bytes().splitlines()]
    assert [each.seed for each in kept] == [0, 2]
    path.write_bytes(b"torn from its beginning")
    await keep(tmp_path, 3)
    assert msgspec.json.decode(path.read_bytes(), type=KeptEpisode).seed == 3
