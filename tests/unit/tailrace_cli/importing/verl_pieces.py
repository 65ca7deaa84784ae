"""Pieces of verl's configurations, and what they become: cases of `test_rules.py`."""

from __future__ import annotations

from typing import Any

PIECES: list[tuple[str, dict[str, Any]]] = [
    (
        "{algorithm: {adv_estimator: gae, lam: 0.9, gamma: 0.99}, critic: {optim: {lr: 0.1}, "
        "cliprange_value: 0.4, model: {path: c}}, actor_rollout_ref: {model: {path: p}}}",
        {
            "learner.adv_estimator": "gae",
            "learner.critic": {
                "value_clip": 0.4,
                "training_args": {"learning_rate": 0.1},
                "pretrain": "c",
            },
            "learner.lambd": 0.9,
            "learner.gamma": 0.99,
        },
    ),
    (
        "{algorithm: {adv_estimator: gae, filter_groups: {enable: false}}}",
        {"learner.zero_variance_groups": "count"},
    ),
    (
        "{algorithm: {adv_estimator: opo, filter_groups: {enable: true}}}",
        {"learner.zero_variance_groups": "redraw"},
    ),
    (
        "{algorithm: {adv_estimator: remax}}",
        {"learner.adv_estimator": "remax", "agents.greedy_baseline": True},
    ),
    (
        "{algorithm: {use_kl_in_reward: true, kl_penalty: abs, "
        "kl_ctrl: {type: adaptive, kl_coef: 0.2, target_kl: 0.3, horizon: 50}}}",
        {
            "learner.init_kl_coef": 0.2,
            "learner.kl_in": "reward",
            "learner.kl_estimator": "abs",
            "learner.target_kl": 0.3,
            "learner.kl_horizon": 50,
        },
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, clip_ratio_low: 0.0003, "
        "clip_ratio_high: 0.0004, clip_ratio_c: 3.0}}}",
        {
            "learner.loss": "gspo",
            "learner.gspo_clip": 0.0003,
            "learner.gspo_clip_high": 0.0004,
            "learner.dual_clip": None,
        },
    ),
    (
        "{actor_rollout_ref: {actor: {clip_ratio: 0.3}}}",
        {"learner.loss": "ppo_clip", "learner.pg_clip": 0.3},
    ),
    (
        "{data: {max_prompt_length: 100, max_response_length: 28}, "
        "actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 4}, rollout: {max_model_len: 256}}}",
        {
            "agents.max_episode_tokens": 128,
            "inference.max_model_len": 256,
            "learner.max_tokens_per_micro_batch": 512,
            "learner.min_tokens_per_micro_batch": 512,
        },
    ),
    (
        "{actor_rollout_ref: {model: {lora_rank: 8, lora_alpha: 32, target_modules: all-linear}}}",
        {"learner.lora": {"r": 8, "alpha": 32.0, "target_modules": ["all-linear"]}},
    ),
    (
        "{data: {train_files: a.jsonl}, actor_rollout_ref: {rollout: {multi_turn: {enable: true, "
        "max_assistant_turns: 3}}}}",
        {
            "agents.datasets.train": {"path": "a.jsonl", "agent_name": "tool_agent"},
            "agents.loop_args.max_turns": 3,
        },
    ),
    (
        "{data: {train_files: a.jsonl}, actor_rollout_ref: {rollout: {multi_turn: {enable: true, "
        "format: gpt-oss}}}}",
        {"chat.tool_parser": "gpt_oss"},
    ),
    ("{reward_model: {enable: true, model: {path: rm}}}", {"reward.reward_pretrain": "rm"}),
    (
        "{actor_rollout_ref: {actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 4}}}}",
        {
            "learner.strategy_args": {
                "num_ranks": 4,
                "strategy_name": "megatron",
                "tensor_parallel_size": 4,
            }
        },
    ),
    (
        "{algorithm: {rollout_correction: {rollout_is: sequence, rollout_is_threshold: 3}}}",
        {
            "learner.behaviour_correction": "tis",
            "learner.correction_level": "sequence",
            "learner.tis_cap": 3.0,
        },
    ),
    (
        "{data: {max_response_length: 100}, reward_model: {overlong_buffer: {enable: true, len: 20}}}",
        {"learner.overlong_max_tokens": 100, "learner.overlong_buffer_tokens": 20},
    ),
    (
        "{data: {max_response_length: 100}, reward: {reward_kwargs: {overlong_buffer_cfg: "
        "{enable: true, len: 30}}}}",
        {"learner.overlong_max_tokens": 100, "learner.overlong_buffer_tokens": 30},
    ),
    (
        "{data: {max_response_length: 100}, reward_model: {reward_kwargs: {overlong_buffer_cfg: "
        "{enable: true, len: 40}, max_resp_len: 100}}}",
        {"learner.overlong_max_tokens": 100, "learner.overlong_buffer_tokens": 40},
    ),
    (
        "{reward: {reward_model: {enable: true, model_path: rm}}}",
        {"reward.reward_pretrain": "rm"},
    ),
    (
        "{trainer: {logger: [console, wandb, tensorboard], project_name: p}}",
        {"learner.wandb": {"project": "p", "mode": "online"}, "learner.tensorboard": True},
    ),
    (
        "{trainer: {logger: [mlflow, trackio], project_name: p}}",
        {
            "learner.trackers": {"mlflow": {"experiment": "p"}, "trackio": {"project": "p"}},
            "learner.tensorboard": False,
        },
    ),
    (
        "{trainer: {n_gpus_per_node: 4}, actor_rollout_ref: {actor: {strategy: fsdp}}}",
        {
            "learner.strategy_args": {"num_ranks": 4, "strategy_name": "fsdp2"},
            "cluster.num_gpus_per_node": 4,
            "cluster.num_inference_servers": 4,
            "cluster.learner_gpus": [0, 1, 2, 3],
            "cluster.inference_gpus": [0, 1, 2, 3],
            "colocated": True,
        },
    ),
    (
        "{trainer: {n_gpus_per_node: 4, nnodes: 2}, actor_rollout_ref: {rollout: {name: vllm, "
        "tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}}}",
        {
            "inference.engine": "vllm",
            "inference.tensor_parallel_size": 2,
            "inference.pipeline_parallel_size": 2,
            "cluster.num_nodes": 2,
            "cluster.num_inference_servers": 2,
            "cluster.learner_gpus": list(range(8)),
        },
    ),
    (
        "{trainer: {n_gpus_per_node: 8}, actor_rollout_ref: {actor: {strategy: megatron, "
        "megatron: {tensor_model_parallel_size: 4}}}}",
        {
            "learner.strategy_args": {
                "num_ranks": 8,
                "strategy_name": "megatron",
                "tensor_parallel_size": 4,
            }
        },
    ),
    (
        "{algorithm: {adv_estimator: gae}, trainer: {total_training_steps: 100}, critic: {optim: {"
        "lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1, warmup_style: cosine, betas: [0.8, 0.99]}}}",
        {
            "learner.critic.training_args": {
                "adam_beta1": 0.8,
                "adam_beta2": 0.99,
                "warmup_steps": 10,
                "lr_scheduler_type": "cosine",
            }
        },
    ),
    (
        "{actor_rollout_ref: {actor: {optim: {min_lr_ratio: 0.1, weight_decay: 0.5}}}}",
        {"learner.training_args": {"weight_decay": 0.5}},
    ),
    (
        "{actor_rollout_ref: {actor: {optim: {min_lr_ratio: 0.1, warmup_style: cosine}}}}",
        {"learner.training_args": {"min_lr_ratio": 0.1, "lr_scheduler_type": "cosine"}},
    ),
    (
        "{actor_rollout_ref: {actor: {optim: {optimizer: AdamW}}}}",
        {"learner.training_args.optimizer": "adamw"},
    ),
]

