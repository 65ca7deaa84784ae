"""Keys of the critic's optimizer and of DeepSpeed, through what makes them in a learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config import RunConfig
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.hf_model import TrainableModel
from tailrace_learner.adapters.rank_start import _strategy
from tailrace_learner.adapters.roles import RoleMaker
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy, Zero3Strategy
from tailrace_learner.config import CriticArgs, LearnerConfig, StrategyArgs, TrainingArgs
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.model.policy import PolicyModel
from tests.models.zoo import configuration
from tests.unit.tailrace_learner.factory import make_policy, make_rows
from tests.unit.tailrace_learner.stepping import weights

OF_CRITIC = TrainingArgs(learning_rate=1e-2, max_grad_norm=0.0)
FALLING = {"lr_scheduler_type": "linear"}


def trained_head(critic: dict[str, Any], max_steps: int = 4, **settings: Any) -> torch.Tensor:
    """Weights of the critic that a worker makes, after three updates with given gradients."""
    args = CriticArgs(shared=True, training_args=replace(OF_CRITIC, **critic))
    config = LearnerConfig(adv_estimator="gae", critic=args, **settings)
    policy, run = make_policy(), RunConfig(exp_name="unit", max_steps=max_steps)
    loaded = TrainableModel(policy.model, None)
    maker = RoleMaker(run, config, loaded, policy, Strategy(), "")
    trainer = maker.make().critic
    assert trainer is not None
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        trainer.begin(step)
        for parameter in trainer.critic.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        trainer.update(make_rows(2), is_last=True)
    return weights(trainer.critic.parameters)


def made(config: Any) -> PolicyModel:
    """A policy of this Hugging Face configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    hf_model.prepared(model, LearnerConfig(device="cpu"))
    return PolicyModel(model, torch.device("cpu"), 1.0, logprob_chunk_tokens=64)


def model_of_text_and_images() -> Any:
    """Configuration whose sizes are those of a part."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = configuration("gemma3_text").to_dict()
    return AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)


@pytest.mark.parametrize(
    "make", [model_of_text_and_images, lambda: configuration("opt", word_embed_proj_dim=16)]
)
def test_a_critic_reads_the_states_of_a_model_with_other_names_of_its_sizes(
    make: Callable[[], Any],
) -> None:
    policy = made(make())
    config = LearnerConfig(adv_estimator="gae", critic=CriticArgs(shared=True), device="cpu")
    loaded, run = TrainableModel(policy.model, None), RunConfig(exp_name="unit")
    critic = RoleMaker(run, config, loaded, policy, Strategy(), "").make().critic
    assert critic is not None
    batch = policy.pack(make_rows(2), config)
    assert critic.critic.values(batch).tolist() == [0.0] * len(batch.target_ids)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"learning_rate": 1e-3}),
        ({}, {"adam_beta1": 0.5}),
        ({}, {"adam_beta2": 0.5}),
        ({}, {"adam_epsilon": 0.1}),
        ({}, {"weight_decay": 0.5}),
        ({}, {"warmup_steps": 2}),
        ({"adam_epsilon": 1e-3}, {"max_grad_norm": 1e-3}),
        ({}, FALLING),
        (FALLING, {"min_lr_ratio": 0.9}),
    ],
    ids=lambda keys: "-".join(keys),
)
def test_the_critic_has_an_optimizer_and_a_schedule_of_its_own(
    base: dict[str, Any], change: dict[str, Any]
) -> None:
    wanted = trained_head(base)
    of_policy = TrainingArgs(**{"learning_rate": 1e-2, **base, **change})
    assert torch.equal(trained_head(base, training_args=of_policy), wanted)
    assert not torch.equal(trained_head({**base, **change}), wanted)


def test_the_critics_schedule_ends_with_the_run() -> None:
    assert not torch.equal(trained_head(FALLING), trained_head(FALLING, max_steps=40))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_told_the_zero_stage(stage: int) -> None:
    args = StrategyArgs(strategy_name="deepspeed", num_ranks=2, zero_stage=stage)
    made = _strategy(ONE_RANK, LearnerConfig(strategy_args=args))  # type: ignore[arg-type]
    assert isinstance(made, DeepspeedStrategy)
    assert isinstance(made, Zero3Strategy) == (stage == 3)
    assert made._config()["zero_optimization"]["stage"] == stage
