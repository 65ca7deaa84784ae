"""Settings that stand at the top level of an experiment: the algorithm's, and what is played."""

from __future__ import annotations

from tailrace.config.settings.setting import Renamed, Setting

_ALGORITHM = (
    "adv_estimator",
    "ppo_epochs",
    "gamma",
    "lambd",
    "init_kl_coef",
    "target_kl",
    "pg_clip",
    "whiten_advantages",
    "entropy_loss_coef",
    "advantage_clip",
    "reward_clip",
)

TOP_LEVEL: tuple[Setting, ...] = (
    *(Renamed(key, (f"learner.{key}",)) for key in _ALGORITHM),
    Renamed("custom_envs", ("agents.custom_envs",)),
    Renamed("reward_pretrain", ("reward.reward_pretrain",)),
    Renamed("num_gpus_per_node", ("cluster.num_gpus_per_node",)),
)
