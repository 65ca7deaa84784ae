"""The divergence from a reference model: in the loss, in the reward, and steered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from structlog.testing import capture_logs
from torch import nn

from tailrace_learner.adapters.observation import observe_step
from tailrace_learner.core.algorithms.aggregation import AGGREGATIONS
from tailrace_learner.core.algorithms.kl import KL_ESTIMATORS
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.progress import Timing
from tailrace_protos.base import as_float32, as_uint8, pack_float32
from tailrace_protos.trajectory import TrajectoryGroup
from tests.unit.tailrace_learner.algorithms.plain_pass import plain_outputs
from tests.unit.tailrace_learner.factory import (
    CPU,
    config,
    group,
    make_model,
    make_policy,
    make_rows,
    of_aggregation,
    prepared_group,
    random_group,
)
from tests.unit.tailrace_learner.stepping import (
    Stepper,
    distance,
    moved,
    shared_tokens,
    stepped,
    weights,
)

GROUPS = [random_group(index) for index in range(4)]


def plain(name: str, learner_logprobs: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
    d = ref_logprobs - learner_logprobs
    return {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d, "abs": np.abs(d)}[name]


def slopes(name: str, learner_logprobs: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
    """Derivative of `plain` by log pi."""
    d = learner_logprobs - ref_logprobs
    return {"k1": np.ones_like(d), "k2": d, "k3": 1 - np.exp(-d), "abs": np.sign(d)}[name]


def both(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """log pi and log ref of all targets, by forward passes of single rows."""
    policies = make_policy(), moved(make_policy(), seed=3)
    with torch.no_grad():
        return tuple(
            np.concatenate([policy.forward(pack([row], CPU))[0].double().numpy() for row in rows])
            for policy in policies
        )  # type: ignore[return-value]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_metric_is_the_mean_estimate_over_trained_tokens(name: Any) -> None:
    stepper = Stepper(4, init_kl_coef=0.1, kl_estimator=name)
    metrics = stepper.step(GROUPS, 4).metrics
    assert metrics["kl"] == pytest.approx(plain(name, *both(stepper.rows)).mean(), rel=1e-4)
    assert metrics["kl_coef"] == 0.1


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, "ppo_clip") for name in KL_ESTIMATORS), ("k3", "grpo")]
)
def test_in_the_loss_its_weighted_gradient_is_added(name: Any, loss: Any) -> None:
    with_it = stepped(GROUPS, init_kl_coef=0.3, kl_estimator=name, loss=loss)
    without = stepped(GROUPS, loss=loss)
    policy, reference = make_policy(), moved(make_policy(), seed=3)
    rows = [row for group in with_it.trainer.groups for row in group.rows]
    count = sum(len(row.targets) for row in rows)
    for row in rows:
        learner_logprobs, ref_logprobs = (plain_outputs(each, row)[0] for each in (policy, reference))
        known = (each.detach().double().numpy() for each in (learner_logprobs, ref_logprobs))
        (torch.from_numpy(slopes(name, *known) / count) * learner_logprobs).sum().backward()
    added = torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None])
    assert distance(with_it.grads[0] - without.grads[0], 0.3 * added) < 1e-4


def test_in_the_reward_every_policy_token_pays_for_its_own() -> None:
    settings: dict[str, Any] = {"adv_estimator": "reinforce", "gamma": 0.9}
    stepper = Stepper(1, init_kl_coef=0.2, kl_in="reward", kl_estimator="k1", **settings)
    stepper.step(GROUPS[:1], 1)
    free = Stepper(1, **settings)
    free.step(GROUPS[:1], 1)
    for row, other in zip(stepper.rows, free.rows, strict=True):
        _, ref_logprobs = both([row])
        ahead, paid = 0.0, []
        for cost in (0.2 * (row.inference_logprobs.astype(float) - ref_logprobs))[::-1]:
            ahead = cost + 0.9 * ahead
            paid.append(ahead)
        np.testing.assert_allclose(row.advantages, other.advantages - paid[::-1], rtol=1e-4, atol=1e-5)


def test_masked_tokens_pay_too_since_they_were_said() -> None:
    """The first turn's tokens are stale: not trained, but part of the sequence."""
    settings: dict[str, Any] = {"adv_estimator": "reinforce", "init_kl_coef": 0.2, "kl_in": "reward"}
    stepper = Stepper(1, **settings)
    prepared = prepared_group(GROUPS[0], stepper.config)
    sources = prepared.unestimated.sources  # type: ignore[union-attr]
    assert all(len(source.whole.targets) >= len(source.trained.targets) for source in sources)
    whole = sources[0].whole
    sources[0].trained.targets = whole.targets[2:]
    for name in ("target_ids", "inference_logprobs", "advantages", "staleness", "is_current"):
        setattr(sources[0].trained, name, getattr(sources[0].trained, name)[2:])
    stepper.trainer.add(prepared)
    stepper.trainer.work()
    full = Stepper(1, **settings)
    full.step(GROUPS[:1], 1)
    np.testing.assert_allclose(stepper.rows[0].advantages, full.rows[0].advantages[2:], rtol=1e-5)
    np.testing.assert_allclose(stepper.rows[0].ref_logprobs, full.rows[0].ref_logprobs[2:], rtol=1e-5)


