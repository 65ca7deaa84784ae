"""Pieces of verl's configurations, and what they become: cases of `test_rules.py`."""

from __future__ import annotations

from typing import Any

COSINE = {"lr_scheduler_type": "cosine"}
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
        "{actor_rollout_ref: {actor: {optim: {lr: 1.0e-5, lr_decay_style: cosine, min_lr: 1.0e-6, "
        "lr_warmup_init: 0}}}}",
        {"learner.training_args": {**COSINE, "learning_rate": 1e-5, "min_lr_ratio": 0.1}},
    ),
    (
        "{actor_rollout_ref: {actor: {optim: {optimizer: AdamW}}}}",
        {"learner.training_args.optimizer": "adamw"},
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean}}}",
        {
            "learner.loss_aggregation": "seq_mean_token_mean",
            "learner.gspo_clip": 0.2,
            "learner.gspo_clip_high": 0.2,
        },
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: sapo}, tau_pos: 2, tau_neg: 3}}}",
        {
            "learner.loss": "sapo",
            "learner.loss_aggregation": "seq_mean_token_mean",
            "learner.sapo_tau": 2.0,
            "learner.sapo_tau_negative": 3.0,
        },
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: geo_mean}, clip_ratio_low: 0.5, "
        "clip_ratio_high: 0.5}}}",
        {
            "learner.loss": "gmpo",
            "learner.gmpo_clip": 0.5,
            "learner.loss_aggregation": "seq_mean_token_mean",
        },
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: cispo}, clip_ratio_low: 9, "
        "clip_ratio_high: 0.3, loss_agg_mode: token-mean}}}",
        {
            "learner.loss": "cispo",
            "learner.cispo_clip": 1.0,
            "learner.cispo_clip_high": 0.3,
            "learner.loss_aggregation": "token_mean",
        },
    ),
    (
        "{actor_rollout_ref: {actor: {clip_ratio_low: 0.1, clip_ratio_high: 0.3, policy_loss: "
        "{loss_mode: clip_cov, clip_cov_ratio: 0.001, clip_cov_lb: 2, clip_cov_ub: 4}}}}",
        {
            "learner.loss": "clip_cov",
            "learner.pg_clip": 0.1,
            "learner.pg_clip_high": 0.3,
            "learner.cov_fraction": 0.001,
            "learner.clip_cov_low": 2.0,
            "learner.clip_cov_high": 4.0,
        },
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: kl_cov, kl_cov_ratio: 0.01, "
        "ppo_kl_coef: 0.5}}}}",
        {"learner.loss": "kl_cov", "learner.cov_fraction": 0.01, "learner.kl_cov_coef": 0.5},
    ),
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: dppo_tv}, clip_ratio: 0.15, "
        "clip_ratio_c: 9}}}",
        {"learner.loss": "dppo_tv", "learner.dppo_delta": 0.15, "learner.dppo_cap": 9},
    ),
    (
        "{data: {max_response_length: 64}, actor_rollout_ref: {actor: {loss_agg_mode: "
        "seq-mean-token-sum-norm}}}",
        {"learner.loss_aggregation": "seq_mean_token_sum_norm", "learner.loss_norm_tokens": 64},
    ),
    (
        "{data: {max_response_length: 64}, actor_rollout_ref: {actor: {loss_agg_mode: "
        "seq-mean-token-sum-norm, loss_scale_factor: 100}}}",
        {"learner.loss_norm_tokens": 100},
    ),
    (
        "{algorithm: {adv_estimator: remax}, actor_rollout_ref: {rollout: {n: 4}}}",
        {"group_size": 5, "agents.greedy_baseline": True},
    ),
    (
        "{algorithm: {adv_estimator: rloo}, actor_rollout_ref: {rollout: {n: 4}}}",
        {"group_size": 4},
    ),
    (
        "{algorithm: {adv_estimator: grpo_vectorized, norm_adv_by_std_in_grpo: false}}",
        {"learner.adv_estimator": "grpo", "learner.norm_std": False},
    ),
    (
        "{actor_rollout_ref: {model: {lora: {rank: 8, alpha: 4, target_modules: [linear_qkv, "
        "linear_fc2]}}}}",
        {
            "learner.lora": {
                "r": 8,
                "alpha": 4.0,
                "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
            }
        },
    ),
    (
        "{model_engine: megatron, trainer: {n_gpus_per_node: 4}, actor_rollout_ref: {actor: {megatron: "
        "{tensor_model_parallel_size: 2}}}}",
        {
            "learner.strategy_args": {
                "num_ranks": 4,
                "strategy_name": "megatron",
                "tensor_parallel_size": 2,
            }
        },
    ),
    (
        "{data: {train_files: a.jsonl, train_max_samples: 50, apply_chat_template_kwargs: "
        "{enable_thinking: false}}, actor_rollout_ref: {rollout: {agent: {default_agent_loop: "
        "tool_agent}, multi_turn: {enable: true, max_tool_response_length: 700}}}}",
        {
            "agents.datasets.train": {"path": "a.jsonl", "limit": 50, "agent_name": "tool_agent"},
            "agents.loop_args.max_tool_output_chars": 700,
            "chat.template_args": {"enable_thinking": False},
        },
    ),
    (
        "{algorithm: {rollout_correction: {rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.99_1.01}}}",
        {"learner.geometric_mask": 0.01, "learner.behaviour_correction": None},
    ),
    (
        "{algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3, bypass_mode: "
        "true, loss_type: reinforce}}}",
        {
            "learner.loss": "tis_pg",
            "learner.behaviour_correction": "none",
            "learner.correction_level": None,
            "learner.tis_cap": 3.0,
        },
    ),
    (
        "{trainer: {resume_mode: resume_path, resume_from_path: a/step_9}}",
        {"resume_from_checkpoint": "a/step_9"},
    ),
    (
        "{trainer: {n_gpus_per_node: 3, nnodes: 2}, rollout: {n_gpus_per_node: 1, nnodes: 2}, "
        "actor_rollout_ref: {hybrid_engine: false}}",
        {
            "colocated": None,
            "max_staleness": 1,
            "cluster.num_nodes": 2,
            "cluster.num_gpus_per_node": 4,
            "cluster.learner_gpus": [0, 1, 2, 4, 5, 6],
            "cluster.inference_gpus": [3, 7],
            "cluster.num_inference_servers": 2,
            "learner.strategy_args.num_ranks": 6,
        },
    ),
    (
        "{trainer: {n_gpus_per_node: 8, nnodes: 1}, actor_rollout_ref: {rollout: {name: vllm, "
        "tensor_model_parallel_size: 4, nnodes: 2, n_gpus_per_node: 8}}}",
        {
            "colocated": None,
            "cluster.num_nodes": 3,
            "cluster.num_gpus_per_node": 8,
            "cluster.learner_gpus": list(range(8)),
            "cluster.inference_gpus": list(range(8, 24)),
            "cluster.num_inference_servers": 4,
        },
    ),
    (
        "{async_training: {staleness_threshold: 0.5, require_batches: 2, trigger_parameter_sync_step: "
        "3, partial_rollout: true}, rollout: {total_rollout_steps: 1000}, data: {train_batch_size: 0}, "
        "actor_rollout_ref: {hybrid_engine: false, actor: {ppo_mini_batch_size: 10}}, "
        "trainer: {total_epochs: 5}}",
        {
            "max_staleness": 1,
            "groups_per_step": 60,
            "learner.num_mini_batches": 6,
            "max_steps": 17,
            "num_epochs": None,
        },
    ),
]

