"""Metrics of a step: built-in ones, and a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from tailrace.config import ConfigError
from tailrace_learner.adapters.user_functions import own_metrics
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.metrics import StepData, data_metrics
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import config, make_policy
from tests.unit.tailrace_learner.step.test_step import groups, prepared

OWN = """
from tailrace_learner.core.algorithms import Metric

def longest(step, config):
    return {
        "longest_row": max(len(row.token_ids) for row in step.rows),
        "rewards": sum(sum(group.rewards) for group in step.groups) + config.gamma,
        "own_step": step.step,
        "unknown": float("nan"),
        "reward_mean": 100.0,
    }

def broken(step, config):
    return {"share": 1 / len(step.groups[0].tag)}

def lonely(step): ...

LONGEST = Metric(longest)
BROKEN = Metric(broken)
LONELY = Metric(lonely)
"""


@pytest.fixture
def own_module(user_module: Callable[[str, str], str]) -> str:
    return user_module("my_metrics", OWN)


def given(*metrics: str) -> LearnerConfig:
    return msgspec.convert({"metrics": list(metrics), "gamma": 1.0}, LearnerConfig)


def test_every_tag_has_its_own_returns() -> None:
    first, second = prepared([]), prepared([])
    groups = [
        replace(first, tag="lake", rewards=(1.0, 0.0), successes=(1.0, 0.0)),
        replace(second, tag="lake", rewards=(1.0, 1.0), successes=(1.0, 1.0)),
        replace(second, tag="shop", rewards=(0.5,), successes=()),
    ]
    numbers = data_metrics(StepData(1, groups, []), config())
    assert numbers["tag/lake/reward_mean"] == 0.75
    assert numbers["tag/lake/success_rate"] == 0.75
    assert numbers["tag/lake/num_groups"] == 2.0
    assert numbers["tag/shop/reward_mean"] == 0.5
    assert numbers["tag/shop/success_rate"] is None
    assert numbers["reward_mean"] == 0.7


def test_metrics_of_a_users_file_join_those_of_the_step(own_module: str) -> None:
    settings = given(f"{own_module}:LONGEST", f"{own_module}:BROKEN")
    policy = make_policy()
    trainer = StepTrainer(
        policy,
        SummedOptimizer.of(policy.parameters, settings.training_args),
        settings,
        groups_per_step=1,
        max_steps=8,
        own_metrics=own_metrics(settings),
    )
    with capture_logs() as logs:
        for step in (4, 5):
            trainer.begin(step)
            trainer.add(replace(groups(1)[0], rewards=(1.0, 0.5)))
            trainer.work()
            numbers = trainer.finish()
            assert numbers["own_step"] == step + 1
    assert numbers["longest_row"] == max(len(row.token_ids) for row in trainer.groups[0].rows)
    assert numbers["rewards"] == 2.5
    assert numbers["unknown"] is None
    assert numbers["reward_mean"] == 0.75, "a number of Tailrace keeps its value"
    assert "share" not in numbers
    assert [line["event"] for line in logs] == ["metric fails"], "logged once, not in every step"
    assert "my_metrics:BROKEN raised ZeroDivisionError" in logs[0]["error"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_metrics:NOTHING", r"learner\.metrics: module 'my_metrics' has no 'NOTHING'"),
        ("my_metrics:longest", "is a function, not a declared Metric: write NAME = Metric"),
        ("my_metrics:LONELY", r"cannot be called with \(step, config\)"),
        ("no_metrics:LONGEST", "cannot import 'no_metrics'"),
        ("longest", r"'longest' is none of .* \(one of your own: my_module:NAME"),
        ("returns", "'returns' is always on"),
    ],
)
def test_a_metric_that_cannot_work_is_refused_at_the_start(
    name: str, message: str, own_module: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        given(name)
