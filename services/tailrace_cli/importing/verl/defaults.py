"""The defaults of verl, as far as ours are others.

Source: `_generated_ppo_trainer.yaml` and `OptimizerConfig`.
"""

from __future__ import annotations

from tailrace_cli.importing.defaults import NOT_CORRECTED, SYNCHRONOUS
from tailrace_cli.importing.rules import Default

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"

DEFAULTS = (
    Default("data.train_batch_size", 1024),
    Default("data.max_prompt_length", 512),
    Default("data.max_response_length", 512),
    Default("actor_rollout_ref.model.enable_gradient_checkpointing", True),
    Default(f"{_ACTOR}.ppo_mini_batch_size", 256),
    Default(f"{_ACTOR}.clip_ratio_c", 3.0),
    Default(f"{_ACTOR}.optim.weight_decay", 0.01),
    Default(f"{_ACTOR}.optim.betas", [0.9, 0.999]),
    Default(f"{_ROLLOUT}.n", 1),
    Default(f"{_ROLLOUT}.dtype", "bfloat16"),
    Default(f"{_ROLLOUT}.gpu_memory_utilization", 0.5),
    Default(f"{_ROLLOUT}.max_num_seqs", 1024),
    Default(f"{_ROLLOUT}.max_num_batched_tokens", 8192),
    Default(f"{_ROLLOUT}.val_kwargs.temperature", 0.0),
    Default("algorithm.adv_estimator", "gae"),
    Default("algorithm.lam", 1.0),
    Default("critic.cliprange_value", 0.5),
    Default("critic.optim.lr", 1e-5),
    Default("critic.optim.weight_decay", 0.01),
    Default("critic.optim.betas", [0.9, 0.999]),
    Default("trainer.total_epochs", 30, unless=("trainer.total_training_steps",)),
    Default("trainer.project_name", "verl_examples"),
    Default("trainer.save_freq", -1),
    Default("trainer.test_freq", -1),
)
ALWAYS = NOT_CORRECTED | SYNCHRONOUS
