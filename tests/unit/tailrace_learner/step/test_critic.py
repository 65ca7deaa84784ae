"""The critic through real steps: values, their loss, warm-up, a trunk of its own or shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tailrace_learner.config import CriticArgs, TrainingArgs
from tailrace_learner.core.batch.group_returns import RowLimits
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_protos.base import pack_float32
from tests.unit.tailrace_learner.factory import (
    CPU,
    episode_of_rows,
    group,
    make_policy,
    prepared_group,
    random_group,
    token_row,
)
from tests.unit.tailrace_learner.stepping import (
    Stepper,
    distance,
    make_critic,
    shared_tokens,
    stepped,
    weights,
)

GROUPS = [random_group(index) for index in range(4)]
ARGS = TrainingArgs(learning_rate=1e-2, max_grad_norm=0.0)


def gae(**critic: Any) -> dict[str, Any]:
    return {"adv_estimator": "gae", "critic": CriticArgs(training_args=ARGS, **critic)}


@pytest.mark.parametrize("shared", [False, True])
def test_a_value_belongs_to_what_was_said_before_its_token(shared: bool) -> None:
    stepper = Stepper(1, **gae(shared=shared))
    stepper.step(GROUPS[:1], 1)
    critic = make_critic(make_policy(), CriticArgs(shared=shared))
    for row in stepper.rows:
        with torch.no_grad():
            hidden = critic.trunk.model.base_model(
                input_ids=torch.from_numpy(row.token_ids)[None],
                position_ids=torch.arange(len(row.token_ids))[None],
                packed_rows=pack([row], CPU).packed,
            ).last_hidden_state[0]
            before = critic.head(hidden[row.targets - 1]).squeeze(-1)
        np.testing.assert_allclose(row.values, before.numpy(), rtol=1e-4, atol=1e-5)


def test_a_new_critic_expects_nothing_so_that_advantages_are_returns() -> None:
    stepper = Stepper(1, knows=False, gamma=0.9, lambd=1.0, **gae())
    metrics = stepper.step(GROUPS[:1], 1).metrics
    plain = Stepper(1, adv_estimator="reinforce", gamma=0.9)
    plain.step(GROUPS[:1], 1)
    for row, other in zip(stepper.rows, plain.rows, strict=True):
        np.testing.assert_allclose(row.advantages, other.advantages, rtol=1e-5)
        np.testing.assert_allclose(row.value_targets, other.advantages, rtol=1e-5)
    assert metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["value_mean"] == 0.0


def test_advantages_and_targets_are_made_of_the_values() -> None:
    stepper = Stepper(1, gamma=0.95, lambd=0.8, **gae())
    stepper.step(GROUPS[:1], 1)
    for row, member in zip(stepper.rows, GROUPS[0].members, strict=True):
        (source,) = member.rows
        rewards = np.zeros(len(source.token_ids) // 4)
        ends = np.frombuffer(source.turn_ends, np.int32)
        rewards[ends - 1] = np.frombuffer(source.turn_rewards, np.float32)
        of_tokens, values = rewards[row.targets], row.values.astype(float)
        deltas = of_tokens + 0.95 * np.append(values[1:], 0.0) - values
        wanted = [
            sum((0.95 * 0.8) ** (j - t) * deltas[j] for j in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
        np.testing.assert_allclose(row.advantages, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(row.value_targets, wanted + values, rtol=1e-4, atol=1e-5)


def test_an_episode_of_many_rows_is_one_line() -> None:
    """Of a later row's reward, rows before it have their share."""
    episodes = random_group(7, step_rows=True)
    stepper = Stepper(1, knows=False, gamma=1.0, lambd=1.0, **gae())
    stepper.step([episodes], 1)
    for index, member in enumerate(episodes.members):
        rewards = [float(np.frombuffer(row.turn_rewards, np.float32)[0]) for row in member.rows]
        for k, row in enumerate(stepper.rows[3 * index : 3 * index + 3]):
            np.testing.assert_allclose(row.advantages, sum(rewards[k:]), rtol=1e-4)


