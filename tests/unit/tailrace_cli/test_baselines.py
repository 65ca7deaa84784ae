"""The tasks that simple players play are those of the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tailrace_cli.commands.baselines import measure_baselines
from tailrace_cli.experiment import load
from tailrace_envs import FrozenLakeText

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
PLAYED: list[tuple[str, int]] = []


class Told(FrozenLakeText):
    """A lake that keeps which of its games are played."""

    baselines: ClassVar = {"still": lambda env, random: "up"}

    def __init__(self, split: str = "train") -> None:
        super().__init__()
        self.told = split

    def reset(self, *, seed: int | None = None) -> Any:
        PLAYED.append((self.told, int(seed or 0)))
        return super().reset(seed=seed)

    def step(self, action: str) -> Any:
        _, _, _, _, info = super().step(action)
        return "", 0.0, True, False, {**info, "success": float(self.told == "test")}


def test_players_play_the_tasks_of_each_named_evaluation() -> None:
    PLAYED.clear()
    kind = "{env_type: 'tests.unit.tailrace_cli.test_baselines:Told', env_config: {split: %s}}"
    experiment = load(
        EXAMPLE,
        [
            *(f"+agents.custom_envs.{split}={kind % split}" for split in ("train", "test")),
            "scheduler.tags=[train]",
            "scheduler.eval_tags=[]",
            "scheduler.eval_groups=3",
            "+evaluations={test: {num_tasks: 2}, again: {tag: train}}",
        ],
    )
    assert measure_baselines(experiment) == {"test": {"still": 1.0}, "again": {"still": 0.0}}
    assert set(PLAYED) == {("test", 0), ("test", 1), ("train", 0), ("train", 1), ("train", 2)}