def test_a_token_whose_log_probability_is_lost_pays_nothing() -> None:
    settings: dict[str, Any] = {"adv_estimator": "reinforce", "gamma": 1.0}
    (row,) = GROUPS[0].members[0].rows
    logprobs = as_float32(row.inference_logprobs).copy()
    sampled = np.flatnonzero(as_uint8(row.loss_mask))
    logprobs[sampled[-2]] = np.nan
    broken = replace(row, inference_logprobs=pack_float32(logprobs))
    one = group([replace(GROUPS[0].members[0], rows=(broken,))])
    paying = Stepper(1, init_kl_coef=0.2, kl_in="reward", kl_estimator="k1", **settings)
    paying.step([one], 1)
    free = Stepper(1, **settings)
    free.step([one], 1)
    (trained,), (other,) = paying.rows, free.rows
    assert sampled[-2] not in trained.targets
    costs = 0.2 * (trained.inference_logprobs.astype(float) - trained.ref_logprobs)
    wanted = other.advantages - np.cumsum(costs[::-1])[::-1]
    np.testing.assert_allclose(trained.advantages, wanted, rtol=1e-4, atol=1e-5)


CASES: list[dict[str, Any]] = [
    {"init_kl_coef": 0.3},
    {"init_kl_coef": 0.3, "kl_estimator": "k2", "num_mini_batches": 2, "ppo_epochs": 2},
    {"init_kl_coef": 0.3, "kl_in": "reward", "adv_estimator": "reinforce_plus_plus"},
    {"init_kl_coef": 0.3, "kl_in": "reward", "adv_estimator": "reinforce", "num_mini_batches": 2},
]


@pytest.mark.parametrize("settings", CASES)
def test_gradients_do_not_depend_on_arrival_packing_or_order(settings: dict[str, Any]) -> None:
    groups = GROUPS[:2]
    whole = stepped(groups, 2, **settings)
    assert shared_tokens(whole) > 30
    for at_once, limit, shares in ((1, 4096, True), (2, 30, True), (2, 1, False)):
        parts = stepped(
            groups, at_once, max_tokens_per_micro_batch=limit, share_prefixes=shares, **settings
        )
        assert distance(parts.grads[0], whole.grads[0]) < 1e-5
        assert parts.metrics["kl"] == pytest.approx(whole.metrics["kl"], rel=1e-3)
    if settings.get("num_mini_batches", 1) == 1:
        turned = stepped(groups[::-1], 2, **settings)
        assert distance(turned.grads[0], whole.grads[0]) < 1e-5


