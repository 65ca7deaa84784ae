"""What settings of ROLL mean here where a name alone does not say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tailrace.config.settings.setting import Lookup, choice
from tailrace_cli.importing import words

NORM = "reward_normalization"
LENGTHS = ("agents.max_episode_tokens", "inference.max_model_len")

has_critic = words.estimates_values("adv_estimator")
_ESTIMATORS = choice("gae", "grpo", "reinforce", "gigpo", "step_reinforce", agentic_reinforce="starpo")
_METHODS = choice("mean_std", "mean", identity="none")
_LOSSES = choice("topr", "cispo", "kimi15", ppo="ppo_clip", vanilla="vanilla_pg", tis="tis_pg")


def groups(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Rows of a step; with verifiable rewards they are prompts, which have several replies each."""
    if lookup("num_return_sequences_in_group") is not None:
        return {"groups_per_step": rows}
    size = _group_size("train_env_manager", lookup)
    if rows % size:
        raise ValueError(f"is no multiple of train_env_manager.group_size ({size})")
    return {"groups_per_step": rows // size}


def _group_size(manager: str, lookup: Lookup) -> int:
    size = lookup(f"{manager}.group_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{manager}.group_size is {size!r}: give the episodes of a group there, a whole number "
            "from 1 on"
        )
    return size


def env_groups(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Groups of a step, unless `rollout_batch_size` says it."""
    if lookup("rollout_batch_size") is None:
        return {"groups_per_step": count}
    if count != lookup("groups_per_step"):
        raise ValueError(
            "how many groups are played at once follows from max_staleness; a step has "
            f"{lookup('groups_per_step')} by rollout_batch_size"
        )
    return {}


def replies(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Replies to a prompt; an environment gets one, and its group is the manager's."""
    if lookup("train_env_manager.group_size") is None:
        return {"group_size": count}
    if count != 1:
        raise ValueError("environments get one reply a turn; train_env_manager.group_size is the group")
    return {}


def train_files(files: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Data sets to train on."""
    return words.datasets("train", "scheduler.tags", _in_folder("actor_train", files, lookup))


def validation_files(files: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Data sets to evaluate on."""
    return words.datasets("validation", "scheduler.eval_tags", _in_folder("validation", files, lookup))


def _in_folder(role: str, files: Any, lookup: Lookup) -> list[str]:
    """Files beside their folder, which some name again."""
    folder = lookup(f"{role}.data_args.dataset_dir", "")
    names = [files] if isinstance(files, str) else [str(file) for file in files]
    if not folder:
        return names
    return [name if name.startswith((f"{folder}/", "/")) else f"{folder}/{name}" for name in names]


def evaluation(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Tasks of the evaluation set."""
    return {"scheduler.eval_groups": max(rows // _group_size("val_env_manager", lookup), 1)}


def longest(reply: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Prompt and reply together, unless `sequence_length` says it."""
    if lookup("sequence_length") is not None:
        return {}
    prompt = lookup("prompt_length", 0)
    return dict.fromkeys(LENGTHS, prompt + reply)


def estimator(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """With `reward_normalization`: beyond a group or without deviation only starpo compares."""
    across = lookup(f"{NORM}.grouping", "traj_group_id") != "traj_group_id"
    plain = lookup(f"{NORM}.method", "mean_std") != "mean_std"
    if name in ("grpo", "reinforce", "agentic_reinforce") and lookup(NORM) is not None:
        return {"learner.adv_estimator": "starpo" if across or plain or name != "grpo" else "grpo"}
    critic: dict[str, Any] = {"learner.critic": {}} if name == "gae" else {}
    return {"learner.adv_estimator": _ESTIMATORS(name), **critic}


def is_starpo(lookup: Lookup) -> bool:
    """Whether it came out as starpo."""
    name = lookup("adv_estimator")
    return name is not None and estimator(name, lookup)["learner.adv_estimator"] == "starpo"


def grouping(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """What episodes are compared with; estimators but starpo have their own."""
    if value != "traj_group_id" and not is_starpo(lookup):
        raise ValueError("only starpo compares beyond groups")
    return {"learner.reward_grouping": value}


def method(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """How episodes are compared; estimators but starpo have their own."""
    if value != "mean_std" and not is_starpo(lookup):
        raise ValueError("only starpo has a choice")
    return {"learner.reward_norm": _METHODS(value)}


def loss(variant: Any, lookup: Lookup) -> Mapping[str, Any]:
    """By variant."""
    ours = _LOSSES(variant)
    if ours in ("topr", "tis_pg"):
        return {"learner.loss": ours, "learner.behaviour_correction": "none"}
    if ours == "ppo_clip" and lookup("use_pg_clip_range"):
        return {"learner.loss": "dapo"}
    return {"learner.loss": ours}


def kl_in_loss(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The divergence in the loss."""
    if not used or not lookup("kl_loss_coef"):
        return {}
    return {"learner.init_kl_coef": lookup("kl_loss_coef"), "learner.kl_in": "loss"}


def kl_in_reward(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The divergence in rewards."""
    if not used or not lookup("init_kl_coef"):
        return {}
    return {"learner.init_kl_coef": lookup("init_kl_coef"), "learner.kl_in": "reward"}


def has_kl(lookup: Lookup) -> bool:
    """Whether the divergence weighs anything."""
    return bool(lookup("learner.init_kl_coef"))


def staleness(ratio: float) -> int:
    """Steps that rollouts may be ahead."""
    if not math.isfinite(ratio) or ratio < 0:
        raise ValueError("expected a number of steps from 0 on")
    return math.ceil(ratio)


def tracker(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """TensorBoard's files, W&B's, or none."""
    project = lookup("tracker_kwargs.project", lookup("exp_name"))
    return words.trackers([name], project, ("stdout",))
