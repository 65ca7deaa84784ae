"""Pieces of AReaL's configurations, and what they become: cases of `test_rules.py`."""

from __future__ import annotations

import math
from typing import Any

PIECES: list[tuple[str, dict[str, Any]]] = [
    ("{gconfig: {stop: </answer>}}", {"agents.generating_args.stop": ["</answer>"]}),
    ("{gconfig: {stop: [a, b]}}", {"agents.generating_args.stop": ["a", "b"]}),
    (
        "{actor: {reward_norm: {mean_level: group, std_level: none}, use_decoupled_loss: false, "
        "eps_clip: 0.2, eps_clip_higher: 0.28}}",
        {
            "learner.adv_estimator": "grpo",
            "learner.norm_std": False,
            "learner.loss": "dapo",
            "learner.pg_clip": 0.2,
            "learner.pg_clip_high": 0.28,
        },
    ),
    (
        "{actor: {reward_norm: {mean_level: group, mean_leave1out: true}}}",
        {"learner.adv_estimator": "rloo"},
    ),
    (
        "{actor: {adv_norm: {mean_level: group, std_level: group}}}",
        {"learner.adv_estimator": "grpo", "learner.norm_std": True},
    ),
    (
        "{actor: {importance_sampling_level: sequence, eps_clip: 0.0003, eps_clip_higher: 0.0004}}",
        {
            "learner.loss": "gspo",
            "learner.gspo_clip": 0.0003,
            "learner.gspo_clip_high": 0.0004,
        },
    ),
    (
        "{actor: {path: p, kl_ctl: 0.1, kl_estimator: k1}, ref: {path: r}}",
        {
            "learner.adv_estimator": "reinforce",  # nothing compares rewards
            "learner.init_kl_coef": 0.1,
            "learner.kl_in": "reward",
            "learner.kl_estimator": "k1",
            "learner.reference": {"pretrain": "r"},
        },
    ),
    (
        "{allocation_mode: d2+d3}",
        {"cluster.num_inference_servers": 2, "learner.strategy_args.num_ranks": 3},
    ),
    (
        "{allocation_mode: 'sglang:d2+megatron:d2t4p1'}",
        {
            "cluster.num_inference_servers": 2,
            "learner.strategy_args": {
                "num_ranks": 8,
                "strategy_name": "megatron",
                "tensor_parallel_size": 4,
            },
        },
    ),
    (
        "{allocation_mode: 'vllm:d2t4p2+fsdp:d8', cluster: {n_nodes: 3, n_gpus_per_node: 8}}",
        {
            "inference.engine": "vllm",
            "inference.tensor_parallel_size": 4,
            "inference.pipeline_parallel_size": 2,
            "cluster.num_inference_servers": 2,
            "cluster.num_nodes": 3,
            "learner.strategy_args.num_ranks": 8,
        },
    ),
    (
        "{allocation_mode: 'd2+d1t2', actor: {backend: megatron}}",
        {
            "learner.strategy_args": {
                "num_ranks": 2,
                "strategy_name": "megatron",
                "tensor_parallel_size": 2,
            }
        },
    ),
    (
        "{actor: {prox_logp_method: loglinear, recompute_logprob: false, use_m2po_loss: true}}",
        {
            "learner.proximal_logprobs": "interpolate",
            "learner.loss": "m2po",
            "learner.behaviour_correction": "none",
        },
    ),
    (
        "{experiment_name: e, stats_logger: {wandb: {mode: offline}}}",
        {"learner.wandb": {"project": "e", "mode": "offline"}},
    ),
    ("{gconfig: {top_k: 100000000}}", {"agents.generating_args.top_k": 0}),
    (
        "{actor: {use_decoupled_loss: true, behav_imp_weight_cap: 5.0, eps_clip_higher: 0.3}}",
        {
            "learner.loss": "dapo",
            "learner.pg_clip_high": 0.3,
            "learner.behaviour_correction": "mis",
            "learner.tis_cap": 5.0,
        },
    ),
    (
        "{actor: {use_decoupled_loss: true, behave_imp_weight_cap: 3, "
        "behave_imp_weight_mode: token_truncate}}",
        {"learner.behaviour_correction": "tis", "learner.tis_cap": 3.0},
    ),
    (
        "{actor: {use_decoupled_loss: true}}",
        {"learner.behaviour_correction": "tis", "learner.tis_cap": math.inf},
    ),
    (
        "{actor: {use_decoupled_loss: true, rejection_sampling: "
        "{level: token, action: mask, metric: ratio, upper: 4}}}",
        {"learner.behaviour_correction": "mis", "learner.tis_cap": 4.0},
    ),
    ("{actor: {use_decoupled_loss: false}}", {"learner.behaviour_correction": "none"}),
    (
        "{rollout: {max_concurrent_rollouts: 16}, gconfig: {n_samples: 4}}",
        {"agents.max_concurrent_episodes": 64},
    ),
    ("{valid_dataset: {batch_size: 8}}", {"scheduler.eval_groups": None}),
    ("{actor: {adv_norm: true}}", {"learner.whiten_advantages": True}),
    (
        "{actor: {discount: 0.5, gae_lambda: 0.5}}",
        {"learner.adv_estimator": "reinforce", "learner.gamma": 0.25},
    ),
    (
        "{actor: {backend: 'fsdp:d4p1t1'}, rollout: {backend: 'sglang:d2p1t1'}}",
        {
            "learner.strategy_args": {"num_ranks": 4, "strategy_name": "fsdp2"},
            "cluster.num_inference_servers": 2,
        },
    ),
    (
        "{actor: {backend: 'megatron:d2t4'}}",
        {
            "learner.strategy_args": {
                "num_ranks": 8,
                "strategy_name": "megatron",
                "tensor_parallel_size": 4,
            }
        },
    ),
    (
        "{actor: {optimizer: {min_lr_ratio: 0.1, weight_decay: 0.5, lr_scheduler_type: constant}}}",
        {"learner.training_args": {"weight_decay": 0.5, "lr_scheduler_type": "constant"}},
    ),
    (
        "{actor: {optimizer: {min_lr_ratio: 0.1, lr_scheduler_type: linear}}}",
        {"learner.training_args": {"min_lr_ratio": 0.1, "lr_scheduler_type": "linear"}},
    ),
    (
        "{actor: {optimizer: {type: adam}}, critic: {path: c, optimizer: {type: sgd}}}",
        {
            "learner.training_args.optimizer": "adamw",
            "learner.critic.training_args.optimizer": "sgd",
        },
    ),
    (
        "{gconfig: {n_samples: 4, max_new_tokens: 9000, temperature: 0.9, top_p: 0.8, top_k: 30}}",
        {
            "group_size": 4,
            "scheduler.eval_group_size": None,
            "learner.temperature": 0.9,
            "agents.generating_args": {
                "max_new_tokens": 9000,
                "temperature": 0.9,
                "top_p": 0.8,
                "top_k": 30,
            },
            "agents.eval_generating_args": {
                "max_new_tokens": 9000,
                "temperature": 0.9,
                "top_p": 0.8,
                "top_k": 30,
            },
        },
    ),
    (
        "{gconfig: {n_samples: 4, temperature: 0.9, top_p: 0.8}, eval_gconfig: {n_samples: 2, "
        "temperature: 0.6, max_new_tokens: 50}}",
        {
            "group_size": 4,
            "scheduler.eval_group_size": 2,
            "agents.generating_args": {"temperature": 0.9, "top_p": 0.8},
            "agents.eval_generating_args": {"temperature": 0.6, "max_new_tokens": 50},
        },
    ),
    (
        "{actor: {m2_threshold: 0.05, eps_clip: 0.0, use_decoupled_loss: true}}",
        {
            "learner.loss": "m2po",
            "learner.m2_threshold": 0.05,
            "learner.behaviour_correction": "none",
            "learner.pg_clip": None,
        },
    ),
    (
        "{actor: {use_sapo_loss: true, sapo_tau_pos: 2, sapo_tau_neg: 3}}",
        {"learner.loss": "sapo", "learner.sapo_tau": 2.0, "learner.sapo_tau_negative": 3.0},
    ),
    (
        "{actor: {importance_sampling_level: sequence}}",
        {"learner.loss": "gspo", "learner.gspo_clip": 0.2, "learner.gspo_clip_high": 0.2},
    ),
    (
        "{gconfig: {max_new_tokens: 100}, actor: {overlong_reward_penalty: true, overlong_tokens: 20, "
        "overlong_penalty_factor: 1.0}}",
        {"learner.overlong_max_tokens": 100, "learner.overlong_buffer_tokens": 20},
    ),
    (
        "{actor: {use_lora: true, lora_rank: 8, lora_alpha: 4, target_modules: [linear_qkv], "
        "peft_type: lora}}",
        {
            "learner.lora": {
                "r": 8,
                "alpha": 4.0,
                "target_modules": ["q_proj", "k_proj", "v_proj"],
            }
        },
    ),
    (
        "{actor: {use_lora: true}}",
        {"learner.lora": {"r": 32, "alpha": 16.0, "target_modules": ["all-linear"]}},
    ),
    (
        "{actor: {backend: 'archon:d2'}}",
        {"learner.strategy_args": {"num_ranks": 2, "strategy_name": "fsdp2"}},
    ),
]