UNMAPPED: list[tuple[str, str, str]] = [
    (
        "{actor_rollout_ref: {rollout: {val_kwargs: {do_sample: false, temperature: 0.6}}}}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample",
        "temperature is not 0",
    ),
    (
        "{actor_rollout_ref: {rollout: {do_sample: false}}}",
        "actor_rollout_ref.rollout.do_sample",
        "set the temperature to 0",
    ),
    (
        "{data: {train_batch_size: 10}, actor_rollout_ref: {actor: {ppo_mini_batch_size: 3}}}",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "does not divide",
    ),
    (
        "{algorithm: {adv_estimator: gae, filter_groups: {enable: true}}}",
        "algorithm.filter_groups.enable",
        "gae learns from groups of equal returns",
    ),
    (
        "{actor_rollout_ref: {actor: {loss_agg_mode: token-median}}}",
        "actor_rollout_ref.actor.loss_agg_mode",
        "token_mean",
    ),
    (
        "{actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 3}}}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "unknown length",
    ),
    ("{reward_model: {enable: true}}", "reward_model.enable", "names no model"),
    (
        "{trainer: {logger: [console, swanlab]}}",
        "trainer.logger",
        "'swanlab' is none of console, file, mlflow, tensorboard, trackio, wandb",
    ),
    (
        "{actor_rollout_ref: {actor: {megatron: {pipeline_model_parallel_size: 2}}}}",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "a part of each",
    ),
    (
        "{algorithm: {adv_estimator: gae}, actor_rollout_ref: {actor: {ppo_epochs: 1}}, "
        "critic: {ppo_epochs: 2}}",
        "critic.ppo_epochs",
        "differs from actor_rollout_ref.actor.ppo_epochs (1)",
    ),
    (
        "{data: {train_batch_size: 8}, actor_rollout_ref: {actor: {ppo_mini_batch_size: 0}}}",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "whole number from 1",
    ),
]

