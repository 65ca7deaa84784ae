"""The defaults of AReaL, as far as ours are others.

Source: `cli_args.py`.
"""

from __future__ import annotations

from tailrace_cli.importing.defaults import NOT_CORRECTED
from tailrace_cli.importing.rules import Default

_OPTIMIZER = (("lr", 1e-3), ("weight_decay", 0.01), ("beta2", 0.999))
DEFAULTS = (
    Default("seed", 1),
    Default("total_train_epochs", 1, unless=("total_train_steps",)),
    Default("gconfig.n_samples", 1),
    Default("gconfig.max_new_tokens", 16384),
    Default("gconfig.max_tokens", 65536, unless=("train_dataset.max_length",)),
    Default("train_dataset.batch_size", 1, unless=("rollout.consumer_batch_size",)),
    Default("rollout.max_head_offpolicyness", 0),
    Default("actor.dtype", "bfloat16"),
    *(Default(f"actor.optimizer.{key}", value) for key, value in _OPTIMIZER),
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
    *(Default(f"critic.optimizer.{key}", value, within="critic") for key, value in _OPTIMIZER),
)
ALWAYS = NOT_CORRECTED
