"""Every setting of the table of roles changes what a service reads, or is refused with the remedy."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.config.settings import TABLES, Refused
from tailrace_cli.experiment import Experiment, decode

# A value of each setting that is not the default, and what the services then read by our keys.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adv_estimator": ("rloo", {"learner.adv_estimator": "rloo"}),
    "ppo_epochs": (3, {"learner.ppo_epochs": 3}),
    "gamma": (0.5, {"learner.gamma": 0.5}),
    "pg_clip": (0.1, {"learner.pg_clip": 0.1}),
    "whiten_advantages": (True, {"learner.whiten_advantages": True}),
    "entropy_loss_coef": (0.02, {"learner.entropy_loss_coef": 0.02}),
    "advantage_clip": (4.0, {"learner.advantage_clip": 4.0}),
    "reward_clip": (5.0, {"learner.reward_clip": 5.0}),
    "custom_envs": ({"lake": {"env_type": "x"}}, {"agents.custom_envs.keys": {"lake"}}),
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
    "actor_train.device_mapping": ("list(range(0, 2))", {"cluster.learner_gpus": (0, 1)}),
    **{
        f"actor_train.training_args.{key}": (value, {f"learner.training_args.{key}": value})
        for key, value in {
            "learning_rate": 0.5,
            "weight_decay": 0.25,
            "warmup_steps": 7,
            "max_grad_norm": 3.0,
            "adam_beta1": 0.8,
            "adam_beta2": 0.8,
            "adam_epsilon": 0.1,
            "min_lr_ratio": 0.5,
            "lr_scheduler_type": "cosine",
        }.items()
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
    "actor_infer.strategy_args.strategy_name": ("hf_infer", {"inference.forward": "generic"}),
}
# What else a setting needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "gamma": {"adv_estimator": "reinforce"},
    "actor_train.model_args.model_type": {"learner": {"from_scratch": {"tokenizer": "m:f"}}},
    "actor_train.training_args.per_device_train_batch_size": {"agents": {"max_episode_tokens": 100}},
    "actor_train.training_args.gradient_accumulation_steps": {
        "agents": {"max_episode_tokens": 100},
        "group_size": 4,
        "groups_per_step": 2,
        "actor_train": {"training_args": {"per_device_train_batch_size": 1}},
    },
}
SETTINGS = {setting.name: setting for part in TABLES.values() for setting in part}
LIVE = [name for name, setting in SETTINGS.items() if not isinstance(setting, Refused)]


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = first | second
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict):
            both[key] = merged(first[key], second[key])
    return both


def decoded(name: str, **given: Any) -> Experiment:
    """An experiment with the dotted setting `name`, if there is a `value`, and what it needs."""
    content: Any = given.get("value")
    for step in reversed(name.split(".") if given else ()):
        content = {step: content}
    base = {"exp_name": "a", "scheduler": {"tags": ["lake"]}}
    return decode(merged(merged(base, BESIDE.get(name, {})), content or {}), "run.yaml")


def read(experiment: Experiment, key: str) -> Any:
    """What a service reads at our dotted key."""
    top = getattr(experiment, key.partition(".")[0], None)
    value = attrgetter(key)(experiment if top is not None else experiment.run)
    return set(value()) if callable(value) else value


@pytest.mark.parametrize("name", LIVE)
def test_a_setting_changes_the_key_that_the_service_reads(name: str) -> None:
    value, expected = CASES[name]
    with_it = decoded(name, value=value)
    assert {key: read(with_it, key) for key in expected} == expected
    if name != "actor_train.model_args.model_type":  # a model to make has no default
        without = decoded(name)
        assert all(read(without, key) != read(with_it, key) for key in expected)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in LIVE])
def test_what_has_no_meaning_here_is_refused_with_the_remedy_and_never_ignored(name: str) -> None:
    setting = SETTINGS[name]
    assert isinstance(setting, Refused)
    with pytest.raises(ConfigError) as raised:
        decoded(name, value="something else")
    assert name in str(raised.value)
    assert setting.remedy in str(raised.value)
    for harmless in setting.harmless:
        assert decoded(name, value=harmless) == decoded(name)


@pytest.mark.parametrize("name", [name for name in LIVE if name not in BESIDE])
def test_a_setting_under_two_names_is_an_error_that_names_both(name: str) -> None:
    value, expected = CASES[name]
    for key in expected:
        section, _, inner = key.removeprefix("run.").removesuffix(".keys").rpartition(".")
        other: Any = {inner: value}
        for step in reversed(section.split(".") if section else ()):
            other = {step: other}
        content = merged({"exp_name": "a"}, other)
        mine: Any = value
        for step in reversed(name.split(".")):
            mine = {step: mine}
        if name == "actor_infer.device_mapping" and inner == "num_inference_servers":
            continue  # servers may share devices
        with pytest.raises(ConfigError, match="both given") as raised:
            decode(merged(content, mine), "run.yaml")
        assert name in str(raised.value)
        assert key.removeprefix("run.").removesuffix(".keys") in str(raised.value)
