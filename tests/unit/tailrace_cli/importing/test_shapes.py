"""Configurations as users of other systems have them: a verdict, our keys, and a file that validates.

The files in `shapes/` are ours; keys and nesting are those of public recipes. `.words` hold the words
that a shell passes to the trainer, one on each line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config.settings import value_at
from tailrace_cli.__main__ import app

SHAPES = Path(__file__).parent / "shapes"
NO_REWARD = "needs: reward.rewards"
REWARDS = "reward: {rewards: [{name: right, kind: function, function: 'sums:right'}]}\n"


class Shape(NamedTuple):
    """The verdict on a file, and some of the keys of its experiment."""

    verdict: str
    keys: dict[str, Any]


EIGHT = list(range(8))
SHARED = {"colocated": True, "learner.strategy_args.strategy_name": "fsdp2"}
EXPECTED = {
    "roll/lake_shared.yaml": Shape(
        "runs",
        {
            **SHARED,
            "cluster.learner_gpus": EIGHT,
            "cluster.inference_gpus": EIGHT,
            "cluster.num_nodes": None,
            "groups_per_step": 64,
            "learner.num_mini_batches": 1,
            "agents.custom_envs.Lake.max_tokens_per_step": 48,
            "agents.generating_args": {
                "max_new_tokens": 8 * 48,
                "temperature": 0.9,
                "top_p": 0.95,
                "top_k": 50,
            },
            "learner.temperature": 0.9,
            "agents.eval_generating_args.max_new_tokens": 8 * 48,
            "agents.eval_generating_args.temperature": 0.2,
            "scheduler.eval_tags": ["Boxes", "Lake"],
        },
    ),
    "roll/boxes_steps.yaml": Shape(
        "runs",
        {
            **SHARED,
            "cluster.num_nodes": 2,
            "cluster.num_inference_servers": 16,
            "granularity": "step",
            "agents.generating_args.top_k": 0,
            "inference.gpu_memory_utilization": 0.7,
            "learner.num_mini_batches": 1,
        },
    ),
    "roll/shop_async.yaml": Shape(
        "runs",
        {
            "colocated": None,
            "max_staleness": 2,
            "learner.strategy_args.strategy_name": "megatron",
            "learner.strategy_args.tensor_parallel_size": 2,
            "inference.tensor_parallel_size": 2,
            "cluster.num_inference_servers": 2,
            "learner.adv_estimator": "starpo",
            "agents.custom_envs.Shop.env_type": "webshop",
        },
    ),
    "roll/own_environment.yaml": Shape(
        "needs: agents.custom_envs.Terminal", {"colocated": True, "max_steps": 50}
    ),
    "roll/maths_rewards.yaml": Shape(
        NO_REWARD,
        {
            **SHARED,
            "learner.strategy_args.tensor_parallel_size": None,
            "learner.num_mini_batches": 4,  # 32 rows x 4 groups of 4 ranks are a quarter of 512
            "cluster.num_nodes": 2,
            "agents.max_episode_tokens": 4000,
            "inference.max_model_len": 4000,
            "learner.dual_clip": 1.4,
        },
    ),
    "roll/off_policy.yaml": Shape(
        NO_REWARD,
        {
            "exp_name": "off-policy_run_of_topr__with_a_name_that_is_longer_than_names_of",
            "learner.loss": "topr",
            "learner.dual_clip": None,
            "colocated": None,
        },
    ),
    "areal/words_grpo.yaml": Shape(
        NO_REWARD,
        {
            "exp_name": "words-grpo_first",
            "inference.engine": "vllm",
            "inference.max_model_len": 2048,
            "inference.gpu_memory_utilization": 0.9,
            "agents.max_episode_tokens": 1536,
            "num_epochs": 4,
            "learner.tis_cap": 4.0,
        },
    ),
    "areal/agent_individual.yaml": Shape(
        NO_REWARD,
        {
            "agents.workflow": {
                "mode": "subproc",
                "agent": "shop_agent.Clerk",
                "subproc_max_workers": 16,
                "turn_discount": 0.95,
                "export_style": "individual",
            },
            "chat.tool_parser": "hermes",
            "chat.reasoning_parser": "think",
            "agents.max_episode_tokens": 16384,
            "learner.whiten_advantages": True,
            "learner.wandb.project": "shop",
        },
    ),
    "areal/agent_concat.yaml": Shape(
        NO_REWARD,
        {
            "agents.workflow.export_style": "concat",
            "agents.workflow.timeout_s": 900.0,
            "agents.max_episode_tokens": 32768,  # the source's default is longer than its engine's
            "inference.max_model_len": 32768,
            "learner.norm_std": False,
        },
    ),
    "areal/agent_in_script.yaml": Shape(
        "needs: agents.workflow, reward.rewards", {"agents.workflow.mode": "inline", "num_epochs": 20}
    ),
    "areal/sums_ppo.yaml": Shape(
        NO_REWARD,
        {
            "learner.adv_estimator": "gae",
            "learner.kl_in": "reward",
            "learner.strategy_args.num_ranks": 8,
            "learner.training_args.warmup_steps": 30,
            "inference.tensor_parallel_size": 2,
        },
    ),
    "areal/second_moment.yaml": Shape(
        NO_REWARD, {"learner.loss": "m2po", "learner.m2_threshold": 0.04, "learner.pg_clip": None}
    ),
    "verl/grpo_lora.yaml": Shape(
        NO_REWARD,
        {
            **SHARED,
            "learner.lora.r": 64,
            "learner.reference.offload": True,
            "cluster.num_inference_servers": 1,
            "learner.training_args.warmup_steps": 15,
        },
    ),
    "verl/multi_turn.yaml": Shape(
        NO_REWARD,
        {
            "inference.engine": "sglang",
            "agents.loop_args.max_turns": 6,
            "agents.datasets.train.agent_name": "tool_agent",
        },
    ),
    "verl/grpo_seven.words": Shape(
        NO_REWARD,
        {
            "num_epochs": 15,
            "cluster.num_inference_servers": 4,
            "learner.num_mini_batches": 4,
            "learner.init_kl_coef": 0.001,
            "learner.kl_estimator": "k3",
            "learner.wandb.project": "sums_seven",
        },
    ),
    "verl/ppo_reward_model.words": Shape(
        "runs",
        {
            "learner.adv_estimator": "gae",
            "reward.reward_pretrain": "sfairXC/FsfairX-LLaMA3-RM-v0.1",
            "scheduler.tags": ["train_0", "train_1"],
        },
    ),
    "verl/dapo_clips.words": Shape(
        NO_REWARD,
        {
            "exp_name": "a_run_whose_name_has_far_more_letters_than_the_names_of_our_runs",
            "learner.loss": "dapo",
            "learner.dual_clip": 10.0,
            "learner.zero_variance_groups": "redraw",
            "learner.overlong_buffer_tokens": 4096,
            "cluster.num_inference_servers": 4,
        },
    ),
    "verl/megatron_shared.words": Shape(
        NO_REWARD,
        {**SHARED, "learner.strategy_args.num_ranks": 8, "learner.num_mini_batches": 4},
    ),
    "verl/rloo_divergence.words": Shape(
        "needs: learner, reward.rewards", {"learner.adv_estimator": "rloo", "learner.kl_in": "reward"}
    ),
    "verl/gspo_rows.words": Shape(
        NO_REWARD,
        {"learner.loss": "gspo", "learner.gspo_clip": 0.0003, "learner.gspo_clip_high": 0.0004},
    ),
}


def test_all_files_have_a_case() -> None:
    library = SHAPES / "roll" / "config" / "lakes_and_boxes.yaml"
    files = {path for path in SHAPES.rglob("*") if path.is_file()} - {library}
    assert {str(path.relative_to(SHAPES)) for path in files} == set(EXPECTED)
    assert len(EXPECTED) == 20


@pytest.mark.parametrize("name", EXPECTED)
def test_files_of_users_become_experiments_that_run_or_say_what_they_need(
    name: str, tmp_path: Path
) -> None:
    source, target = SHAPES / name, tmp_path / "experiment.yaml"
    words = source.read_text().splitlines() if source.suffix == ".words" else [str(source)]
    invoke = CliRunner().invoke
    result = invoke(app, ["import-config", source.parent.name, "-o", str(target), "--", *words])
    expected = EXPECTED[name]
    assert result.stderr.splitlines()[-1].partition(";")[0] == expected.verdict
    assert result.exit_code == (0 if expected.verdict == "runs" else 2)
    content = yaml.safe_load(target.read_text())
    assert {key: value_at(content, key) for key in expected.keys} == expected.keys
    if expected.verdict == NO_REWARD:
        target.write_text(target.read_text() + REWARDS)
    if expected.verdict in ("runs", NO_REWARD):
        validated = invoke(app, ["validate", str(target), "--fast"])
        assert validated.exit_code == 0, validated.exception or validated.output