def test_the_value_loss_and_its_gradient_are_the_formula() -> None:
    result = stepped(GROUPS, **gae(value_clip=0.0))
    critic = make_critic(make_policy(), CriticArgs())
    rows = [row for group in result.trainer.groups for row in group.rows]
    count = sum(len(row.targets) for row in rows)
    total = torch.zeros(())
    for row in rows:
        error = critic.values(pack([row], CPU)) - torch.from_numpy(row.value_targets)
        total = total + 0.5 * (error**2).sum() / count
    total.backward()  # type: ignore[no-untyped-call]
    wanted = torch.cat([p.grad.flatten() for p in critic.parameters if p.grad is not None])
    assert distance(result.critic_grads[0], wanted) < 1e-4
    assert result.metrics["value_loss"] == pytest.approx(float(total.detach()), rel=1e-4)


CASES: list[dict[str, Any]] = [
    gae(),
    {**gae(), "gae_unit": "turn", "num_mini_batches": 2, "whiten_advantages": True},
    {**gae(value_clip=0.01), "num_mini_batches": 2, "ppo_epochs": 2},
    {**gae(shared=True, value_loss_coef=0.7), "num_mini_batches": 2},
    {**gae(shared=True), "num_mini_batches": 2, "proximal_logprobs": "interpolate"},
    {**gae(), "init_kl_coef": 0.2, "kl_in": "reward", "loss_aggregation": "seq_mean_token_mean"},
]


@pytest.mark.parametrize("settings", CASES, ids=range(len(CASES)))
def test_gradients_do_not_depend_on_arrival_packing_or_order(settings: dict[str, Any]) -> None:
    """Nor do those of later mini-batches: their values are those of the step's start."""
    groups = GROUPS[:2]
    whole = stepped(groups, 2, **settings)
    assert shared_tokens(whole) > 30
    for at_once, limit, shares in ((1, 4096, True), (1, 30, True), (2, 1, False)):
        parts = stepped(
            groups, at_once, max_tokens_per_micro_batch=limit, share_prefixes=shares, **settings
        )
        assert distance(parts.grads[0], whole.grads[0]) < 1e-5
        assert distance(parts.critic_grads[0], whole.critic_grads[0]) < 1e-5
        for name in ("grads", "critic_grads"):  # after an update, what AdamW made of rounding
            for one, other in zip(getattr(parts, name), getattr(whole, name), strict=True):
                assert distance(one, other) < 1e-2
    if settings.get("num_mini_batches", 1) == 1:
        turned = stepped(groups[::-1], 2, **settings)
        assert distance(turned.critic_grads[0], whole.critic_grads[0]) < 1e-5


@pytest.mark.parametrize("shared", [False, True])
def test_while_the_critic_warms_up_the_policy_stays_as_it_is(shared: bool) -> None:
    stepper = Stepper(2, **gae(shared=shared, critic_warmup=1))
    assert stepper.critic is not None
    before = weights(stepper.policy.parameters)
    of_critic = weights(stepper.critic.critic.parameters)
    first = stepper.step(GROUPS[:2], 1).metrics
    assert torch.equal(weights(stepper.policy.parameters), before)
    assert not torch.equal(weights(stepper.critic.critic.parameters), of_critic)
    assert first["loss"] is None
    assert first["value_loss"] is not None
    second = stepper.step(GROUPS[2:], 1, number=1).metrics
    assert not torch.equal(weights(stepper.policy.parameters), before)
    assert second["loss"] is not None


def test_a_shared_trunk_feels_the_chosen_share_of_the_value_loss() -> None:
    alone = stepped(GROUPS, **gae(shared=True, value_loss_coef=0.0)).grads[0]
    half = stepped(GROUPS, **gae(shared=True, value_loss_coef=0.5)).grads[0] - alone
    full = stepped(GROUPS, **gae(shared=True, value_loss_coef=1.0)).grads[0] - alone
    assert float(full.norm()) > 0.01 * float(alone.norm())
    assert distance(half, 0.5 * full) < 1e-3
    critic = make_critic(make_policy(), CriticArgs(shared=True, value_loss_coef=1.0))
    rows = [r for g in stepped(GROUPS, **gae(shared=True)).trainer.groups for r in g.rows]
    for row in rows:
        error = critic.values(pack([row], CPU)) - torch.from_numpy(row.value_targets)
        (0.5 * (error**2).sum() / sum(len(r.targets) for r in rows)).backward()  # type: ignore[no-untyped-call]
    parameters = critic.trunk.parameters
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert distance(full, torch.cat([grad.flatten() for grad in grads])) < 1e-3


