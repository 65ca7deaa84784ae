"""The defaults of ROLL, verl and AReaL, as far as ours are others.

`THEIRS` are settings of those systems, read like those of a file; `OURS` are keys for what a system
always does, or does unless told by a setting that is null by default. Where results are kept, what
tracks them and on how many devices they are computed stay ours. Sources: verl's
`_generated_ppo_trainer.yaml` and `OptimizerConfig`; AReaL's `cli_args.py`; ROLL's `base_config.py`,
`agentic_config.py`, `model_args.py` and the `TrainingArguments` of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace_cli.importing.defaults import Default

_VERL_ROLLOUT = "actor_rollout_ref.rollout"
_VERL_ACTOR = "actor_rollout_ref.actor"
_NOT_CORRECTED: dict[str, Any] = {"learner.behaviour_correction": "none"}
_SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0}

_VERL = (
    Default("data.train_batch_size", 1024),
    Default("data.max_prompt_length", 512),
    Default("data.max_response_length", 512),
    Default("actor_rollout_ref.model.enable_gradient_checkpointing", True),
    Default(f"{_VERL_ACTOR}.ppo_mini_batch_size", 256),
    Default(f"{_VERL_ACTOR}.clip_ratio_c", 3.0),
    Default(f"{_VERL_ACTOR}.optim.weight_decay", 0.01),
    Default(f"{_VERL_ACTOR}.optim.betas", [0.9, 0.999]),
    Default(f"{_VERL_ROLLOUT}.n", 1),
    Default(f"{_VERL_ROLLOUT}.dtype", "bfloat16"),
    Default(f"{_VERL_ROLLOUT}.gpu_memory_utilization", 0.5),
    Default(f"{_VERL_ROLLOUT}.max_num_seqs", 1024),
    Default(f"{_VERL_ROLLOUT}.max_num_batched_tokens", 8192),
    Default(f"{_VERL_ROLLOUT}.val_kwargs.temperature", 0.0),
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

_AREAL_OPTIMIZER = (("lr", 1e-3), ("weight_decay", 0.01), ("beta2", 0.999))
_AREAL = (
    Default("seed", 1),
    Default("total_train_epochs", 1, unless=("total_train_steps",)),
    Default("gconfig.n_samples", 1),
    Default("gconfig.max_new_tokens", 16384),
    Default("gconfig.max_tokens", 65536, unless=("train_dataset.max_length",)),
    Default("train_dataset.batch_size", 1, unless=("rollout.consumer_batch_size",)),
    Default("rollout.max_head_offpolicyness", 0),
    Default("actor.dtype", "bfloat16"),
    *(Default(f"actor.optimizer.{key}", value) for key, value in _AREAL_OPTIMIZER),
    Default("actor.ppo_n_minibatches", 4),
    Default("actor.reward_clip", 20.0),
    Default("actor.gae_lambda", 1.0),
    Default("actor.kl_ctl", 0.1),
    Default("actor.kl_estimator", "k1"),
    Default("actor.recompute_logprob", False),
    Default(
        "actor.behave_imp_weight_cap",
        5.0,
        unless=("actor.behav_imp_weight_cap", "actor.rejection_sampling"),
    ),
    Default("critic.eps_clip", 0.5, within="critic"),
    *(Default(f"critic.optimizer.{key}", value, within="critic") for key, value in _AREAL_OPTIMIZER),
)

_ROLL_ARGS = (("learning_rate", 5e-5), ("lr_scheduler_type", "linear"), ("adam_beta2", 0.999))
_ROLL = (
    Default("seed", 42),
    Default("max_steps", 500),
    Default("eval_steps", 10),
    Default("rollout_batch_size", 128),
    Default("adv_estimator", "gae"),
    Default("loss_agg_mode", "seq-mean-token-mean"),
    Default("train_env_manager.group_size", 1, within="train_env_manager"),
    Default("actor_train.model_args.dtype", "bf16"),
    Default("actor_train.model_args.disable_gradient_checkpointing", False),
    *(Default(f"actor_train.training_args.{key}", value) for key, value in _ROLL_ARGS),
    *(Default(f"critic.training_args.{key}", value, within="critic") for key, value in _ROLL_ARGS),
)

THEIRS: Mapping[str, tuple[Default, ...]] = {"roll": _ROLL, "verl": _VERL, "areal": _AREAL}
OURS: Mapping[str, Mapping[str, Any]] = {
    "roll": _NOT_CORRECTED | _SYNCHRONOUS | {"learner.critic.value_clip": 0.0},
    "verl": _NOT_CORRECTED | _SYNCHRONOUS,
    "areal": _NOT_CORRECTED,
}
