"""Algorithms through real steps: whole-step statistics, picked tokens, interpolation, independence."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tailrace_learner.config import TrainingArgs
from tailrace_learner.config_registry import LOSSES
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet
from tailrace_learner.core.batch.rows import PreparedGroup
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tailrace_learner.core.step.step_advantages import finish_advantages
from tests.unit.tailrace_learner.factory import config, make_policy, make_rows

ARGS = TrainingArgs(learning_rate=1e-2, max_grad_norm=0.0)


def made(num_groups: int, **settings: Any) -> list[PreparedGroup]:
    """Groups of three rows with turns; advantages in float64 where the step is waited for."""
    groups = []
    waits = bool(config(**settings).waits_for_step)
    for index in range(num_groups):
        rows = make_rows(3, seed=index)
        for number, row in enumerate(rows):
            row.row_id = f"g{index}.{number}"
            row.turns = np.arange(len(row.targets)) // 2
            row.inference_logprobs = row.inference_logprobs * 0 - 3.4
            row.staleness = np.arange(len(row.targets)) % 4
            row.advantages = row.advantages.astype(np.float64 if waits else np.float32)
        returns = (float(index), 1.0, 0.5)
        comparison = ComparisonSet(
            np.arange(3), np.zeros(3, np.int64), np.array(returns), np.ones(3, np.int64)
        )
        groups.append(
            PreparedGroup(
                f"g{index}", index, tuple(rows), "", returns, (), {}, f"tag{index % 2}", comparison
            )
        )
    return groups


def gradient(
    groups: list[PreparedGroup], at_once: int, **settings: Any
) -> tuple[Any, Any, PolicyModel]:
    """Gradient of the last update of one step, its metrics, and the policy after it."""
    given = config(training_args=ARGS, **settings)
    policy = make_policy()
    optimizer = SummedOptimizer.of(policy.parameters, ARGS)
    seen: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        grads = [p.grad.flatten() for p in policy.parameters if p.grad is not None]
        seen.append(torch.cat(grads).clone())

    optimizer.inner.register_step_pre_hook(keep)
    trainer = StepTrainer(policy, optimizer, given, groups_per_step=len(groups), max_steps=10)
    trainer.begin(0)
    for start in range(0, len(groups), at_once):
        for group in groups[start : start + at_once]:
            trainer.add(group)
        trainer.work()
    return seen, trainer.finish(), policy


CASES: list[dict[str, Any]] = [
    {"loss": "vanilla_pg", "entropy_loss_coef": 0.1},
    {"loss": "ppo_clip", "dual_clip": 1.1, "loss_aggregation": "seq_mean_token_sum"},
    {"loss": "dapo", "adv_estimator": "reinforce_plus_plus", "advantage_clip": 1.0},
    {"loss": "grpo", "pg_clip": 0.1, "loss_aggregation": "seq_mean_token_mean"},
    {"loss": "decoupled_ppo", "behaviour_correction": "none"},
    {"loss": "segment", "proximal_logprobs": "interpolate"},
    {"loss": "gspo", "loss_aggregation": "seq_mean_token_mean", "gspo_clip": 0.1},
    {"loss": "gmpo", "loss_aggregation": "seq_mean_token_sum_norm", "loss_norm_tokens": 9},
    {"loss": "cispo", "behaviour_correction": "mis"},
    {"loss": "sapo", "behaviour_correction": "icepop"},
    {"loss": "tis_pg", "behaviour_correction": "none"},
    {"loss": "topr", "behaviour_correction": "none"},
    {"loss": "kimi15", "correction_level": "sequence", "geometric_mask": 0.5},
    {"loss": "m2po", "behaviour_correction": "none", "m2_threshold": 0.3},
    {"loss": "kl_cov", "cov_fraction": 0.3},
    {"loss": "clip_cov", "cov_fraction": 0.3, "clip_cov_low": 0.0},
    {"loss": "dppo_tv", "behaviour_correction": "none", "dppo_kl_coef": 0.1},
]


def test_every_loss_is_tried_for_independence() -> None:
    assert {case["loss"] for case in CASES} == set(LOSSES)


@pytest.mark.parametrize("settings", CASES, ids=lambda s: s["loss"])
def test_gradients_do_not_depend_on_arrival_packing_or_micro_batches(settings: dict[str, Any]) -> None:
    (whole,), metrics, _ = gradient(made(2, **settings), 2, **settings)
    for at_once, limit in ((1, 4096), (2, 30), (2, 1)):
        (parts,), others, _ = gradient(
            made(2, **settings), at_once, max_tokens_per_micro_batch=limit, **settings
        )
        assert float((parts - whole).norm() / whole.norm()) < 1e-5
        assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    backwards = list(reversed(made(2, **settings)))
    (turned,), _, _ = gradient(backwards, 2, **settings)
    assert float((turned - whole).norm() / whole.norm()) < 1e-5


def test_whitening_equal_advantages_gives_nothing() -> None:
    groups = made(1, whiten_advantages=True)
    for row in groups[0].rows:
        row.advantages[:] = 0.7
    finish_advantages(groups, config(whiten_advantages=True))
    assert not any(row.advantages.any() for row in groups[0].rows)


def test_a_step_that_is_waited_for_computes_nothing_before_its_last_group() -> None:
    policy = make_policy()
    given = config(training_args=ARGS, whiten_advantages=True)
    optimizer = SummedOptimizer.of(policy.parameters, ARGS)
    trainer = StepTrainer(policy, optimizer, given, groups_per_step=2, max_steps=10)
    first, second = made(2, whiten_advantages=True)
    trainer.add(first)
    assert not trainer.work()
    trainer.add(second)
    assert trainer.work()
    assert trainer.finish()["loss"] is not None


def test_a_loss_that_picks_tokens_waits_for_its_mini_batch_and_reports_its_share() -> None:
    settings = {"loss": "kl_cov", "cov_fraction": 0.25, "num_mini_batches": 2, "ppo_epochs": 2}
    groups = made(4)
    _, metrics, _ = gradient(groups, 1, **settings)
    rows = [row for group in groups for row in group.rows]
    halves = [[row for group in part for row in group.rows] for part in (groups[:2], groups[2:])]
    picked = [sum(int(row.is_picked.sum()) for row in half) for half in halves]  # type: ignore[union-attr]
    sizes = [sum(len(row.targets) for row in half) for half in halves]
    assert picked == [int(size * 0.25) for size in sizes]
    assert metrics["cov_picked_fraction"] == pytest.approx(
        sum(picked) / sum(len(row.targets) for row in rows)
    )


def test_interpolation_is_measured_at_the_start_of_the_step_and_keeps_no_weights() -> None:
    settings = {"num_mini_batches": 2, "ppo_epochs": 2}
    _, recomputed, _ = gradient(made(4), 4, **settings)
    groups = made(4)
    _, interpolated, _ = gradient(groups, 4, proximal_logprobs="interpolate", **settings)
    assert interpolated["mismatch_kl"] != recomputed["mismatch_kl"]  # of the first mini-batch alone
    assert all(row.proximal_logprobs is None for group in groups for row in group.rows)
    first = made(4)[:2]
    _, alone, _ = gradient(first, 2)
    assert interpolated["mismatch_kl"] == pytest.approx(alone["mismatch_kl"], rel=1e-5)
    assert interpolated["loss"] != pytest.approx(recomputed["loss"], rel=1e-3)


LIVE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"loss": "vanilla_pg"}),
    ({"loss": "ppo_clip"}, {"dual_clip": 1.001}),
    ({"loss": "dapo"}, {"dual_clip": 1.001}),
    ({"loss": "decoupled_ppo", "behaviour_correction": "none"}, {"dual_clip": 1.001}),
    ({"loss": "grpo"}, {"dual_clip": 1.001}),
    ({"loss": "grpo"}, {"pg_clip": 0.01}),
    ({"loss": "gspo"}, {"gspo_clip": 0.5}),
    ({"loss": "gspo"}, {"gspo_clip_high": 0.5}),
    ({"loss": "gmpo"}, {"gmpo_clip": 0.01}),
    ({"loss": "cispo"}, {"cispo_clip": 0.01}),
    ({"loss": "cispo"}, {"cispo_clip_high": 0.01}),
    ({"loss": "sapo"}, {"sapo_tau": 3.0}),
    ({"loss": "sapo"}, {"sapo_tau_negative": 3.0}),
    ({"loss": "kimi15"}, {"kimi_tau": 2.0}),
    ({"loss": "m2po", "behaviour_correction": "none"}, {"m2_threshold": 50.0}),
    ({"loss": "kl_cov"}, {"cov_fraction": 0.5}),
    ({"loss": "kl_cov"}, {"kl_cov_coef": 5.0}),
    ({"loss": "clip_cov", "clip_cov_low": 0.1, "cov_fraction": 0.2}, {"clip_cov_low": 1.0}),
    ({"loss": "clip_cov", "clip_cov_low": 0.1, "cov_fraction": 0.2}, {"clip_cov_high": 0.5}),
    ({"loss": "dppo_tv", "behaviour_correction": "none"}, {"dppo_delta": 0.001}),
    ({"loss": "dppo_tv", "behaviour_correction": "none"}, {"dppo_cap": 0.9}),
    ({"loss": "dppo_tv", "behaviour_correction": "none"}, {"dppo_kl_coef": 0.5}),
    ({"tis_cap": 1.05}, {"behaviour_correction": "mis"}),
    ({}, {"correction_level": "sequence"}),
    ({"behaviour_correction": "icepop"}, {"icepop_low": 0.95}),
    ({"behaviour_correction": "icepop"}, {"icepop_high": 1.05}),
    ({}, {"geometric_mask": 0.1}),
    ({}, {"proximal_logprobs": "interpolate"}),
    ({}, {"whiten_advantages": True}),
    ({"whiten_advantages": True}, {"advantage_clip": 0.1}),
]


@pytest.mark.parametrize(
    ("base", "change"), LIVE, ids=[f"{b.get('loss', '')}-{next(iter(c))}" for b, c in LIVE]
)
def test_changing_a_key_changes_the_step(base: dict[str, Any], change: dict[str, Any]) -> None:
    assert not torch.equal(later_gradient(**base), later_gradient(**{**base, **change}))


@cache
def later_gradient(**settings: Any) -> torch.Tensor:
    """Gradient as in a later epoch: the policy has moved since the step began."""
    groups = made(1, **settings)
    rng = np.random.default_rng(5)
    for group in groups:
        for row in group.rows:
            row.proximal_logprobs = rng.normal(-3.4, 0.6, len(row.targets)).astype(np.float32)
            row.inference_logprobs = rng.normal(-3.4, 0.3, len(row.targets)).astype(np.float32)
    (seen,), _, _ = gradient(groups, 1, **settings)
    return seen
