"""A run whose experiment speaks the field's names, scored by an environment, a model and a judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, Qwen3Config

from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_learner.adapters.trajectory_files import read_groups
from tests.e2e.runs import EXPERIMENT, TAILRACE, run
from tests.world.json_server import json_server

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
    "num_labels": 1,
    "pad_token_id": 0,
}


def judge(_path: str, _key: str, body: Any) -> tuple[int, Any]:
    """Give the number of the conversation's lines."""
    lines = body["messages"][0]["content"].count("\n")
    return 200, {"choices": [{"message": {"content": f"Score: {lines}"}}]}


def experiment(folder: Path, judge_url: str) -> dict[str, Any]:
    ours = yaml.safe_load((EXPERIMENT / "experiment.yaml").read_text())
    model = folder / "reward_model"
    build_frozen_lake_tokenizer(model)
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    return {
        "exp_name": "named",
        "output_dir": str(folder / "runs"),
        "logging_dir": str(folder / "logs"),
        "max_steps": 2,
        "eval_steps": 0,
        "adv_estimator": "grpo",
        "entropy_loss_coef": 0.01,
        "num_gpus_per_node": 0,
        "reward_pretrain": str(model),
        "custom_envs": ours["agents"]["custom_envs"],
        "train_env_manager": {"tags": ["frozen_lake"], "num_env_groups": 4, "group_size": 4},
        "val_env_manager": {"tags": ["held_out_lake"], "num_env_groups": 8},
        "actor_train": {
            "model_args": {"dtype": "fp32", "model_type": "qwen3"},
            "training_args": {
                "learning_rate": 5e-4,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 4,
            },
        },
        "actor_infer": {
            "generating_args": {"temperature": 0.9, "max_new_tokens": 32},
            "strategy_args": {"strategy_name": "hf_infer"},
        },
        "scheduler": {"group_timeout_s": 400},
        "agents": {"max_episode_tokens": 128, "reward_timeout_s": 90},
        "inference": {"max_model_len": 128, "kv_cache_tokens": 16384},
        "learner": {
            "from_scratch": {
                k: v for k, v in ours["learner"]["from_scratch"].items() if k != "model_type"
            },
            "save_trajectories": True,
        },
        "reward": {
            "rewards": [
                {"name": "goal"},
                {"name": "taste", "kind": "model", "weight": 0.1},
                {
                    "name": "length",
                    "kind": "judge",
                    "weight": 0.01,
                    "timeout_s": 90,
                    "judge": {
                        "base_url": judge_url,
                        "model": "any",
                        "prompt": "{{ conversation }}",
                        "max_score": 1000,
                    },
                },
            ]
        },
    }


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_run_by_the_fields_names_scored_by_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    with json_server(judge) as url:
        path.write_text(yaml.safe_dump(experiment(tmp_path, url)))
        result = run([TAILRACE, "train", str(path)], timeout_s=500)
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = tmp_path / "runs" / "named"
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["learner"]["num_mini_batches"] == 2
    assert resolved["inference"]["engine"] == "hf"
    assert resolved["groups_per_step"] == 4
    assert "actor_train" not in resolved
    assert {"learner", "reward"} <= {log.stem for log in (tmp_path / "logs" / "named").iterdir()}
    trajectories = [
        trajectory
        for file in sorted((run_dir / "trajectories").iterdir())
        for group in read_groups(file)
        for trajectory in group.members
    ]
    assert len(trajectories) == 2 * 4 * 4
    for trajectory in trajectories:
        parts = {name: trajectory.metrics[f"reward/{name}"] for name in ("goal", "taste", "length")}
        assert parts["length"] >= 4
        weighted = parts["goal"] + 0.1 * parts["taste"] + 0.01 * parts["length"]
        assert trajectory.reward == pytest.approx(weighted, rel=1e-5, abs=1e-6)