def test_the_weight_follows_the_divergence() -> None:
    near = stepped(GROUPS, init_kl_coef=0.1, target_kl=1e9, kl_horizon=24)
    assert near.metrics["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 12 / 24))  # 12 episodes
    far = stepped(GROUPS, init_kl_coef=0.1, target_kl=1e-9, kl_horizon=48)
    assert far.metrics["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 12 / 48))


def test_the_weight_never_turns_and_survives_a_step_of_nonsense() -> None:
    """A horizon shorter than a step made it negative; one token of NaN made it NaN for ever."""
    near = stepped(GROUPS, init_kl_coef=0.1, target_kl=1e9, kl_horizon=1)
    assert near.metrics["kl_coef"] == pytest.approx(0.1 * (1 - 0.2))
    stepper = Stepper(1, init_kl_coef=0.1, target_kl=1e9, kl_horizon=24)
    prepared = prepared_group(GROUPS[0], stepper.config)
    prepared.rows[0].ref_logprobs = np.full(len(prepared.rows[0].targets), np.nan, np.float32)
    stepper.trainer.add(prepared)
    stepper.trainer.work()
    metrics = stepper.trainer.finish()
    assert np.isnan(metrics["kl"])  # type: ignore[call-overload]
    assert metrics["kl_coef"] == 0.1


def step_with_nonsense(**settings: Any) -> tuple[bool, dict[str, float | None]]:
    """Whether a step changed weights whose reference gave one row no numbers, and its metrics."""
    stepper = Stepper(2, init_kl_coef=0.1, **settings)
    before = weights(stepper.policy.parameters)
    for each in GROUPS[:2]:
        stepper.trainer.add(prepared_group(each, stepper.config))
    row = stepper.rows[0]
    row.ref_logprobs = np.full(len(row.targets), np.nan, np.float32)
    stepper.trainer.work()
    metrics = stepper.trainer.finish()
    return not torch.equal(weights(stepper.policy.parameters), before), metrics


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(name: Any) -> None:
    """A clamp keeps NaN out of the gradient of the other terms, but not out of the loss."""
    is_changed, metrics = step_with_nonsense(kl_estimator=name)
    assert not is_changed
    assert (metrics["num_updates"], metrics["num_skipped_updates"]) == (1, 1)


def test_tokens_to_which_the_reference_gives_no_number_are_counted_in_each_step_once() -> None:
    _, metrics = step_with_nonsense(ppo_epochs=2)
    num_tokens = len(prepared_group(GROUPS[0], config()).rows[0].targets)
    assert metrics["num_nonfinite_ref_tokens"] == num_tokens
    assert metrics["num_skipped_updates"] == 2
    assert stepped(GROUPS[:2], init_kl_coef=0.1).metrics["num_nonfinite_ref_tokens"] == 0
    with capture_logs() as lines:
        observe_step(3, Timing(0.0), metrics)
    told = [(line["log_level"], line["step"], line["num_tokens"]) for line in lines]
    assert told == [("error", 3, num_tokens)]
    assert "learner.reference" in lines[0]["remedy"]


class Traveller(nn.Module):
    """A model that only remembers where it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device) -> Traveller:  # type: ignore[override]
        self.places.append(device.type)
        return self


@pytest.mark.parametrize("offload", [False, True])
def test_an_offloaded_reference_visits_the_device_and_lives_on_the_host(offload: bool) -> None:
    model = Traveller()
    reference = Reference(PolicyModel(model, torch.device("cuda"), 1.0, 7), config(), offload=offload)
    assert model.places == (["cpu"] if offload else [])
    with reference.present():
        assert model.places[-1:] == (["cuda"] if offload else [])
    assert model.places == (["cpu", "cuda", "cpu"] if offload else [])


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: host and device memory are one"
)
def test_weights_of_an_offloaded_reference_are_on_the_device_only_for_a_pass() -> None:
    device = torch.device("cuda")
    policy = PolicyModel(make_model(), device, 1.0, 7)
    policy.model.to(device)
    whole = PolicyModel(make_model(), CPU, 1.0, 7)
    reference = Reference(policy, config(), offload=True)
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()

    def places() -> set[str]:
        return {tensor.device.type for tensor in policy.model.state_dict().values()}

    assert places() == {"cpu"}
    with reference.present():
        assert places() == {"cuda"}
        assert torch.cuda.memory_allocated() > empty
    assert places() == {"cpu"}
    assert torch.cuda.memory_allocated() == empty
    rows, expected = make_rows(3), make_rows(3)
    reference.fill(rows)
    Reference(whole, config()).fill(expected)
    assert places() == {"cpu"}
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row.ref_logprobs, other.ref_logprobs, rtol=1e-4, atol=1e-4)


def test_without_a_weight_nobody_asks_for_a_reference() -> None:
    result = stepped(GROUPS)
    assert result.metrics["kl"] is None
    assert "kl_coef" not in result.metrics
    assert all(row.ref_logprobs is None for group in result.trainer.groups for row in group.rows)


def equal(given: TrajectoryGroup) -> TrajectoryGroup:
    """A group whose episodes all have the same return."""
    members = [
        replace(m, reward=1.0, rows=tuple(replace(row, reward=1.0) for row in m.rows))
        for m in given.members
    ]
    return group(members, given.group_index)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_equal_groups_are_in_the_divisor_unless_they_are_skipped(aggregation: str) -> None:
    groups = [GROUPS[0], equal(GROUPS[1])]
    settings = of_aggregation(aggregation)
    alone, counted = stepped(groups[:1], **settings), stepped(groups, **settings)
    skipped = stepped(groups, zero_variance_groups="skip", **settings)
    sizes = [
        sum(np.count_nonzero(as_uint8(row.loss_mask)) for m in each.members for row in m.rows)
        for each in groups
    ]
    taught = sizes[0] / sum(sizes) if aggregation == "token_mean" else 0.5
    assert distance(counted.grads[0], alone.grads[0] * taught) < 1e-6
    assert distance(skipped.grads[0], alone.grads[0]) < 1e-6
    assert counted.metrics["loss"] == pytest.approx(alone.metrics["loss"] * taught, abs=1e-7)


def test_what_teaches_nothing_is_held_near_the_reference_too() -> None:
    """The gradient of a group of equals is that of its divergence, over all tokens of the step."""
    groups = [GROUPS[0], equal(GROUPS[1])]
    held = stepped(groups, init_kl_coef=0.3)
    without = stepped([GROUPS[0]])
    rows = [row for each in held.trainer.groups for row in each.rows]
    assert len(rows) == 6
    policy, reference = make_policy(), moved(make_policy(), seed=3)
    num_taught = sum(len(row.targets) for row in rows[:3])
    num_tokens = sum(len(row.targets) for row in rows)
    for row in rows:
        batch = pack([row], CPU)
        with torch.no_grad():
            ref_logprobs = reference.forward(batch)[0]
        (KL_ESTIMATORS["k3"](policy.forward(batch)[0], ref_logprobs).sum() / num_tokens).backward()  # type: ignore[no-untyped-call]
    divergence = torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None])
    wanted = without.grads[0] * num_taught / num_tokens + 0.3 * divergence
    assert distance(held.grads[0], wanted) < 1e-4
    assert held.metrics["kl"] == pytest.approx(plain("k3", *both(rows)).mean(), rel=1e-4)
