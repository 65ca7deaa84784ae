"""The tables of our settings by other names, one for each part of an experiment."""

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import values
from tailrace.config.settings.actor_train import ACTOR_TRAIN
from tailrace.config.settings.critic_and_reference import CRITIC, REFERENCE
from tailrace.config.settings.rules import Derived, Lookup, Refused, Renamed, Rule, value_names

_ARGS = "actor_infer.generating_args"
_STRATEGY = "actor_infer.strategy_args"


def _same(*keys: str) -> tuple[Rule, ...]:
    return tuple(Renamed(f"{_ARGS}.{key}", (f"agents.generating_args.{key}",)) for key in keys)


def _engine(strategy: Any, _: Lookup) -> Mapping[str, Any]:
    return {"inference.engine": str(_ENGINES(strategy))}


def servers_on(mapping: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Returns the GPUs of the engines, and as many engines as these hold unless a number is given."""
    gpus = values.devices(mapping)
    if lookup("cluster.num_inference_servers"):
        return {"cluster.inference_gpus": gpus}
    size = 1
    for key, *others in _PARALLEL:
        names = (f"inference.engine_args.{name}" for name in others)
        given = next((name for name in names if lookup(name) is not None), key)
        size *= values.whole_number_at(given, lookup, 1)
    if len(gpus) % size:
        raise ValueError(
            f"{len(gpus)} GPUs are no multiple of the {size} that one engine has (tp_size x pp_size): "
            "change one of them"
        )
    return {"cluster.inference_gpus": gpus, "cluster.num_inference_servers": len(gpus) // size}


_TENSOR, _PIPELINE = "inference.tensor_parallel_size", "inference.pipeline_parallel_size"
_PARALLEL = (  # keys, and their names in `inference.engine_args`
    (_TENSOR, "tensor_parallel_size", "tp_size"),
    (_PIPELINE, "pipeline_parallel_size", "pp_size"),
)
_ENGINES = value_names(torch="torch", vllm="vllm", sglang="sglang", hf_infer="hf")

ACTOR_INFER: tuple[Rule, ...] = (
    Refused("actor_infer.model_args.model_type", "an engine serves the policy", ("causal_lm",)),
    Renamed("actor_infer.model_args.dtype", ("inference.dtype",), values.engine_dtype),
    Refused(
        "actor_infer.model_args.attn_implementation",
        "the engine has its own attention over its cache: remove it",
    ),
    Refused(
        "actor_infer.model_args.disable_gradient_checkpointing",
        "an engine computes no gradients",
        (True,),
    ),
    Refused("actor_infer.training_args", "give it to actor_train, which trains the policy", ({},)),
    Derived(
        "actor_infer.device_mapping",
        ("cluster.inference_gpus", "cluster.num_inference_servers"),
        servers_on,
        "GPUs of the inference servers, `tp_size` x `pp_size` for each: a list, or text like "
        "`list(range(4, 8))`",
    ),
    Renamed(
        f"{_ARGS}.max_new_tokens",
        ("agents.generating_args.max_new_tokens",),
        remark="of an episode, all its replies together; of one reply: `max_tokens_per_step` of what "
        "is played",
    ),
    *_same("top_p", "top_k", "min_p"),
    Renamed(
        f"{_ARGS}.temperature",
        ("agents.generating_args.temperature", "learner.temperature"),
        remark="where it is sampled, and at which log-probabilities are taken",
    ),
    Renamed(f"{_ARGS}.num_return_sequences", ("group_size",), remark="episodes of one task in a group"),
    Refused(f"{_ARGS}.num_beams", "replies are sampled, never searched", (1,)),
    Refused(f"{_ARGS}.repetition_penalty", "it would sample from another policy than is trained", (1,)),
    Derived(
        f"{_STRATEGY}.strategy_name",
        ("inference.engine",),
        _engine,
        "`vllm` and `sglang` are engines of these packages; `hf_infer` is `hf`, plain transformers",
    ),
    Renamed(f"{_STRATEGY}.gpu_memory_utilization", ("inference.gpu_memory_utilization",)),
    *(
        Renamed(f"{_STRATEGY}.{place}{key}", (ours,))
        for ours, key, short in _PARALLEL
        for place, key in (("", short), ("", key), ("strategy_config.", key))
    ),
)


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
_TOP_LEVEL: tuple[Rule, ...] = (
    *(Renamed(key, (f"learner.{key}",)) for key in _ALGORITHM),
    Renamed("custom_envs", ("agents.custom_envs",)),
    Renamed("reward_pretrain", ("reward.reward_pretrain",)),
    Renamed("num_gpus_per_node", ("cluster.num_gpus_per_node",)),
)


def _partition(key: str, total_key: str, total_name: str) -> Derived:
    """`num_groups_partition` of a manager: where the total is given too, both must agree."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        total = lookup(total_key)
        is_list = isinstance(value, list) and all(type(each) is int for each in value)
        if is_list and type(total) is int and sum(value) != total:
            raise ValueError(
                f"{value} adds up to {sum(value)}, and {total_name} ({total_key}) is {total}: "
                "make them equal"
            )
        return {key: value}

    return Derived(
        f"{total_name.partition('.')[0]}.num_groups_partition",
        (key,),
        derive,
        "groups of each tag, in the order of `tags`; they add up to `num_env_groups`",
    )


_TRAIN_ENV_MANAGER: tuple[Rule, ...] = (
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
_VAL_ENV_MANAGER: tuple[Rule, ...] = (
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

TABLES: dict[str, tuple[Rule, ...]] = {
    "At the top level": _TOP_LEVEL,
    "actor_train": ACTOR_TRAIN,
    "actor_infer": ACTOR_INFER,
    "critic": CRITIC,
    "reference": REFERENCE,
    "train_env_manager": _TRAIN_ENV_MANAGER,
    "val_env_manager": _VAL_ENV_MANAGER,
}
"""Rules by the part of the reference that lists them."""

RULES: tuple[Rule, ...] = tuple(rule for part in TABLES.values() for rule in part)
"""Rules of all parts."""

ROOTS = frozenset(rule.name.partition(".")[0] for rule in RULES)
"""Names that stand at the top level of an experiment."""
