"""Every setting of the table of roles changes what a service reads, or is refused with the remedy."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.config.settings import TABLES, Derived, Refused
from tailrace_cli.experiment import Experiment, decode
from tailrace_learner.config import CriticArgs, ReferenceArgs

OPTIMIZER = {
    "optimizer": "sgd",
    "learning_rate": 0.5,
    "weight_decay": 0.25,
    "warmup_steps": 7,
    "max_grad_norm": 3.0,
    "adam_beta1": 0.8,
    "adam_beta2": 0.8,
    "adam_epsilon": 0.1,
    "min_lr_ratio": 0.5,
    "lr_scheduler_type": "cosine",
}
# A value of each setting that is not the default, and what the services then read by our keys.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adv_estimator": ("rloo", {"learner.adv_estimator": "rloo"}),
    "ppo_epochs": (3, {"learner.ppo_epochs": 3}),
    "gamma": (0.5, {"learner.gamma": 0.5}),
    "lambd": (0.5, {"learner.lambd": 0.5}),
    "init_kl_coef": (0.1, {"learner.init_kl_coef": 0.1}),
    "target_kl": (0.2, {"learner.target_kl": 0.2}),
    "pg_clip": (0.1, {"learner.pg_clip": 0.1}),
    "whiten_advantages": (True, {"learner.whiten_advantages": True}),
    "entropy_loss_coef": (0.02, {"learner.entropy_loss_coef": 0.02}),
    "advantage_clip": (4.0, {"learner.advantage_clip": 4.0}),
    "reward_clip": (5.0, {"learner.reward_clip": 5.0}),
    "custom_envs": ({"lake": {"env_type": "x"}}, {"agents.custom_envs.keys": {"lake"}}),
    "reward_pretrain": ("owner/model", {"reward.reward_pretrain": "owner/model"}),
    "num_gpus_per_node": (0, {"cluster.num_gpus_per_node": 0}),
    "actor_train.model_args.model_type": ("llama", {"learner.from_scratch.model_type": "llama"}),
    "actor_train.model_args.dtype": ("bf16", {"learner.model_args.dtype": "bfloat16"}),
    "actor_train.model_args.attn_implementation": (
        "fa2",
        {"learner.model_args.attn_implementation": "flash_attention_2"},
    ),
    "actor_train.model_args.disable_gradient_checkpointing": (
        False,
        {"learner.model_args.disable_gradient_checkpointing": False},
    ),
    "actor_train.device_mapping": (
        "list(range(0, 2))",
        {"cluster.learner_gpus": (0, 1), "learner.strategy_args.num_ranks": 2},
    ),
    "actor_train.strategy_args.strategy_name": (
        "deepspeed_train",
        {"learner.strategy_args.strategy_name": "deepspeed"},
    ),
    "actor_train.strategy_args.num_ranks": (2, {"learner.strategy_args.num_ranks": 2}),
    "actor_train.strategy_args.zero_stage": (1, {"learner.strategy_args.zero_stage": 1}),
    **{
        f"actor_train.strategy_args.{key}": (2, {"learner.strategy_args.tensor_parallel_size": 2})
        for key in (
            "tensor_parallel_size",
            "tp_size",
            "strategy_config.tensor_model_parallel_size",
        )
    },
    **{
        f"actor_train.training_args.{key}": (value, {f"learner.training_args.{key}": value})
        for key, value in OPTIMIZER.items()
    },
    "actor_train.training_args.per_device_train_batch_size": (
        2,
        {"learner.max_tokens_per_micro_batch": 200, "learner.min_tokens_per_micro_batch": 200},
    ),
    "actor_train.training_args.gradient_accumulation_steps": (4, {"learner.num_mini_batches": 2}),
    "actor_infer.model_args.dtype": ("fp16", {"inference.dtype": "float16"}),
    "actor_infer.device_mapping": (
        [0, 1],
        {"cluster.inference_gpus": (0, 1), "cluster.num_inference_servers": 2},
    ),
    **{
        f"actor_infer.generating_args.{key}": (value, {f"agents.generating_args.{key}": value})
        for key, value in {"max_new_tokens": 9, "top_p": 0.5, "top_k": 5, "min_p": 0.1}.items()
    },
    "actor_infer.generating_args.temperature": (
        0.5,
        {"agents.generating_args.temperature": 0.5, "learner.temperature": 0.5},
    ),
    "actor_infer.generating_args.num_return_sequences": (4, {"run.group_size": 4}),
    "actor_infer.strategy_args.gpu_memory_utilization": (
        0.5,
        {"inference.gpu_memory_utilization": 0.5},
    ),
    **{
        f"actor_infer.strategy_args.{key}": (2, {f"inference.{kind}_parallel_size": 2})
        for kind, short in (("tensor", "tp"), ("pipeline", "pp"))
        for key in (
            f"{short}_size",
            f"{kind}_parallel_size",
            f"strategy_config.{kind}_parallel_size",
        )
    },
    "actor_infer.strategy_args.strategy_name": ("hf_infer", {"inference.engine": "hf"}),
    "train_env_manager.tags": (["b", "c"], {"scheduler.tags": ("b", "c")}),
    "train_env_manager.num_env_groups": (7, {"run.groups_per_step": 7}),
    "train_env_manager.group_size": (5, {"run.group_size": 5}),
    "train_env_manager.num_groups_partition": ([4], {"scheduler.num_groups_partition": (4,)}),
    "train_env_manager.max_env_num_per_worker": (9, {"agents.max_concurrent_episodes": 9}),
    "val_env_manager.tags": (["b", "c"], {"scheduler.eval_tags": ("b", "c")}),
    "val_env_manager.num_env_groups": (7, {"scheduler.eval_groups": 7}),
    "val_env_manager.group_size": (5, {"scheduler.eval_group_size": 5}),
    "val_env_manager.num_groups_partition": ([4], {"scheduler.eval_num_groups_partition": (4,)}),
    "val_env_manager.max_env_num_per_worker": (9, {"agents.max_concurrent_eval_episodes": 9}),
    "critic": ({}, {"learner.critic": CriticArgs()}),
    **{
        f"critic.{key}": (value, {f"learner.critic.{key}": value})
        for key, value in {
            "pretrain": "owner/model",
            "shared": True,
            "value_loss_coef": 0.5,
            "value_clip": 0.5,
            "critic_warmup": 3,
        }.items()
    },
    **{
        f"critic.training_args.{key}": (value, {f"learner.critic.training_args.{key}": value})
        for key, value in OPTIMIZER.items()
    },
    "reference": ({}, {"learner.reference": ReferenceArgs()}),
    **{
        f"reference.{key}": (value, {f"learner.reference.{key}": value})
        for key, value in {"pretrain": "owner/model", "offload": True}.items()
    },
}
FALLING: dict[str, Any] = {"training_args": {"lr_scheduler_type": "linear"}}
GAE: dict[str, Any] = {"adv_estimator": "gae", "learner": {"critic": {}}}
REFERENCE: dict[str, Any] = {"init_kl_coef": 0.1, "learner": {"reference": {}}}
# What else a setting needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "actor_train.model_args.attn_implementation": {"learner": {"model_args": {"dtype": "bfloat16"}}},
    "gamma": {"adv_estimator": "reinforce"},
    "lambd": GAE,
    "target_kl": {"init_kl_coef": 0.1},
    "critic": {"adv_estimator": "gae"},
    **{f"critic.{key}": GAE for key in ("pretrain", "shared", "value_clip", "critic_warmup")},
    **{f"critic.training_args.{key}": GAE for key in OPTIMIZER},
    "actor_train.training_args.min_lr_ratio": {"learner": FALLING},
    "actor_train.strategy_args.zero_stage": {
        "learner": {"strategy_args": {"strategy_name": "deepspeed"}}
    },
    "critic.training_args.min_lr_ratio": {"adv_estimator": "gae", "learner": {"critic": FALLING}},
    "critic.value_loss_coef": {"adv_estimator": "gae", "learner": {"critic": {"shared": True}}},
    **{
        f"actor_train.strategy_args.{key}": {
            "learner": {"strategy_args": {"strategy_name": "megatron", "num_ranks": 4}}
        }
        for key in (
            "tensor_parallel_size",
            "tp_size",
            "strategy_config.tensor_model_parallel_size",
        )
    },
    **{
        f"actor_infer.strategy_args.{key}": {"inference": {"engine": "vllm"}}
        for kind, short in (("tensor", "tp"), ("pipeline", "pp"))
        for key in (
            f"{short}_size",
            f"{kind}_parallel_size",
            f"strategy_config.{kind}_parallel_size",
        )
    },
    "reference": {"init_kl_coef": 0.1},
    "reference.pretrain": REFERENCE,
    "reference.offload": REFERENCE,
    "actor_train.model_args.model_type": {"learner": {"from_scratch": {"tokenizer": "m:f"}}},
    "actor_train.training_args.per_device_train_batch_size": {"agents": {"max_episode_tokens": 100}},
    "actor_train.training_args.gradient_accumulation_steps": {
        "agents": {"max_episode_tokens": 100},
        "group_size": 4,
        "groups_per_step": 2,
        "actor_train": {"training_args": {"per_device_train_batch_size": 1}},
    },
}
# Without them the rest is no experiment.
NEEDED = ("actor_train.model_args.model_type", "critic", "train_env_manager.tags")
MAY_BE_BESIDE = {
    "cluster.num_inference_servers",
    "learner.strategy_args.num_ranks",
}  # servers may share devices
SETTINGS = {setting.name: setting for part in TABLES.values() for setting in part}
REPEATS = [
    name for name, setting in SETTINGS.items() if isinstance(setting, Derived) and not setting.sets
]
LIVE = [
    name
    for name, setting in SETTINGS.items()
    if not isinstance(setting, Refused) and name not in REPEATS
]


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = first | second
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict):
            both[key] = merged(first[key], second[key])
    return both


def nested(name: str, value: Any) -> dict[str, Any]:
    """`value` at the dotted `name`."""
    for step in reversed(name.split(".")):
        value = {step: value}
    return value  # type: ignore[no-any-return]


def decoded(name: str, *value: Any) -> Experiment:
    """An experiment with what the setting `name` needs, and the setting itself if there is a value."""
    names_tags = name == "train_env_manager.tags"
    base = {"exp_name": "a"} | ({} if names_tags else {"scheduler": {"tags": ["lake"]}})
    content = merged(base, BESIDE.get(name, {}))
    return decode(merged(content, nested(name, *value)) if value else content, "run.yaml")


def read(experiment: Experiment, key: str) -> Any:
    """Value that a service reads at our dotted key."""
    top = getattr(experiment, key.partition(".")[0], None)
    value = attrgetter(key)(experiment if top is not None else experiment.run)
    return set(value()) if callable(value) else value


@pytest.mark.parametrize("name", LIVE)
def test_a_setting_changes_the_key_that_the_service_reads(name: str) -> None:
    value, expected = CASES[name]
    with_it = decoded(name, value)
    assert {key: read(with_it, key) for key in expected} == expected
    if name not in NEEDED:
        without = decoded(name)
        assert all(read(without, key) != read(with_it, key) for key in expected)


ANOTHER = {
    "model_args.dtype": "fp32",
    "model_args.attn_implementation": "sdpa",
    "model_args.disable_gradient_checkpointing": True,
    "device_mapping": [7],
    "strategy_args.strategy_name": "fsdp2",
    "training_args.per_device_train_batch_size": 3,
    "training_args.gradient_accumulation_steps": 8,
}


def test_a_wrong_value_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(ConfigError, match=r"\(given as actor_train\.training_args\.learning_rate\)"):
        decoded("actor_train.training_args.learning_rate", "fast")


@pytest.mark.parametrize("name", REPEATS)
def test_a_model_beside_the_policy_may_only_repeat_how_the_policy_computes(name: str) -> None:
    key = name.partition(".")[2]
    of_actor = f"actor_train.{key}"
    value, _ = CASES[of_actor]
    base = {"exp_name": "a", "scheduler": {"tags": ["lake"]}}
    given = merged(merged(base, BESIDE.get(of_actor, {})), nested(of_actor, value))
    assert decode(merged(given, nested(name, value)), "f") == decode(given, "f")
    with pytest.raises(ConfigError, match="it computes with the policy") as raised:
        decode(merged(given, nested(name, ANOTHER[key])), "f")
    assert name in str(raised.value)
    assert of_actor in str(raised.value)


@pytest.mark.parametrize(
    "name", [name for name, setting in SETTINGS.items() if isinstance(setting, Refused)]
)
def test_what_has_no_meaning_here_is_refused_with_the_remedy_and_never_ignored(name: str) -> None:
    setting = SETTINGS[name]
    assert isinstance(setting, Refused)
    with pytest.raises(ConfigError) as raised:
        decoded(name, "something else")
    assert name in str(raised.value)
    assert setting.remedy in str(raised.value)
    for harmless in setting.harmless:
        assert decoded(name, harmless) == decoded(name)


@pytest.mark.parametrize("name", [name for name in LIVE if name not in BESIDE])
def test_a_setting_under_two_names_is_an_error_that_names_both(name: str) -> None:
    value, expected = CASES[name]
    for read_key in expected.keys() - MAY_BE_BESIDE:
        key = read_key.removeprefix("run.").removesuffix(".keys")
        with pytest.raises(ConfigError, match="is also given and means the same") as raised:
            decode(merged({"exp_name": "a"} | nested(key, value), nested(name, value)), "run.yaml")
        assert name in str(raised.value)
        assert key in str(raised.value)


def test_shares_of_tags_that_do_not_make_the_number_of_groups_are_refused() -> None:
    manager = {"tags": ["b", "c"], "num_env_groups": 8, "num_groups_partition": [4, 3]}
    with pytest.raises(
        ConfigError, match=r"adds up to 7, and train_env_manager.num_env_groups .* is 8"
    ):
        decode({"exp_name": "a", "train_env_manager": manager}, "run.yaml")
    fitting = decode(
        {"exp_name": "a", "train_env_manager": {**manager, "num_groups_partition": [5, 3]}}, "run.yaml"
    )
    assert fitting.scheduler.num_groups_partition == (5, 3)
