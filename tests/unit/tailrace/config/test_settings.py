"""Settings under the field's names: mapped to the one key that is read, twice given, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.config import ConfigError, InvalidConfigError
from tailrace.config.settings import Derived, Refused, Renamed, apply_settings


def renamed_by(name: str, value: Any, **content: Any) -> dict[str, Any]:
    """The experiment with the dotted `name` set to `value`."""
    inner: Any = value
    for step in reversed(name.split(".")):
        inner = {step: inner}
    return apply_settings({"exp_name": "a", **content, **inner}, "run.yaml").content


def test_a_setting_of_a_role_is_put_where_the_service_reads_it() -> None:
    content = renamed_by("actor_train.training_args.learning_rate", 0.5, learner={"loss": "dapo"})
    assert content == {
        "exp_name": "a",
        "learner": {"loss": "dapo", "training_args": {"learning_rate": 0.5}},
    }


def test_what_is_mapped_once_is_left_alone_the_second_time() -> None:
    once = renamed_by("actor_infer.generating_args.temperature", 0.7)
    assert apply_settings(once, "run.yaml").content == once


def test_the_experiment_that_was_given_is_not_changed() -> None:
    given = {"exp_name": "a", "gamma": 0.5, "learner": {"training_args": {}}}
    apply_settings(given, "run.yaml")
    assert given == {"exp_name": "a", "gamma": 0.5, "learner": {"training_args": {}}}


def test_a_setting_given_under_both_names_is_an_error_that_names_both_and_the_file() -> None:
    with pytest.raises(
        ConfigError,
        match=r"run\.yaml: gamma: learner\.gamma is also given and means the same: keep one",
    ):
        renamed_by("gamma", 0.5, learner={"gamma": 0.5})


def test_two_names_for_the_same_key_are_an_error_too() -> None:
    settings = (Renamed("one", ("x.y",)), Renamed("two", ("x.y",)))
    with pytest.raises(ConfigError, match="two: one is also given"):
        apply_settings({"one": 1, "two": 2}, "run.yaml", settings)


def test_null_is_the_same_as_not_given() -> None:
    assert renamed_by("gamma", None, learner={"gamma": 0.5})["learner"] == {"gamma": 0.5}
    assert renamed_by("gamma", 0.5, learner={"gamma": None})["learner"] == {"gamma": 0.5}
    assert renamed_by("gamma", 0.5, learner=None)["learner"] == {"gamma": 0.5}
    assert "actor_train" not in renamed_by("actor_train", None)


def test_a_misspelt_setting_of_a_role_names_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"'actor_train\.training_args\.learning_rat'.*learning_rate"):
        renamed_by("actor_train.training_args.learning_rat", 1)
    with pytest.raises(ConfigError, match=r"'actor_train\.training'; did you mean 'training_args'"):
        renamed_by("actor_train.training", {"learning_rate": 1})


def test_a_value_where_keys_belong_lists_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"actor_train\.training_args: expected keys \(adam_beta1"):
        renamed_by("actor_train.training_args", 3)
    with pytest.raises(ConfigError, match="gamma: learner holds 3 instead of keys"):
        renamed_by("gamma", 0.5, learner=3)


def test_a_value_without_meaning_here_names_setting_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: x\.y: 2 has no meaning here: do that"):
        apply_settings({"x": {"y": 2}}, "run.yaml", (Refused("x.y", "do that", (1,)),))
    harmless = apply_settings({"x": {"y": 1}}, "run.yaml", (Refused("x.y", "do that", (1,)),))
    assert harmless.content == {}


def test_a_value_in_other_words_is_translated_and_an_unknown_word_lists_the_known_ones() -> None:
    content = renamed_by("actor_train.model_args.dtype", "bf16")
    assert content["learner"]["model_args"] == {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"actor_train\.model_args\.dtype: 'fp8' is none of.*bf16"):
        renamed_by("actor_train.model_args.dtype", "fp8")
    with pytest.raises(ConfigError, match=r"'bfloat' is none of.*did you mean 'bfloat16'\?"):
        renamed_by("actor_train.model_args.dtype", "bfloat")


def test_derived_settings_see_what_stands_under_any_name_in_any_order() -> None:
    settings = (
        Renamed("short", ("long.name",)),
        Derived(
            "twice", ("long.twice",), lambda value, lookup: {"long.twice": 2 * lookup("long.name")}, "."
        ),
    )
    for content in ({"short": 2, "twice": 1}, {"twice": 1, "long": {"name": 2}}):
        assert apply_settings(content, "run.yaml", settings).content == {
            "long": {"name": 2, "twice": 4}
        }


@pytest.mark.parametrize("mapping", [[2, 3], "list(range(2, 4))", "list(range(2,4))"])
def test_the_engines_devices_are_servers_on_them(mapping: object) -> None:
    cluster = renamed_by("actor_infer.device_mapping", mapping)["cluster"]
    assert cluster == {"inference_gpus": [2, 3], "num_inference_servers": 2}
    shared = {"num_inference_servers": 5}
    assert renamed_by("actor_infer.device_mapping", mapping, cluster=shared)["cluster"] == {
        "inference_gpus": [2, 3],
        "num_inference_servers": 5,
    }
    assert renamed_by("actor_train.device_mapping", mapping)["cluster"] == {"learner_gpus": [2, 3]}


@pytest.mark.parametrize("mapping", ["0-3", [], [True], ["0"], 3, "list(range(0))"])
def test_devices_are_a_list_of_numbers_or_a_range(mapping: object) -> None:
    with pytest.raises(ConfigError, match=r"actor_train\.device_mapping: expected numbers of GPUs"):
        renamed_by("actor_train.device_mapping", mapping)


def test_a_range_of_more_gpus_than_there_are_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"99,999,999,999 GPUs in all: give at most 65,536"):
        renamed_by("actor_train.device_mapping", "list(range(0, 99999999999))")


def test_an_architecture_needs_the_rest_of_the_model() -> None:
    scratch = {"learner": {"from_scratch": {"tokenizer": "m:f"}}}
    content = renamed_by("actor_train.model_args.model_type", "llama", **scratch)
    assert content["learner"]["from_scratch"] == {"tokenizer": "m:f", "model_type": "llama"}
    assert "learner" not in renamed_by("actor_train.model_args.model_type", "causal_lm")
    with pytest.raises(ConfigError, match=r"model_args\.model_type: 'llama' .* causal_lm"):
        renamed_by("actor_train.model_args.model_type", "llama")


BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def test_rows_of_a_pass_and_passes_of_an_update_become_tokens_and_updates() -> None:
    given = {"group_size": 4, "groups_per_step": 8, "agents": {"max_episode_tokens": 100}}
    for args in (BATCH, dict(reversed(BATCH.items()))):
        content = renamed_by("actor_train.training_args", args, **given)
        assert content["learner"] == {
            "max_tokens_per_micro_batch": 400,
            "min_tokens_per_micro_batch": 400,
            "num_mini_batches": 4,
        }


@pytest.mark.parametrize(
    ("args", "given", "named"),
    [
        (BATCH, {}, r"per_device_train_batch_size: needs agents\.max_episode_tokens"),
        ({"gradient_accumulation_steps": 2}, {}, "needs actor_train.*per_device_train_batch_size"),
        (
            BATCH,
            {"group_size": 3, "agents": {"max_episode_tokens": 9}, "groups_per_step": 5},
            r"an update of 8 rows .* does not divide the 15 rows",
        ),
        (
            {"gradient_accumulation_steps": 2},
            {"agents": {"max_episode_tokens": 9}, "learner": {"max_tokens_per_micro_batch": 8}},
            r"a pass of 8 tokens \(learner\.max_tokens_per_micro_batch\) holds no row of 9",
        ),
        (
            {"gradient_accumulation_steps": 2},
            {"agents": {"max_episode_tokens": 0}, "learner": {"max_tokens_per_micro_batch": 8}},
            r"needs agents\.max_episode_tokens: expected a whole number from 1 on, found 0",
        ),
        (
            BATCH,
            {"group_size": 0, "agents": {"max_episode_tokens": 9}},
            "needs group_size: expected a whole number from 1 on, found 0",
        ),
        ({"per_device_train_batch_size": 0}, {"agents": {"max_episode_tokens": 9}}, "found 0"),
        ({"per_device_train_batch_size": "4"}, {"agents": {"max_episode_tokens": 9}}, "found '4'"),
    ],
)
def test_batch_sizes_that_do_not_fit_say_what_to_change(
    args: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        renamed_by("actor_train.training_args", args, **given)


def test_a_value_of_another_type_is_named_with_what_is_possible() -> None:
    with pytest.raises(ConfigError, match=r"dtype: \['bf16'\] is none of bf16, bfloat16"):
        renamed_by("actor_train.model_args.dtype", ["bf16"])
    given = {"inference": {"engine_args": {"tp_size": "two"}}}
    with pytest.raises(ConfigError, match=r"needs inference\.engine_args\.tp_size: .* found 'two'"):
        renamed_by("actor_infer.device_mapping", [0, 1], **given)


@pytest.mark.parametrize("partition", [8, ["four", 4]])
def test_a_partition_of_another_type_is_left_to_the_service_that_names_it(partition: Any) -> None:
    name = "train_env_manager.num_groups_partition"
    content = renamed_by(name, partition, groups_per_step=8)
    assert content["scheduler"] == {"num_groups_partition": partition}


def test_messages_about_a_key_tell_the_name_that_it_was_given_by() -> None:
    given = {"gamma": 2, "actor_infer": {"generating_args": {"temperature": 1}}}
    applied = apply_settings(given, "run.yaml")
    said = applied.as_given("learner.temperature: must equal agents.generating_args.temperature")
    assert said.endswith("(given as actor_infer.generating_args.temperature)")
    assert applied.as_given("learner.gamma must be less").endswith("(given as gamma)")
    assert applied.as_given("learner.gammas") == "learner.gammas"


def test_all_wrong_settings_are_named_together() -> None:
    given = {"gamma": 0.5, "learner": {"gamma": 0.5}, "critic": {"pretrian": "x"}, "actor_train": 3}
    with pytest.raises(InvalidConfigError, match=r"run\.yaml: 3 problems:") as raised:
        apply_settings(given, "run.yaml")
    assert [problem.partition(";")[0].partition(":")[0] for problem in raised.value.problems] == [
        "unknown key 'critic.pretrian'",
        "actor_train",
        "gamma",
    ]
