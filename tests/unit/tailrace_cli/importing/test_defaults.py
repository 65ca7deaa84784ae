"""Defaults of the other system for a partial file are written in the experiment, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.settings import value_at
from tailrace_cli.commands.import_config import converted_from
from tailrace_cli.experiment import decode
from tailrace_cli.importing.convert import add_always, completed, convert
from tailrace_cli.importing.rules import Default
from tailrace_cli.importing.systems import SYSTEMS

PARTIAL: list[tuple[str, str, dict[str, Any]]] = [
    (
        "verl",
        "{trainer: {experiment_name: a}, data: {train_files: a.jsonl}}",
        {
            "groups_per_step": 1024,
            "group_size": 1,
            "max_staleness": 0,
            "agents.eval_generating_args.temperature": 0.0,
            "learner.adv_estimator": "gae",
            "learner.lambd": 1.0,
            "learner.dual_clip": 3.0,
            "learner.behaviour_correction": "none",
            "learner.training_args.weight_decay": 0.01,
            "learner.training_args.adam_beta2": 0.999,
            "learner.critic.training_args.learning_rate": 1e-5,
        },
    ),
    (
        "verl",
        "{algorithm: {adv_estimator: grpo}, actor_rollout_ref: {actor: {optim: {betas: [0.8, 0.9]}}}}",
        {
            "learner.adv_estimator": "grpo",
            "learner.critic": None,
            "learner.training_args.adam_beta2": 0.9,
        },
    ),
    (
        "verl",
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: kl_cov}}}}",
        {"learner.cov_fraction": 2e-4, "learner.kl_cov_coef": 0.1, "learner.dual_clip": None},
    ),
    (
        "areal",
        "{experiment_name: a, actor: {path: p, use_decoupled_loss: true}}",
        {
            "seed": 1,
            "learner.adv_estimator": "reinforce",
            "learner.init_kl_coef": 0.1,
            "learner.kl_in": "reward",
            "learner.kl_estimator": "k1",
            "learner.behaviour_correction": "mis",
            "learner.tis_cap": 5.0,
            "learner.num_mini_batches": 4,
            "learner.model_args.dtype": "bfloat16",
            "learner.reward_clip": 20.0,
        },
    ),
    (
        "areal",
        "{actor: {reward_norm: {mean_level: group, std_level: group}, kl_ctl: 0.0, "
        "use_decoupled_loss: true, behav_imp_weight_cap: null}}",
        {
            "learner.adv_estimator": "grpo",
            "learner.init_kl_coef": None,
            "learner.behaviour_correction": "tis",
            "learner.tis_cap": float("inf"),
        },
    ),
    (
        "roll",
        "{exp_name: a, pretrain: p}",
        {
            "seed": 42,
            "max_steps": 500,
            "eval_steps": 10,
            "max_staleness": 0,
            "groups_per_step": 128,
            "learner.adv_estimator": "gae",
            "learner.critic.value_clip": 0.0,
            "learner.loss_aggregation": "seq_mean_token_mean",
            "learner.training_args.lr_scheduler_type": "linear",
            "learner.training_args.adam_beta2": 0.999,
            "learner.model_args.dtype": "bfloat16",
        },
    ),
    (
        "roll",
        "{exp_name: a, actor_infer: {generating_args: {top_p: 0.9}}, add_token_level_kl: true}",
        {
            "agents.generating_args.temperature": 0.95,
            "agents.generating_args.top_p": 0.9,
            "agents.generating_args.top_k": 50,
            "learner.init_kl_coef": 0.2,
            "learner.kl_in": "reward",
            "learner.kl_estimator": "k1",
        },
    ),
    (
        "roll",
        "{exp_name: a, use_kl_loss: true, kl_loss_coef: 0.1}",
        {"learner.init_kl_coef": 0.1, "learner.kl_in": "loss", "learner.kl_estimator": None},
    ),
]


@pytest.mark.parametrize(("system", "file", "expected"), PARTIAL)
def test_a_partial_file_means_what_it_means_in_its_own_system(
    system: str, file: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(file)
    content = yaml.safe_load(converted_from(system, [str(source)]).text)
    assert {key: value_at(content, key) for key in expected} == expected


def test_the_experiment_says_which_of_its_values_are_defaults(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text("{trainer: {experiment_name: a}, data: {max_prompt_length: 9}}")
    text, lines, _, _ = converted_from("verl", [str(source)])
    head = text.partition("\nexp_name")[0]
    assert "From its defaults, which differ from ours:" in head
    assert "data.max_response_length" in head
    assert "max_staleness" in head
    assert "data.max_prompt_length" not in head
    assert not [line for line in lines if line.startswith("not mapped")]
    assert yaml.safe_load(text)["num_epochs"] == 30


def test_a_setting_that_is_null_is_not_missing() -> None:
    default = Default("a.b", 1)
    assert completed({"a": {"b": None}}, [default]) == ({"a": {"b": None}}, ())
    assert completed({"a": None}, [default]) == ({"a": None}, ())
    assert completed({"a": {"c": 2}}, [default]) == ({"a": {"c": 2, "b": 1}}, (default,))
    assert completed({"x": 1}, [Default("a", 1, unless=("x",))]) == ({"x": 1}, ())
    assert completed({}, [Default("a.b", 1, within="a")]) == ({}, ())


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_default_is_a_value_that_we_take(system: str) -> None:
    needed = {
        "verl": {},
        "areal": {"critic": {"path": "c"}, "total_train_steps": 9},
        "roll": {"critic": {}, "train_env_manager": {}, "sequence_length": 9},
    }[system]
    complete, _ = completed(needed, SYSTEMS[system].defaults)
    imported = convert(SYSTEMS[system], complete)
    add_always(imported, SYSTEMS[system].always)
    content = {"exp_name": "a", **imported.content, "scheduler": {"tags": ["a"]}}
    experiment = decode(content, "defaults")  # every one is a valid value of ours
    assert tuple(experiment.scheduler.tags) == ("a",)