UNMAPPED: list[tuple[str, str, str]] = [
    ("{trainer: {save_freq: .inf}}", "trainer.save_freq", "a whole number from 0 on, found inf"),
    ("{trainer: {save_freq: 2.5}}", "trainer.save_freq", "a whole number from 0 on, found 2.5"),
    (
        "{actor_rollout_ref: {actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 0}}}}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "a whole number from 1 on, found 0",
    ),
    (
        "{trainer: {n_gpus_per_node: 8, nnodes: 1000000000}}",
        "trainer.n_gpus_per_node",
        "8,000,000,000 GPUs in all: give at most 65,536",
    ),
    (
        "{trainer: {total_training_steps: 9}, actor_rollout_ref: {actor: {optim: "
        "{lr_warmup_steps_ratio: .inf}}}}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "expected a share of all steps, from 0 to 1, found inf",
    ),
    (
        "{data: {max_prompt_length: 100000000}, actor_rollout_ref: {actor: "
        "{ppo_micro_batch_size_per_gpu: many}}}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "a whole number from 1 on, found 'many'",
    ),
    ("{data: {train_files: [a.jsonl, 1]}}", "data.train_files", "expected a text or a list of texts"),
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
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: geo_mean}, clip_ratio_high: 0.4}}}",
        "actor_rollout_ref.actor.clip_ratio_high",
        "one bound for both sides",
    ),
    (
        "{data: {val_batch_size: 64}}",
        "data.val_batch_size",
        "rows that a loader gives at once; give scheduler.eval_groups",
    ),
    ("{data: {truncation: left}}", "data.truncation", "prompts are never cut"),
    (
        "{data: {train_files: [a.jsonl, b.jsonl], train_max_samples: 5}}",
        "data.train_max_samples",
        "agents.datasets.*.limit",
    ),
    (
        "{actor_rollout_ref: {rollout: {agent: {default_agent_loop: my_loop}}}}",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "agents.agent_loops",
    ),
    (
        "{algorithm: {rollout_correction: {rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.5_1.01}}}",
        "algorithm.rollout_correction.rollout_rs",
        "1 over the upper one",
    ),
    (
        "{algorithm: {rollout_correction: {bypass_mode: true, rollout_is: token}}}",
        "algorithm.rollout_correction.bypass_mode",
        "compare with the policy at a step's start",
    ),
    (
        "{trainer: {n_gpus_per_node: 4, nnodes: 1}, rollout: {n_gpus_per_node: 8, nnodes: 2}}",
        "trainer.n_gpus_per_node",
        "give cluster.learner_gpus and cluster.inference_gpus",
    ),
    (
        "{actor_rollout_ref: {hybrid_engine: false}}",
        "actor_rollout_ref.hybrid_engine",
        "give cluster.inference_gpus",
    ),
    (
        "{reward_model: {reward_manager: prime}}",
        "reward_model.reward_manager",
        "under reward.rewards",
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
    ("{actor_rollout_ref: {actor: {optim: {min_lr: 1.0e-7}}}}", "optim.min_lr", "is constant"),
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
    (
        "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean}}}",
        "loss_agg_mode",
        "the loss gspo always takes the mean of rows",
    ),
    (
        "{actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.0, kl_loss_type: k2}, "
        "ref: {fsdp_config: {param_offload: true}}}}",
        "use_kl_loss",
        "kl_loss_coef is 0",
    ),
    (
        "{actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.0}, "
        "ref: {fsdp_config: {param_offload: true}}}}",
        "ref.fsdp_config.param_offload",
        "no divergence is computed",
    ),
    (
        "{trainer: {resume_mode: auto, resume_from_path: a/step_9}}",
        "resume_from_path",
        "resume_mode is not resume_path",
    ),
]

REPEATED = [
    "{actor_rollout_ref: {actor: {strategy: fsdp2}, ref: {strategy: fsdp2}}}",
    "{algorithm: {adv_estimator: gae}, critic: {ppo_epochs: 1, loss_agg_mode: token-mean}}",
    "{actor_rollout_ref: {rollout: {response_length: 9}}, data: {max_response_length: 9}}",
    "{data: {truncation: error, filter_overlong_prompts: false, train_max_samples: -1}}",
    "{reward: {reward_manager: {name: dapo}}}",
    "{actor_rollout_ref: {rollout: {agent: {default_agent_loop: single_turn_agent}}}}",
]