def test_values_are_held_near_those_of_the_start() -> None:
    free = stepped(GROUPS, ppo_epochs=4, **gae(value_clip=0.0)).metrics
    held = stepped(GROUPS, ppo_epochs=4, **gae(value_clip=0.001)).metrics
    assert held["value_clip_fraction"] > 0.1  # type: ignore[operator]
    assert free["value_clip_fraction"] == 0.0


def test_the_critic_learns_to_explain_returns() -> None:
    stepper = Stepper(2, gamma=1.0, lambd=1.0, ppo_epochs=8, knows=False, **gae(value_clip=0.0))
    found = [stepper.step(GROUPS[:2], 2, number=number).metrics for number in range(5)]
    assert found[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["explained_variance"] > 0.8  # type: ignore[operator]


def test_the_first_step_on_policy_has_ratio_one() -> None:
    """Log-probabilities that the learner itself would give: no ratio, weight or divergence is left."""
    stepper = Stepper(4, loss="gspo", **gae())
    rows_of: list[Any] = []
    for each in GROUPS:
        prepared = prepared_group(each, stepper.config)
        for row in prepared.rows:
            with torch.no_grad():
                row.inference_logprobs = make_policy().forward(pack([row], CPU))[0].numpy()
        rows_of += prepared.rows
        stepper.trainer.add(prepared)
    stepper.trainer.work()
    metrics = stepper.trainer.finish()
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-8)
    mean_advantage = np.concatenate([row.advantages for row in rows_of]).mean()
    assert metrics["loss"] == pytest.approx(-mean_advantage, abs=1e-4)


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_a_row_that_the_critic_cannot_read_is_skipped_and_its_reward_is_the_turns_before(
    unit: str,
) -> None:
    """A line of three turns, the second too long for the model."""
    turns = [
        replace(
            token_row(str(k), 0.0, mask, first_id=3 * k), first_turn=k, turn_rewards=pack_float32([r])
        )
        for k, (mask, r) in enumerate([([0, 1, 1], 1.0), ([0] * 9 + [1], 10.0), ([0, 0, 1], 100.0)])
    ]
    member = episode_of_rows(0, 111.0, turns)
    stepper = Stepper(1, gamma=0.9, lambd=0.8, gae_unit=unit, **gae())
    builder = TrainingRowBuilder(stepper.config, 4, Ancestry("0-a"), RowLimits(max_tokens=8))
    stepper.trainer.add(builder.prepare(group([member]), 0, {1: ("0-a", 0)}))
    stepper.trainer.work()
    first, last = stepper.rows
    (a, b), (c,) = first.values.astype(float), last.values.astype(float)
    at_end = 100.0 - c
    if unit == "turn":
        wanted = [11.0 + 0.9 * c - a + 0.72 * at_end] * 2
    else:
        second = 11.0 + 0.9 * c - b + 0.72 * at_end
        wanted = [0.9 * b - a + 0.72 * second, second]
    assert abs(c) > 0.01
    np.testing.assert_allclose(first.advantages, wanted, rtol=1e-5)
    np.testing.assert_allclose(last.advantages, [at_end], rtol=1e-5)


def test_the_critic_learns_nothing_of_conversations_without_a_reward() -> None:
    """Their rows are there for the divergence: what they were worth nobody said."""
    (known,) = random_group(5, num_members=1).members[0].rows
    unknown = replace(known, row_id="sub", conversation=1, has_reward=False)
    member = episode_of_rows(0, known.reward, [known, unknown])
    stepper = Stepper(1, init_kl_coef=0.1, **gae())
    stepper.step([group([member])], 1)
    taught, held = stepper.rows
    assert not held.advantages.any()
    np.testing.assert_array_equal(held.values, held.value_targets)
    assert taught.advantages.any()