UNMAPPED: list[tuple[str, str, str]] = [
    (
        "{rollout: {max_concurrent_rollouts: many}, gconfig: {n_samples: 100000000}}",
        "rollout.max_concurrent_rollouts",
        "a whole number from 1 on, found 'many'",
    ),
    ("{allocation_mode: 'sglang:d2+d2t2'}", "allocation_mode", "has one device"),
    ("{allocation_mode: 'sglang:d2+megatron:d2p2'}", "allocation_mode", "has one device"),
    ("{allocation_mode: anything}", "allocation_mode", "like sglang:d4"),
    ("{gconfig: {temperature: 1.0}, actor: {temperature: 0.5}}", "actor.temperature", "differs from"),
    ("{actor: {recompute_logprob: false}}", "actor.recompute_logprob", "interpolate"),
    ("{actor: {use_sapo_loss: true, eps_clip_higher: 0.3}}", "actor.eps_clip_higher", "sapo"),
    ("{actor: {reward_norm: {mean_level: group}, discount: 0.9}}", "actor.discount", "do not discount"),
    (
        "{actor: {reward_norm: {mean_level: group}, gae_lambda: 0.9}}",
        "actor.gae_lambda",
        "do not discount",
    ),
    (
        "{actor: {reward_norm: {mean_level: group, std_level: group}, kl_ctl: 0.1}}",
        "actor.kl_ctl",
        "rewards of tokens, which grpo has not",
    ),
    (
        "{gconfig: {n_samples: 4}, actor: {reward_norm: {mean_level: group, group_size: 8}}}",
        "actor.reward_norm",
        "a group has one size",
    ),
    ("{actor: {reward_norm: 0}}", "actor.reward_norm", "within their group"),
    ("{actor: {behave_imp_weight_mode: sequence_mask}}", "actor.behave_imp_weight_mode", "rows"),
    (
        "{gconfig: {max_new_tokens: 8}, actor: {max_new_tokens: 9}}",
        "actor.max_new_tokens",
        "differs from gconfig.max_new_tokens (8)",
    ),
    ("{valid_dataset: {batch_size: 8}}", "valid_dataset.batch_size", "scheduler.eval_groups"),
    ("{actor: {backend: 'fsdp:d2t2'}}", "actor.backend", "has one device"),
    ("{actor: {backend: 'dtensor:d2'}}", "actor.backend", "is none of"),
    ("{rollout: {backend: sglang}}", "rollout.backend", "sglang:d4"),
    ("{actor: {backend: 'fsdp:d2'}, ref: {backend: 'fsdp:d1'}}", "ref.backend", "ranks"),
    (
        "{critic: {path: p}, actor: {reward_norm: {mean_level: group}}}",
        "actor.reward_norm",
        "with a critic",
    ),
    (
        "{rollout: {consumer_batch_size: 3}, train_dataset: {batch_size: 4}}",
        "train_dataset.batch_size",
        "groups_per_step is 3 by another setting",
    ),
    ("{gconfig: {top_k: many}}", "gconfig.top_k", "many"),
    (
        "{actor: {m2_threshold: 0.05, use_decoupled_loss: true, rejection_sampling: {upper: 5.0}}}",
        "actor.rejection_sampling",
        "m2po leaves tokens out itself",
    ),
    (
        "{actor: {overlong_reward_penalty: true}}",
        "actor.overlong_reward_penalty",
        "needs actor.overlong_tokens",
    ),
    ("{eval_gconfig: {greedy: true}}", "eval_gconfig.greedy", "set the temperature to 0"),
]

IDLE: list[tuple[str, str, str]] = [
    ("{actor: {behav_imp_weight_cap: 5}}", "behav_imp_weight_cap", "use_decoupled_loss is off"),
    ("{actor: {kl_ctl: 0.0, kl_estimator: k1}}", "actor.kl_estimator", "has no weight"),
    ("{actor: {path: p}, ref: {path: r}}", "ref.path", "has no weight"),
    (
        "{actor: {use_m2po_loss: false, m2_threshold: 0.05}}",
        "m2_threshold",
        "use_m2po_loss is off",
    ),
    ("{actor: {use_lora: false, lora_rank: 8, peft_type: other}}", "lora_rank", "use_lora is off"),
]
