"""Configurations in other systems' formats become experiments; nothing of them is lost in silence."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace.config.settings import set_at, value_at
from tailrace_cli.__main__ import app
from tailrace_cli.commands.import_config import Converted, converted_from, import_config
from tailrace_cli.experiment import load
from tailrace_cli.importing.convert import completed, convert
from tailrace_cli.importing.source import read_source
from tailrace_cli.importing.systems import SYSTEMS
from tailrace_cli.validation import check_experiment

HERE = Path(__file__).parent
FILES = {
    "roll": "roll_agentic.yaml",
    "roll_steps": "roll_steps.yaml",
    "verl": "verl_grpo.yaml",
    "areal": "areal_ppo.yaml",
}
EXPECTED: dict[str, dict[str, Any]] = {
    "roll": {
        "inference.engine": "vllm",
        "exp_name": "lake_walkers",
        "logging_dir": "./out/logs",
        "max_steps": 300,
        "groups_per_step": 16,  # 128 episodes in groups of 8
        "max_staleness": 1,
        "granularity": "trajectory",
        "group_size": 8,
        "learner.num_mini_batches": 2,  # 4 rows x 8 passes x 2 groups of ranks are half of 128 rows
        "learner.strategy_args": {
            "strategy_name": "megatron",
            "tensor_parallel_size": 2,
            "num_ranks": 4,
        },
        "scheduler.tags": ["Lake"],
        "scheduler.eval_tags": ["Lake"],
        "scheduler.eval_groups": 64,
        "agents.custom_envs.Lake.env_config": {"size": 4, "p": 0.8, "max_turns": 12},
        "agents.custom_envs.Lake.max_tokens_per_step": 64,
        "agents.custom_envs.Lake.history_turns": None,
        "agents.max_episode_tokens": 4096,
        "agents.generating_args.max_new_tokens": 12 * 64,
        "agents.eval_generating_args.max_new_tokens": 12 * 64,
        "agents.generating_args.temperature": 0.9,
        "learner.temperature": 0.9,
        "learner.adv_estimator": "grpo",
        "learner.dual_clip": 1.2,
        "learner.init_kl_coef": 0.01,
        "learner.kl_in": "loss",
        "learner.training_args.learning_rate": 2e-6,
        "learner.training_args.max_grad_norm": 0.5,
        "learner.model_args.attn_implementation": "flash_attention_2",
        "learner.max_tokens_per_micro_batch": 4 * 4096,
        "cluster.learner_gpus": [0, 1, 2, 3],
        "cluster.num_inference_servers": 4,
        "inference.max_running": 128,
    },
    "roll_steps": {
        "granularity": "step",
        "group_size": 8,
        "groups_per_step": 8,
        "scheduler.num_groups_partition": [4, 2, 2],
        "agents.custom_envs.Small": {
            "env_type": "sokoban",
            "env_config": {
                "max_turns": 10,
                "invalid_action_penalty": 0.05,
                "dim_room": [6, 6],
                "num_boxes": 1,
            },
            "in_threads": True,
            "max_tokens_per_step": 128,
            "history_turns": 4,
        },
        "agents.custom_envs.Large": {
            "env_type": "sokoban",
            "env_config": {"max_turns": 20, "num_boxes": 2},
            "max_tokens_per_step": 64,
            "history_turns": 0,
        },
        "agents.custom_envs.Shop": {
            "env_type": "webshop",
            "env_config": {"max_turns": 10, "invalid_action_penalty": 0.05},
            "max_tokens_per_step": 128,
            "history_turns": 0,
        },
        "agents.generating_args.max_new_tokens": 10 * 128,
        "agents.eval_generating_args.max_new_tokens": 10 * 128,
        "agents.max_episode_tokens": 8192,
        "learner.adv_estimator": "gigpo",
    },
    "verl": {
        "exp_name": "sums_grpo",
        "colocated": True,
        "inference.engine": "vllm",
        "inference.tensor_parallel_size": 2,
        "cluster.num_inference_servers": 4,
        "output_dir": "checkpoints/sums/sums/grpo",
        "pretrain": "Qwen/Qwen2.5-0.5B-Instruct",
        "max_steps": 400,
        "eval_steps": 0,
        "groups_per_step": 256,
        "group_size": 8,
        "scheduler.tags": ["train"],
        "scheduler.eval_tags": ["validation_0", "validation_1"],
        "agents.datasets.validation_1.path": "~/data/sums/hard.parquet",
        "agents.max_episode_tokens": 1536,
        "agents.generating_args.top_k": 0,
        "agents.eval_generating_args.temperature": 0.0,
        "learner.num_mini_batches": 4,
        "learner.loss": "dapo",
        "learner.pg_clip_high": 0.28,
        "learner.norm_std": False,
        "learner.kl_estimator": "k3",
        "learner.loss_aggregation": "seq_mean_token_mean",
        "learner.zero_variance_groups": "redraw",
        "learner.training_args.warmup_steps": 20,
        "learner.training_args.adam_beta2": 0.95,
        "learner.max_tokens_per_micro_batch": 16384,
    },
    "areal": {
        "exp_name": "sums-ppo_trial3",
        "max_staleness": 3,
        "groups_per_step": 64,
        "group_size": 4,
        "agents.max_episode_tokens": 1280,
        "agents.max_concurrent_episodes": 192 * 4,
        "cluster.num_inference_servers": 4,
        "inference.engine": "sglang",
        "inference.gpu_memory_utilization": 0.8,
        "learner.strategy_args": {"strategy_name": "fsdp2", "num_ranks": 2},
        "learner.adv_estimator": "gae",
        "learner.critic": {
            "value_clip": 0.5,
            "training_args": {
                "optimizer": "adamw",
                "learning_rate": 2e-5,
                "weight_decay": 0.01,
                "adam_beta2": 0.999,
            },
        },
        "learner.behaviour_correction": "mis",  # tokens above the cap are left out, not truncated
        "learner.tis_cap": 5.0,
        "learner.whiten_advantages": True,
        "learner.lambd": 0.9,
        "learner.kl_in": "reward",
        "learner.training_args.learning_rate": 1e-5,
        "learner.training_args.warmup_steps": 5,
    },
}
LISTED = {
    "roll": {
        "custom_envs.Lake.agent_system_template",
        "system_envs.NCCL_DEBUG",
    },
    "roll_steps": {
        "custom_envs.Large.env_config.dim_x",
        "custom_envs.Large.env_config.dim_y",
        "custom_envs.Large.env_config.search_depth",
        "custom_envs.Shop.env_config.observation_mode",
        "custom_envs.Shop.max_env_step_concurrent",
        "custom_envs.Small.agent_template",
    },
    "verl": {
        "custom_reward_function.path",
        "ray_kwargs.ray_init.num_cpus",
    },
    "areal": {
        "actor.reward_scaling",
        "saver.freq_epochs",
    },
}


def imported(source: str) -> Converted:
    return converted_from(source.partition("_")[0], [str(HERE / FILES[source])])


@pytest.mark.parametrize("source", FILES)
def test_settings_arrive_under_our_keys_with_our_values(source: str) -> None:
    content = yaml.safe_load(imported(source).text)
    assert {key: value_at(content, key) for key in EXPECTED[source]} == EXPECTED[source]


@pytest.mark.parametrize("source", FILES)
def test_what_has_no_place_is_listed_with_its_name(source: str) -> None:
    text, lines, _, _ = imported(source)
    listed = {line.split(": ")[1] for line in lines if line.startswith("not mapped: ")}
    assert listed >= LISTED[source]
    content = yaml.safe_load(text)
    assert not any(value_at(content, name) for name in listed)


# Settings that another one of the same file overrules, in that system as well.
OVERRULED = {
    "roll": set(),
    "roll_steps": {  # a reply has no more than max_new_tokens
        "custom_envs.Small.max_tokens_per_step",
        "custom_envs.Shop.max_tokens_per_step",
    },
    "verl": set(),
    "areal": set(),
}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif value is not None:
        yield path


def changed(settings: Any, path: tuple[str, ...]) -> Any:
    """The settings with another value, of the same type, at `path`."""
    if path:
        return {**settings, path[0]: changed(settings[path[0]], path[1:])}
    if isinstance(settings, bool):
        return not settings
    if isinstance(settings, int | float):
        return settings + 7
    return [*settings, "x"] if isinstance(settings, list) else f"{settings}x"


@pytest.mark.parametrize("source", FILES)
def test_every_setting_changes_the_result_or_the_list(source: str) -> None:
    settings = read_source([str(HERE / FILES[source])]).settings
    system = SYSTEMS[source.partition("_")[0]]
    before = convert(system, settings)
    lost = {
        ".".join(path)
        for path in leaves(settings)
        if ".".join(path) not in before.unmapped | before.idle
        and convert(system, changed(settings, path)) == before
    }
    assert lost == OVERRULED[source]


REWARD = "missing: reward.rewards: say what scores the replies to the rows of the data sets"


@pytest.mark.parametrize(
    ("source", "missing"),
    [("roll", []), ("roll_steps", []), ("verl", [REWARD]), ("areal", [REWARD])],
)
def test_a_source_that_says_everything_is_valid_at_once(
    source: str, missing: list[str], tmp_path: Path
) -> None:
    text, lines, _, _ = imported(source)
    assert [line for line in lines if line.startswith("missing")] == missing
    experiment = tmp_path / "experiment.yaml"
    added = "reward: {rewards: [{name: right, kind: function, function: 'sums:right'}]}\n"
    experiment.write_text(text + (added if missing else ""))
    check_experiment(load(experiment))


def test_what_the_source_does_not_say_is_called_missing(tmp_path: Path) -> None:
    source = tmp_path / "half.yaml"
    source.write_text("trainer: {experiment_name: half}\ndata: {train_files: rows.jsonl}\n")
    _, lines, _, _ = converted_from("verl", [str(source)])
    assert any("missing" in line and "neither pretrain nor" in line for line in lines)


def test_references_and_compositions_are_followed_or_listed(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(
        "defaults: [base]\nexp_name: a\npretrain: ${model}\nmax_steps: ${steps}\nsteps: 7\n"
    )
    text, lines, _, notes = converted_from("roll", [str(source)])
    content = yaml.safe_load(text)
    assert (content["exp_name"], content["max_steps"], "pretrain" in content) == ("a", 7, False)
    assert any(line.startswith("not mapped: defaults: composition by Hydra") for line in lines)
    assert any(line.startswith("no effect: steps: other settings refer to it") for line in notes)
    assert any(line.startswith("not mapped: pretrain: Interpolation key 'model'") for line in lines)


def test_the_command_writes_to_a_file_and_is_strict_when_told(tmp_path: Path) -> None:
    source, target = str(HERE / "roll_agentic.yaml"), tmp_path / "ours.yaml"
    run = CliRunner().invoke
    printed = run(app, ["import-config", "roll", source, "--all"])
    assert printed.exit_code == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["exp_name"] == "lake_walkers"
    assert "no effect: max_actions" in printed.stderr
    assert "no effect: rpc_timeout" in printed.stderr
    assert "no effect: value_clip: there is no critic" in printed.stderr
    written = run(app, ["import-config", "roll", source, "-o", str(target), "--strict"])
    assert written.exit_code == 2
    assert written.stdout == ""
    assert target.read_text() == printed.stdout
    target.write_text("mine")
    refused = run(app, ["import-config", "roll", source, "-o", str(target)])
    assert "exists and stays as it is" in str(refused.exception)
    assert target.read_text() == "mine"
    assert run(app, ["import-config", "roll", source, "-o", str(target), "--overwrite"]).exit_code == 0
    assert target.read_text() == printed.stdout


def test_nobody_is_asked_where_there_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "mine.yaml"
    target.write_text("mine")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="exists and stays as it is"):
        import_config("roll", [str(HERE / "roll_agentic.yaml")], output=str(target))
    assert target.read_text() == "mine"


def test_what_changes_nothing_in_its_own_system_is_said_and_strictly_allowed(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    text = converted_from("roll", [str(HERE / "roll_agentic.yaml")]).text
    kept = {
        key: value for key, value in yaml.safe_load(text).items() if key in ("exp_name", "pretrain")
    }
    played = {
        "custom_envs": {"L": {"env_type": "frozen_lake"}},
        "train_env_manager": {"tags": ["L"], "group_size": 8},
    }
    source.write_text(yaml.safe_dump({**kept, **played, "adv_estimator": "grpo", "value_clip": 0.5}))
    result = CliRunner().invoke(app, ["import-config", "roll", str(source), "--strict"])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "runs"
    assert result.stderr.startswith("2 harmless settings") or "harmless settings" in result.stderr


@pytest.mark.parametrize(
    ("system", "content", "named"),
    [
        ("trl", "a: 1", "unknown system 'trl': choose one of roll, verl, areal"),
        ("roll", "a: [1", "not valid YAML"),
        ("roll", "- 1", "expected keys"),
        ("verl", "", "is empty: expected keys"),
        ("verl", "# nothing", "is empty: expected keys"),
        ("verl", "{}", "is empty: expected keys"),
        ("verl", "one run of ours", "holds no settings: expected keys.* lines key=value"),
        ("roll", None, "cannot read"),
    ],
)
def test_mistakes_of_the_user_are_named(
    system: str, content: str | None, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "source.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        converted_from(system, [str(path)])


def test_a_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    source = tmp_path / "latin.yaml"
    source.write_bytes("exp_name: caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml is no text in UTF-8"):
        converted_from("roll", [str(source)])


def test_an_output_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    target = str(tmp_path / "no" / "ours.yaml")
    arguments = ["import-config", "roll", str(HERE / FILES["roll"]), "-o", target]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert f"cannot write {target}: No such file or directory: give -o" in str(result.exception)


def test_every_section_that_is_not_valid_is_named(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(
        "trainer: {experiment_name: a}\ndata: {train_files: a.jsonl}\n"
        "actor_rollout_ref: {model: {path: a/b}, actor: {entropy_coeff: much}, "
        "rollout: {val_kwargs: {n: many}}}\n"
    )
    _, lines, _, _ = converted_from("verl", [str(source)])
    wrong = [line for line in lines if line.startswith("not valid: ")]
    assert ["scheduler.eval_group_size" in wrong[0], "learner.entropy_loss_coef" in wrong[1]] == [
        True,
        True,
    ]
    assert lines[:-2] == (REWARD,)


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(
        "trainer: {experiment_name: a, total_training_steps: 1e3}\n"
        "data: {train_files: a.jsonl, train_batch_size: 64.0}\n"
        "actor_rollout_ref:\n"
        "  model: {path: a/b}\n"
        "  rollout: {temperature: 1.0}\n"
        "  actor: {ppo_mini_batch_size: 16.0, optim: {lr_warmup_steps_ratio: 0.1}}\n"
    )
    text, lines, _, _ = converted_from("verl", [str(source)])
    content = yaml.safe_load(text)
    assert lines == (REWARD,)
    assert (content["max_steps"], content["groups_per_step"]) == (1000, 64)
    assert value_at(content, "learner.num_mini_batches") == 4
    assert value_at(content, "learner.training_args.warmup_steps") == 100
    assert "temperature: 1.0" in text  # where fractions are possible nothing changes


def test_what_other_settings_refer_to_as_a_section_is_not_called_unknown(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(
        "exp_name: a\nlake: {env_type: frozen_lake, env_config: {size: 4}}\n"
        "custom_envs: {Lake: '${lake}'}\n"
    )
    _, _, _, notes = converted_from("roll", [str(source)])
    for key in ("lake.env_type", "lake.env_config.size"):
        assert f"no effect: {key}: other settings refer to it, and have its value" in notes


NO_NUMBERS = (float("nan"), float("inf"), -float("inf"), 10**400)
ODD: tuple[Any, ...] = (0, -1, 0.0, "", "x", [], [None], {}, {"a": 1}, True, 10**30, *NO_NUMBERS)


@pytest.mark.parametrize("source", list(FILES))
def test_no_value_of_any_setting_ends_with_a_traceback(source: str) -> None:
    settings = read_source([str(HERE / FILES[source])]).settings
    system = source.partition("_")[0]
    for path in leaves(settings):
        for value in ODD:
            imported = convert(SYSTEMS[system], replaced(settings, path, value))
            assert imported.content, (path, value)


def replaced(settings: Any, path: tuple[str, ...], value: Any) -> Any:
    return {**settings, path[0]: replaced(settings[path[0]], path[1:], value)} if path else value


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_no_infinite_value_of_any_rule_ends_with_a_traceback(system: str) -> None:
    for rule in SYSTEMS[system].rules:
        for value in (*NO_NUMBERS, 0):
            settings: dict[str, Any] = {}
            set_at(settings, rule.name.replace("*", "one"), value)
            imported = convert(SYSTEMS[system], completed(settings, SYSTEMS[system].defaults)[0])
            assert imported.content, (rule.name, value)


def test_agents_of_areal_are_mapped_and_other_meanings_are_told(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    agent = {
        "mode": "subproc",
        "agent_cls_path": "my_agent.MyAgent",
        "turn_discount": 0.9,
        "export_style": "individual",
        "subproc_max_workers": 8,
        "tool_call_parser": "qwen25",
        "reasoning_parser": "qwen3",
    }
    source.write_text(yaml.safe_dump({"rollout": {"agent": agent}, "total_train_epochs": 2}))
    text, lines, differing, _ = converted_from("areal", [str(source)])
    content = yaml.safe_load(text)
    workflow = content["agents"]["workflow"]
    assert {key: workflow[key] for key in agent if key in workflow} == {
        key: agent[key] for key in ("mode", "turn_discount", "export_style", "subproc_max_workers")
    }
    assert workflow["agent"] == "my_agent.MyAgent"
    assert content["chat"] == {"tool_parser": "hermes", "reasoning_parser": "think"}
    assert content["num_epochs"] == 2
    assert [line.split(": ")[1] for line in differing] == [
        "rollout.agent.export_style",
        "rollout.agent.turn_discount",
    ]
    assert not [line for line in lines if line.startswith("not mapped: rollout")]


def test_samplings_of_environment_managers_of_roll_are_mapped(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    sampling = {"temperature": 0.2, "top_p": 0.5}
    managers = {
        "val_env_manager": {"generating_args": sampling},
        "train_env_manager": {"generating_args": {"temperature": 0.7}},
    }
    source.write_text(yaml.safe_dump(managers))
    agents = yaml.safe_load(converted_from("roll", [str(source)]).text)["agents"]
    assert {key: agents["eval_generating_args"][key] for key in sampling} == sampling
    assert agents["generating_args"]["temperature"] == 0.7
    trained = {"actor_infer": {"generating_args": {"temperature": 0.9, "top_p": 0.8}}}
    source.write_text(yaml.safe_dump(managers | trained))
    text, lines, _, notes = converted_from("roll", [str(source)])
    agents = yaml.safe_load(text)["agents"]
    for sampled in (agents["generating_args"], agents["eval_generating_args"]):
        assert (sampled["temperature"], sampled["top_p"]) == (0.9, 0.8)
    assert any(line.startswith("not mapped: train_env_manager.generating_args.temp") for line in lines)
    assert any(line.startswith("no effect: val_env_manager.generating_args.temp") for line in notes)


def test_the_last_line_is_the_verdict_and_values_that_are_not_possible_fail(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text("actor_infer: {generating_args: {temperature: -1.0}}")
    result = CliRunner().invoke(app, ["import-config", "roll", str(source)])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("needs: ")
