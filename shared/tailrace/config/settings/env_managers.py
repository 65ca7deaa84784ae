"""`train_env_manager` and `val_env_manager`: what is played, in how many groups of what size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings.setting import Derived, Lookup, Renamed, Setting

_PARTITION = "groups of each tag, in the order of `tags`; they add up to `num_env_groups`"


def _partition(partition_key: str, total_key: str, total_name: str) -> Derived:
    """Groups per tag, which must add up to the number of groups where both are given."""
    name = f"{total_name.partition('.')[0]}.num_groups_partition"

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        total = lookup(total_key)
        if total is not None and sum(value) != total:
            raise ValueError(
                f"{list(value)} adds up to {sum(value)}, and {total_name} ({total_key}) is {total}: "
                "make them equal"
            )
        return {partition_key: value}

    return Derived(name, (partition_key,), derive, _PARTITION)


TRAIN_ENV_MANAGER: tuple[Setting, ...] = (
    Renamed("train_env_manager.tags", ("scheduler.tags",)),
    Renamed("train_env_manager.num_env_groups", ("groups_per_step",), remark="groups of one step"),
    Renamed("train_env_manager.group_size", ("group_size",)),
    _partition("scheduler.num_groups_partition", "groups_per_step", "train_env_manager.num_env_groups"),
    Renamed(
        "train_env_manager.max_env_num_per_worker",
        ("agents.max_concurrent_episodes",),
        remark="training episodes that one agents worker plays at once",
    ),
)

VAL_ENV_MANAGER: tuple[Setting, ...] = (
    Renamed("val_env_manager.tags", ("scheduler.eval_tags",)),
    Renamed(
        "val_env_manager.num_env_groups",
        ("scheduler.eval_groups",),
        remark="tasks of the fixed evaluation set",
    ),
    Renamed("val_env_manager.group_size", ("scheduler.eval_group_size",)),
    _partition(
        "scheduler.eval_num_groups_partition",
        "scheduler.eval_groups",
        "val_env_manager.num_env_groups",
    ),
    Renamed(
        "val_env_manager.max_env_num_per_worker",
        ("agents.max_concurrent_eval_episodes",),
        remark="evaluation episodes that one agents worker plays at once",
    ),
)
