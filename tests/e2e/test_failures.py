"""Runs in which nothing can succeed end soon, with exit code 1, the reason and the end of a log."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import command, environment

SOON_S = 60.0  # as promised
GRACE_S = 30.0  # of failures after a success
DEADLINE_S = 600.0

MODULE = '''
import random

from tailrace_envs import FrozenLakeText


class Away(FrozenLakeText):
    """A lake whose server is away once a game has begun."""

    def step(self, action):
        raise ConnectionError("the lake is away")


class Fading(FrozenLakeText):
    """A lake whose server is away after some games."""

    num_games = 0

    def reset(self, **options):
        Fading.num_games += 1
        return super().reset(**options)

    def step(self, action):
        if Fading.num_games > 60:
            raise ConnectionError("the lake is away")
        return super().step(action)


def scores(task, messages, metrics):
    """A reward with a mistake."""
    return metrics["beauty"]


class Flat(FrozenLakeText):
    """A lake on which all that is done is worth the same."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, {"success": 0.0}


class Endless(FrozenLakeText):
    """A lake that ends no episode."""

    def reset(self, **options):
        self.shown, told = super().reset(**options)
        return self.shown, told

    def step(self, action):
        return self.shown, random.random(), False, False, {}


class Easy(Flat):
    """A lake on which all that is done succeeds."""

    def step(self, action):
        *told, _ = super().step(action)
        return *told, {"success": 1.0}
'''
# Python imports this before anything else.
DYING = """
import os, sys, time
if "tailrace_weight_sync" in sys.orig_argv:
    with open(os.path.join(os.path.dirname(__file__), "deaths"), "a") as deaths:
        print(time.time(), file=deaths)
    print("no room for weights", file=sys.stderr, flush=True)
    os._exit(1)
"""


def train(folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and output of a training of the small lake, without a warm start."""
    (folder / "broken_lakes.py").write_text(MODULE)
    settings = ("learner.warm_start=null", "scheduler.eval_groups=8", "group_size=2", *overrides)
    argv = command("train", *settings, output_dir=folder, exp_name="broken")
    result = subprocess.run(
        argv,
        env={**environment(), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def seconds_since_failure(folder: Path, *outcomes: str) -> float:
    """Seconds since the first episode ended, with one of these outcomes: `tailrace` has just exited."""
    now_s = time.time()
    return now_s - next(
        event["unix_s"]
        for event in events(folder)
        if event["body"]["type"] == "episode_settled"
        and (not outcomes or event["body"]["outcome"] in outcomes)
    )


def events(folder: Path) -> list[dict[str, Any]]:
    """The run's events, in order."""
    lines = (folder / "broken" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def lake(kind: str) -> tuple[str, ...]:
    return (
        f"+agents.custom_envs.Broken={{env_type: 'broken_lakes:{kind}'}}",
        "scheduler.tags=[Broken]",
        "scheduler.eval_tags=[Broken]",
    )


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_an_environment_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    exit_code, printed = train(tmp_path, *lake("Away"))
    assert exit_code == 1, printed
    assert seconds_since_failure(tmp_path) < SOON_S
    failed = re.search(r"(\d+) groups in a row ended without a valid episode", printed)
    assert failed, printed
    assert int(failed[1]) >= 20  # those that closed together count together
    assert "env.step raised ConnectionError: the lake is away (at broken_lakes.py:" in printed
    assert "failed episodes: " in printed  # while it ran
    assert "agents.log ends" in printed
    assert "Traceback" not in printed
    assert "the lake is away" in (tmp_path / "broken" / "report.html").read_text()


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_an_environment_that_goes_away_for_good_ends_the_run_after_its_grace(tmp_path: Path) -> None:
    exit_code, printed = train(tmp_path, *lake("Fading"))
    assert exit_code == 1, printed
    assert seconds_since_failure(tmp_path, "infra_failure") < GRACE_S + SOON_S
    told = re.search(r"\d+ of the last 40 groups failed as a whole, for (\d+) s", printed)
    assert told, printed
    assert int(told[1]) >= GRACE_S
    assert "env.step raised ConnectionError: the lake is away (at broken_lakes.py:" in printed
    assert "agents.log ends" in printed
    rows = (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] >= 1, "it had made steps"


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_a_reward_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    broken = "reward.rewards=[{name: mine, kind: function, function: 'broken_lakes:scores'}]"
    exit_code, printed = train(tmp_path, broken)
    assert exit_code == 1, printed
    assert seconds_since_failure(tmp_path) < SOON_S
    assert re.search(r"\d+ groups in a row ended without a valid episode", printed), printed
    assert "KeyError: 'beauty' (at broken_lakes.py:" in printed
    assert "reward.log ends" in printed


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_rewards_that_are_all_equal_end_the_run(tmp_path: Path) -> None:
    exit_code, printed = train(tmp_path, *lake("Flat"), "scheduler.max_untrained_steps=3")
    assert exit_code == 1, printed
    assert seconds_since_failure(tmp_path) < SOON_S
    assert "no token was trained in the groups of 3 steps" in printed
    told = " ".join(printed.split())
    assert re.search(r"in \d+ of \d+ groups all episodes of a group had the same reward", told), printed
    assert "learner.log ends" in printed


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_rewards_that_are_all_equal_end_the_run_also_where_the_loss_keeps_every_token(
    tmp_path: Path,
) -> None:
    held = ("scheduler.max_untrained_steps=3", "max_steps=6", "+learner.init_kl_coef=0.01")
    exit_code, printed = train(tmp_path, *lake("Flat"), *held)
    assert exit_code == 1, printed
    assert "no token was trained in the groups of 3 steps" in printed
    told = " ".join(printed.split())
    assert re.search(r"in (\d+) of \1 groups all episodes of a group had the same reward", told), (
        printed
    )


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_a_task_in_which_everything_succeeds_ends_the_run_as_finished(tmp_path: Path) -> None:
    """Also where the learner gives groups of equal rewards back."""
    settings = ("scheduler.max_untrained_steps=3", "learner.zero_variance_groups=redraw")
    exit_code, printed = train(tmp_path, *lake("Easy"), *settings)
    assert exit_code == 0, printed
    assert "training ends early: the task is solved: all episodes of the last " in printed
    assert "success of the final evaluation: 1.000 sampled" in " ".join(printed.split())
    lines = (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["task_solved"], last["eval/success_rate"]) == (1, 1.0)
    assert (tmp_path / "broken" / "checkpoints" / f"step_{last['step']}" / "run_state.json").exists()


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_episodes_of_an_environment_that_never_ends_are_truncated(tmp_path: Path) -> None:
    limits = (
        "+agents.custom_envs.Broken.max_turns=3",
        "+agents.custom_envs.Broken.max_tokens_per_step=2",
    )
    exit_code, printed = train(tmp_path, *lake("Endless"), *limits, "max_steps=1")
    assert exit_code == 0, printed
    bodies = [event["body"] for event in events(tmp_path)]
    settled = [body for body in bodies if body["type"] == "episode_settled"]
    assert settled
    assert {(body["outcome"], body["num_turns"]) for body in settled} == {("policy_failure", 3)}


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 30)
def test_a_service_that_dies_before_it_is_ready_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DYING)
    exit_code, printed = train(tmp_path)
    first_s = float((tmp_path / "deaths").read_text().split()[0])
    assert exit_code == 1, printed
    assert time.time() - first_s < SOON_S
    assert "weight_sync keeps failing (exit code 1), 5 times in a row before it was ready" in printed
    assert "weight_sync.log ends:\nno room for weights" in printed
