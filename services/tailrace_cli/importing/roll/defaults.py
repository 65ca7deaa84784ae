"""The defaults of ROLL, as far as ours are others.

Source: `base_config.py`, `agentic_config.py`, `model_args.py` and the `TrainingArguments` of
Hugging Face.
"""

from __future__ import annotations

from tailrace_cli.importing.defaults import NOT_CORRECTED, SYNCHRONOUS
from tailrace_cli.importing.rules import Default

_ARGS = (("learning_rate", 5e-5), ("lr_scheduler_type", "linear"), ("adam_beta2", 0.999))

DEFAULTS = (
    Default("seed", 42),
    Default("max_steps", 500),
    Default("eval_steps", 10),
    Default("rollout_batch_size", 128),
    Default("adv_estimator", "gae"),
    Default("loss_agg_mode", "seq-mean-token-mean"),
    Default("train_env_manager.group_size", 1, within="train_env_manager"),
    Default("actor_train.model_args.dtype", "bf16"),
    Default("actor_train.model_args.disable_gradient_checkpointing", False),
    *(Default(f"actor_train.training_args.{key}", value) for key, value in _ARGS),
    *(Default(f"critic.training_args.{key}", value, within="critic") for key, value in _ARGS),
)
ALWAYS = NOT_CORRECTED | SYNCHRONOUS | {"learner.critic.value_clip": 0.0}
