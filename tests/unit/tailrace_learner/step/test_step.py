"""Steps: accumulation, mini-batches against the step's start, epochs, metrics."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tailrace_learner.config import TrainingArgs
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.ranks import OneRank
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer, learning_rate_at
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.algorithms.loss_formulas import FORMULAS
from tests.unit.tailrace_learner.algorithms.loss_formulas import weights as correction
from tests.unit.tailrace_learner.algorithms.plain_pass import plain_outputs, tokens_of
from tests.unit.tailrace_learner.factory import CPU, config, make_policy, make_rows
from tests.unit.tailrace_learner.stepping import weights

ARGS = TrainingArgs(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)


def prepared(rows: list[TrainingRow], index: int = 0) -> PreparedGroup:
    return PreparedGroup(
        f"g{index}", index, tuple(rows), "", (1.0, 0.0), (1.0, 0.0), {"num_stale_tokens": 1}
    )


def groups(num_groups: int, seed: int = 0) -> list[PreparedGroup]:
    return [prepared(make_rows(3, seed=seed * 100 + index), index) for index in range(num_groups)]


def trainer_of(policy: PolicyModel, num_groups: int, **settings: Any) -> StepTrainer:
    given = config(training_args=ARGS, **settings)
    optimizer = SummedOptimizer.of(policy.parameters, given.training_args)
    return StepTrainer(policy, optimizer, given, groups_per_step=num_groups, max_steps=10)


def train(step_groups: list[PreparedGroup], at_once: int, **settings: Any) -> tuple[torch.Tensor, Any]:
    policy = make_policy()
    trainer = trainer_of(policy, len(step_groups), **settings)
    trainer.begin(0)
    for start in range(0, len(step_groups), at_once):
        for each in step_groups[start : start + at_once]:
            trainer.add(each)
        trainer.work()
    metrics = trainer.finish()
    return weights(policy.parameters), metrics


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Distance of two results as a share of what training changed."""
    return float((left - right).norm() / (right - weights(make_policy().parameters)).norm())


def test_a_token_mean_does_not_depend_on_how_many_rows_an_episode_has() -> None:
    def split(row: TrainingRow) -> list[TrainingRow]:
        """A row for the first trained token and one for the rest, which reads the first as well."""
        return [
            replace(
                row,
                token_ids=row.token_ids[: row.targets[part][-1]],
                **{name: getattr(row, name)[part] for name in per_target},
            )
            for part in (slice(0, 1), slice(1, None))
            if len(row.targets[part])
        ]

    per_target = (
        "targets",
        "target_ids",
        "inference_logprobs",
        "advantages",
        "staleness",
        "is_current",
    )
    whole = groups(2)
    parts = [prepared([part for row in each.rows for part in split(row)]) for each in whole]
    assert len(parts[0].rows) > len(whole[0].rows)
    assert difference(train(parts, 2)[0], train(whole, 2)[0]) < 1e-3


def test_every_mini_batch_is_measured_against_the_policy_at_the_start_of_the_step() -> None:
    step_groups = groups(4)
    settings = config(training_args=ARGS, num_mini_batches=2, loss="dapo")
    streamed, _ = train(step_groups, 1, num_mini_batches=2, loss="dapo")

    policy = make_policy()
    halves = [
        [row for each in half for row in each.rows] for half in (step_groups[:2], step_groups[2:])
    ]
    for row in (row for half in halves for row in half):
        row.proximal_logprobs = plain_outputs(policy, row)[0].detach().numpy()
    optimizer = adamw(policy, ARGS, lr=1e-2)
    for rows in halves:
        learner_logprobs = torch.cat([plain_outputs(policy, row)[0] for row in rows])
        tokens = tokens_of(rows, learner_logprobs.detach().double().numpy(), settings)
        slopes = correction(tokens, settings)[0] @ FORMULAS["dapo"](tokens, settings).jacobian
        optimizer.zero_grad()
        (torch.from_numpy(slopes / len(slopes)) * learner_logprobs).sum().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters, 0.5)
        optimizer.step()
    assert difference(streamed, weights(policy.parameters)) < 1e-3


def test_later_epochs_change_the_weights_further_and_remember_the_first_policy() -> None:
    once, _ = train(groups(2), 2)
    step_groups = groups(2)
    twice, metrics = train(step_groups, 2, ppo_epochs=2)
    assert not torch.allclose(once, twice)
    policy = make_policy()
    row = step_groups[0].rows[0]
    with torch.no_grad():
        start = policy.forward(pack([row], CPU))[0]
    torch.testing.assert_close(torch.from_numpy(row.proximal_logprobs), start, rtol=1e-5, atol=1e-5)
    assert metrics["num_groups"] == 2


def test_a_step_without_rows_changes_nothing() -> None:
    policy = make_policy()
    before = weights(policy.parameters)
    trainer = trainer_of(policy, 2, num_mini_batches=2)
    trainer.begin(0)
    for index in range(2):
        trainer.add(prepared([], index))
    trainer.work()
    metrics = trainer.finish()
    assert torch.equal(weights(policy.parameters), before)
    assert metrics["loss"] is None
    assert metrics["staleness_max"] is None
    assert metrics["reward_mean"] == 0.5