IDLE: list[tuple[str, str, str]] = [
    ("{actor_rollout_ref: {actor: {use_kl_loss: false, kl_loss_coef: 1}}}", "kl_loss_coef", "off"),
    (
        "{actor_rollout_ref: {rollout: {multi_turn: {format: hermes}}}}",
        "multi_turn.format",
        "multi_turn.enable is off",
    ),
    ("{algorithm: {kl_penalty: kl}}", "algorithm.kl_penalty", "use_kl_in_reward is off"),
    ("{algorithm: {kl_ctrl: {kl_coef: 1}}}", "kl_ctrl.kl_coef", "use_kl_in_reward is off"),
    (
        "{algorithm: {use_kl_in_reward: true, kl_ctrl: {type: fixed, horizon: 9}}}",
        "kl_ctrl.horizon",
        "not adaptive",
    ),
    ("{actor_rollout_ref: {model: {lora_rank: 0, lora_alpha: 9}}}", "lora_alpha", "lora_rank is 0"),
    ("{actor_rollout_ref: {model: {target_modules: a}}}", "target_modules", "lora_rank is 0"),
    ("{reward_model: {enable: false, model: {path: rm}}}", "model.path", "enable is off"),
    (
        "{actor_rollout_ref: {actor: {clip_ratio: 1, clip_ratio_low: 0.1, clip_ratio_high: 0.2}}}",
        "actor.clip_ratio",
        "clip_ratio_low and clip_ratio_high",
    ),
    ("{algorithm: {adv_estimator: grpo}, critic: {ppo_epochs: 5}}", "ppo_epochs", "no critic"),
]

REPEATED = [
    "{actor_rollout_ref: {actor: {strategy: fsdp2}, ref: {strategy: fsdp2}}}",
    "{algorithm: {adv_estimator: gae}, critic: {ppo_epochs: 1, loss_agg_mode: token-mean}}",
    "{actor_rollout_ref: {rollout: {response_length: 9}}, data: {max_response_length: 9}}",
]
