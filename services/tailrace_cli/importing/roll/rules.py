"""Rules of ROLL whose result depends on further settings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.settings import Derived, Lookup, NoEffectError, value_names
from tailrace.config.settings.actor_train import ranks_on
from tailrace.config.settings.tables import servers_on
from tailrace.config.settings.values import devices, whole_number, whole_number_at
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.rules import is_gae, listed

NORM = "reward_normalization"
# Roles that name the same GPU take turns on it.
GPUS_OF_ROLES = ("actor_train.device_mapping", "actor_infer.device_mapping")
LENGTHS = ("agents.max_episode_tokens", "inference.max_model_len")

CONFIG = "actor_train.strategy_args.strategy_config"
MODEL = "actor_train.model_args"
_PARALLEL = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
_NAMES = {"stop_strings": "stop"}

has_critic = is_gae("adv_estimator")
_ESTIMATORS = value_names(
    "gae", "grpo", "reinforce", "gigpo", "step_reinforce", agentic_reinforce="starpo"
)
_METHODS = value_names("mean_std", "mean", identity="none")


def groups(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Groups of a step from its rows; with verifiable rewards, a row is a prompt."""
    if lookup("num_return_sequences_in_group") is not None:
        return {"groups_per_step": rows}
    size = _group_size("train_env_manager", lookup)
    if rows % size:
        raise ValueError(f"is no multiple of train_env_manager.group_size ({size})")
    return {"groups_per_step": rows // size}


def _group_size(manager: str, lookup: Lookup) -> int:
    size = lookup(f"{manager}.group_size", 1)
    try:
        return whole_number(size)
    except ValueError as error:
        reason = f"{manager}.group_size is {size!r}: give the episodes of a group there: {error}"
        raise ValueError(reason) from error


def env_groups(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Groups of a step, unless `rollout_batch_size` gives them."""
    if lookup("rollout_batch_size") is None:
        return {"groups_per_step": count}
    if count != lookup("groups_per_step"):
        raise ValueError(
            "how many groups are played at once follows from max_staleness; a step has "
            f"{lookup('groups_per_step')} by rollout_batch_size"
        )
    return {}


def replies(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Replies to a prompt; with environments it is 1, and the manager has the group size."""
    if lookup("train_env_manager.group_size") is None:
        return {"group_size": count}
    if count != 1:
        raise ValueError("environments get one reply a turn; train_env_manager.group_size is the group")
    return {}


def in_folder(role: str) -> Callable[[Any, Lookup], list[str]]:
    """Returns the conversion of `file_name` to paths in `dataset_dir`, which some files name again."""

    def paths(files: Any, lookup: Lookup) -> list[str]:
        folder = lookup(f"{role}.data_args.dataset_dir", "")
        inside = (f"{folder}/", "/")
        return [
            name if not folder or name.startswith(inside) else f"{folder}/{name}"
            for name in listed(files)
        ]

    return paths


def evaluation(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Tasks of the evaluation set of environments; prompts are evaluated all."""
    if not any(lookup(section) for section in ("custom_envs", "train_env_manager", "val_env_manager")):
        raise NoEffectError("all prompts of the validation set are evaluated: scheduler.eval_groups")
    return {"scheduler.eval_groups": max(rows // _group_size("val_env_manager", lookup), 1)}


def longest(reply: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Length of prompt and reply together, unless `sequence_length` gives it."""
    if lookup("sequence_length") is not None:
        return {}
    prompt = lookup("prompt_length", 0)
    return dict.fromkeys(LENGTHS, prompt + reply)


def estimator(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The estimator; only starpo compares beyond a group or without the deviation."""
    across = lookup(f"{NORM}.grouping", "traj_group_id") != "traj_group_id"
    plain = lookup(f"{NORM}.method", "mean_std") != "mean_std"
    if name in ("grpo", "reinforce", "agentic_reinforce") and lookup(NORM) is not None:
        return {"learner.adv_estimator": "starpo" if across or plain or name != "grpo" else "grpo"}
    critic: dict[str, Any] = {"learner.critic": {}} if name == "gae" else {}
    return {"learner.adv_estimator": _ESTIMATORS(name), **critic}


def is_starpo(lookup: Lookup) -> bool:
    """Holds if the estimator is starpo here."""
    name = lookup("adv_estimator")
    return name is not None and estimator(name, lookup)["learner.adv_estimator"] == "starpo"


def grouping(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Episodes that starpo compares; other estimators have no choice."""
    if value != "traj_group_id" and not is_starpo(lookup):
        raise ValueError("only starpo compares beyond groups")
    return {"learner.reward_grouping": value}


def method(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Comparison of episodes by starpo; other estimators have no choice."""
    if value != "mean_std" and not is_starpo(lookup):
        raise ValueError("only starpo has a choice")
    return {"learner.reward_norm": _METHODS(value)}


def sampling(key: str, *ours: str) -> Derived:
    """Sampling of training episodes; that of evaluation episodes too, if environments are played."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        new = _sampling(key, value)
        keys = (*ours, f"agents.eval_generating_args.{_NAMES.get(key, key)}")
        return dict.fromkeys(keys if lookup("train_env_manager") is not None else ours, new)

    remark = "of evaluations too, with `train_env_manager`"
    return Derived(f"actor_infer.generating_args.{key}", ours, derive, remark)


def _sampling(key: str, value: Any) -> Any:
    if key == "stop_strings":
        return listed(value)
    return names.not_negative(value) if key == "top_k" else float(value)


def lora(layers: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Adapters, with their scale; layers are names between commas."""
    texts = layers.split(",") if isinstance(layers, str) else layers
    chosen = [text.strip() for text in listed(texts)]
    rank = lookup(f"{MODEL}.lora_rank", 8)
    return {
        "learner.lora.r": rank,
        "learner.lora.alpha": float(lookup(f"{MODEL}.lora_alpha", 2 * rank)),
        "learner.lora.target_modules": ["all-linear"] if chosen == ["all"] else chosen,
    }


def updates(passes: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Updates of a step; ranks that share a row by any means compute an update's rows together."""
    train = "actor_train.training_args.per_device_train_batch_size"
    shares = (f"{CONFIG}.{name}_size" for name in _PARALLEL)
    shared = math.prod(whole_number_at(name, lookup, 1) for name in (*shares, f"{MODEL}.ulysses_size"))
    groups_of_ranks = max(whole_number_at("learner.strategy_args.num_ranks", lookup, 1) // shared, 1)
    rows = whole_number(passes) * whole_number_at(train, lookup, 8) * groups_of_ranks
    of_step = math.prod(
        whole_number_at(key, lookup, usual)
        for key, usual in (("group_size", 8), ("groups_per_step", 32))
    )
    if of_step % rows:
        raise ValueError(
            f"an update of {rows} rows (rows of a pass x passes x data-parallel ranks) does not divide "
            f"the {of_step} rows of a step (group_size x groups_per_step): change one of them"
        )
    return {"learner.num_mini_batches": of_step // rows}


def workers(_count: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Environments of a process, of which ROLL starts as many as it needs."""
    raise NoEffectError("there are as many workers as the environments need")


def trained_sampling(key: str, *ours: str) -> Derived:
    """Sampling by the manager of training episodes, unless `actor_infer` gives it."""
    name = f"actor_infer.generating_args.{key}"

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        given = lookup(name)
        if given is None:
            return dict.fromkeys(ours, _sampling(key, value))
        if given != value:
            raise ValueError(f"differs from {name} ({given!r}): training episodes have one sampling")
        return {}

    return Derived(f"train_env_manager.generating_args.{key}", ours, derive, f"as `{name}`")


def kl_in_loss(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in the loss."""
    if not used or not lookup("kl_loss_coef"):
        return {}
    return {"learner.init_kl_coef": lookup("kl_loss_coef"), "learner.kl_in": "loss"}


def kl_in_reward(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in rewards."""
    if not used or not lookup("init_kl_coef"):
        return {}
    return {"learner.init_kl_coef": lookup("init_kl_coef"), "learner.kl_in": "reward"}


def staleness(ratio: float) -> int:
    """Steps that rollouts may be ahead of the learner."""
    if not math.isfinite(ratio) or ratio < 0:
        raise ValueError("expected a number of steps from 0 on")
    return math.ceil(ratio)


def tracker(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The tracker, or none."""
    project = lookup("tracker_kwargs.project", lookup("exp_name"))
    return names.trackers([name], project, ("stdout",))


def engine_gpus(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    """GPUs of the engines, and whether the learner shares one of them."""
    return {**servers_on(mapping, lookup), **_machines(lookup)}


def learner_gpus(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    """GPUs of the learner's ranks."""
    return {**ranks_on(mapping, lookup), **_machines(lookup)}


def _machines(lookup: Lookup) -> Mapping[str, Any]:
    """As many nodes as the highest GPU asks for, and turns on what both roles name."""
    learner, engine = (_gpus(lookup(name)) for name in GPUS_OF_ROLES)
    per_node, highest = lookup("cluster.num_gpus_per_node"), max((*learner, *engine), default=0)
    ours: dict[str, Any] = {"colocated": True} if set(learner) & set(engine) else {}
    if isinstance(per_node, int) and 0 < per_node <= highest:
        ours["cluster.num_nodes"] = highest // per_node + 1
    return ours


def _gpus(mapping: Any) -> list[int]:
    """The GPUs of a role; none if it names none, of which the rule of that role speaks."""
    try:
        return [] if mapping is None else devices(mapping)
    except ValueError:
        return []
