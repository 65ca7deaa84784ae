"""Start `tailrace` as a user does, in a process of its own, on a small FrozenLake experiment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "examples" / "frozen_lake"
TAILRACE = str(Path(sys.executable).parent / "tailrace")
SMALL = (
    "group_size=6",
    "groups_per_step=4",
    "eval_steps=0",
    "learner.warm_start.num_steps=5",  # replies still differ, so that every step trains tokens
    "learner.warm_start.batch_size=32",
    "scheduler.eval_groups=16",
    "scheduler.eval_interim_groups=8",
)

# Replies that name no direction cost something: then groups differ before the model knows the lake.
PENALTY = "agents.custom_envs.frozen_lake.env_config.invalid_action_penalty=0.1"


def command(verb: str, *overrides: str, output_dir: Path, exp_name: str) -> list[str]:
    """`tailrace <verb>` on the small experiment."""
    settings = [*SMALL, PENALTY, f"exp_name={exp_name}", f"output_dir={output_dir}", *overrides]
    return [TAILRACE, verb, str(EXPERIMENT), *settings]


def environment() -> dict[str, str]:
    """A plain terminal's environment."""
    return {**os.environ, "COLUMNS": "160", "TERM": "dumb"}


def run(argv: list[str], timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run to the end and return what was printed."""
    return subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