def test_small_passes_wait_until_the_mini_batch_is_complete() -> None:
    policy = make_policy()
    trainer = trainer_of(policy, 2, min_tokens_per_micro_batch=4096)
    trainer.begin(0)
    first, second = groups(2)
    trainer.add(first)
    assert not trainer.work()
    assert trainer.num_missing_groups == 1
    trainer.add(second)
    assert trainer.work()


def test_metrics_are_means_over_trained_tokens() -> None:
    step_groups = groups(3)
    _, metrics = train(step_groups, 1, num_mini_batches=3)
    rows = [row for each in step_groups for row in each.rows]
    policy = make_policy()
    with torch.no_grad():
        old = np.concatenate([policy.forward(pack([row], CPU))[0].numpy() for row in rows]).astype(
            float
        )
    inference_logprobs = np.concatenate([row.inference_logprobs for row in rows])
    current = np.concatenate([row.is_current for row in rows])
    divergence = np.exp(old - inference_logprobs) - 1 - (old - inference_logprobs)
    staleness = np.concatenate([row.staleness for row in rows])
    assert metrics["behaviour_kl"] == pytest.approx(divergence.mean(), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(divergence[current].mean(), rel=1e-4)
    correlation = np.corrcoef(old[current], inference_logprobs[current])[0, 1]
    assert metrics["mismatch_correlation"] == pytest.approx(correlation, rel=1e-4)
    assert metrics["staleness_mean"] == pytest.approx(staleness.mean())
    assert metrics["staleness_max"] == staleness.max()
    assert metrics["num_trained_tokens"] == len(inference_logprobs)
    assert metrics["num_stale_tokens"] == 3
    assert metrics["reward_std"] == pytest.approx(np.std([1, 0] * 3, ddof=1))
    assert metrics["kl"] is None


def test_mismatch_is_unknown_without_tokens_of_the_learners_own_version() -> None:
    step_groups = groups(1)
    for row in step_groups[0].rows:
        row.is_current[:] = False
    _, metrics = train(step_groups, 1)
    assert metrics["mismatch_kl"] is None
    assert metrics["mismatch_correlation"] is None
    assert metrics["behaviour_kl"] is not None


def test_gradients_that_are_not_finite_are_thrown_away_and_counted() -> None:
    step_groups = groups(1)
    step_groups[0].rows[0].advantages[0] = np.inf
    policy = make_policy()
    before = weights(policy.parameters)
    trainer = trainer_of(policy, 1)
    trainer.begin(0)
    trainer.add(step_groups[0])
    trainer.work()
    metrics = trainer.finish()
    assert torch.equal(weights(policy.parameters), before)
    assert metrics["num_skipped_updates"] == 1


class SickNeighbour(OneRank):
    """Ranks of which another one has losses that are no numbers."""

    def sums(self, values: Sequence[float]) -> list[float]:
        return [value + math.nan for value in values]


def test_a_loss_of_another_rank_that_is_not_finite_throws_the_update_away_here_too() -> None:
    policy = make_policy()
    before = weights(policy.parameters)
    given = config(training_args=ARGS)
    trainer = StepTrainer(
        policy,
        SummedOptimizer.of(policy.parameters, ARGS),
        given,
        groups_per_step=1,
        max_steps=10,
        ranks=SickNeighbour(),
    )
    trainer.begin(0)
    trainer.add(groups(1)[0])
    trainer.work()
    assert trainer.finish()["num_skipped_updates"] == 1
    assert torch.equal(weights(policy.parameters), before)


def adamw(policy: PolicyModel, args: TrainingArgs, lr: float = 3e-3) -> torch.optim.AdamW:
    """Torch's own, with everything that the arguments say."""
    parameters = policy.parameters
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        foreach=False,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"adam_epsilon": 0.1}, {"weight_decay": 0.0}],
    ids=lambda settings: next(iter(settings), "defaults"),
)
def test_updates_equal_torchs_own_clipping_and_adamw(settings: dict[str, Any]) -> None:
    args = msgspec.structs.replace(ARGS, **settings)
    policy = make_policy()
    twin = copy.deepcopy(policy)
    optimizer, plain = SummedOptimizer.of(policy.parameters, args), adamw(twin, args)
    for seed in (1, 2):  # the first moves weights by their signs alone, whatever the betas are
        for each in (policy, twin):
            torch.manual_seed(seed)
            for parameter in each.parameters:
                parameter.grad = torch.randn_like(parameter) * 8 * seed
        result = optimizer.update(count=8.0, learning_rate=3e-3, max_grad_norm=0.5 * seed)
        for parameter in twin.parameters:
            parameter.grad /= 8.0
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters, 0.5 * seed)
        plain.step()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    torch.testing.assert_close(
        weights(policy.parameters), weights(twin.parameters), rtol=1e-5, atol=1e-7
    )


def test_the_learning_rate_rises_and_falls_as_named() -> None:
    def rates(kind: Any, floor: float = 0.1) -> list[float]:
        args = TrainingArgs(
            learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=2, min_lr_ratio=floor
        )
        return [round(learning_rate_at(step, 10, args), 4) for step in (0, 1, 2, 6, 10, 99)]

    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear") == [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    assert rates("cosine") == [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    assert learning_rate_at(4, 10, TrainingArgs(learning_rate=1.0, lr_scheduler_type="cosine")) == (
        pytest.approx(0.5 * (1 + np.cos(0.4 * np.pi)))
    )
