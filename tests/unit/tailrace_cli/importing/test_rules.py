"""Settings of other systems whose meaning depends on others: pieces of configurations, one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from tailrace_cli.commands.import_config import SYSTEMS
from tailrace_cli.importing.convert import at, convert

PIECES: list[tuple[str, str, dict[str, Any]]] = [
    ("roll", "{rollout_batch_size: 64, num_return_sequences_in_group: 8}", {"groups_per_step": 64}),
    (
        "roll",
        "{rollout_batch_size: 64, train_env_manager: {group_size: 8}}",
        {"groups_per_step": 8, "group_size": 8},
    ),
    ("roll", "{train_env_manager: {num_env_groups: 5}}", {"groups_per_step": 5}),
    ("roll", "{prompt_length: 10, response_length: 20}", {"agents.max_episode_tokens": 30}),
    (
        "roll",
        "{sequence_length: 50, prompt_length: 10, response_length: 20}",
        {"agents.max_episode_tokens": 50, "inference.max_model_len": 50},
    ),
    ("roll", "{async_generation_ratio: 0.5}", {"max_staleness": 1}),
    (
        "roll",
        "{adv_estimator: gigpo, step_reward_gamma: 0.9, episode_reward_weight: 0.5}",
        {
            "learner.adv_estimator": "gigpo",
            "learner.step_gamma": 0.9,
            "learner.episode_advantage_weight": 0.5,
        },
    ),
    (
        "roll",
        "{adv_estimator: grpo, reward_normalization: {grouping: batch, method: mean}}",
        {
            "learner.adv_estimator": "starpo",
            "learner.reward_grouping": "batch",
            "learner.reward_norm": "mean",
        },
    ),
    (
        "roll",
        "{adv_estimator: gae, value_clip: 0.3, lambd: 0.9, gamma: 0.99}",
        {
            "learner.adv_estimator": "gae",
            "learner.critic": {"value_clip": 0.3},
            "learner.lambd": 0.9,
            "learner.gamma": 0.99,
        },
    ),
    (
        "roll",
        "{pg_variant: topr}",
        {"learner.loss": "topr", "learner.behaviour_correction": "none"},
    ),
    (
        "roll",
        "{use_pg_clip_range: true, pg_clip_low: 0.1, pg_clip_high: 0.3}",
        {"learner.loss": "dapo", "learner.pg_clip": 0.1, "learner.pg_clip_high": 0.3},
    ),
    (
        "roll",
        "{add_token_level_kl: true, init_kl_coef: 0.2, kl_penalty: mse, target_kl: 0.1}",
        {
            "learner.init_kl_coef": 0.2,
            "learner.kl_in": "reward",
            "learner.kl_estimator": "k2",
            "learner.target_kl": 0.1,
        },
    ),
    (
        "roll",
        "{custom_envs: {S: {env_manager_cls: a.b.StepEnvManager, env_config: {format_penalty: -0.5}}}}",
        {
            "granularity": "step",
            "agents.custom_envs.S.env_config": {"invalid_action_penalty": 0.5},
        },
    ),
    (
        "roll",
        "{custom_envs: {S: {env_manager_cls: a.StepEnvManager, history_length: 0}}}",
        {"granularity": "step", "agents.custom_envs.S.history_turns": None},
    ),
    (
        "roll",
        "{custom_envs: {S: {env_type: mine, env_config: {anything: 1}}}}",
        {"agents.custom_envs.S.env_config.anything": 1},
    ),
    (
        "roll",
        "{actor_infer: {generating_args: {max_new_tokens: 9}}}",
        {"agents.generating_args.max_new_tokens": 9},
    ),
    (
        "roll",
        "{actor_infer: {generating_args: {max_new_tokens: 9}}, custom_envs: {L: {env_type: "
        "frozen_lake}}}",
        {
            "agents.custom_envs.L.max_tokens_per_step": 9,
            "agents.generating_args.max_new_tokens": 90,  # ten turns, unless it says more
        },
    ),
    (
        "roll",
        "{sequence_length: 700, custom_envs: {S: {env_type: mine, max_tokens_per_step: 9}}}",
        {"agents.generating_args.max_new_tokens": 700},
    ),
    (
        "verl",
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
        "verl",
        "{algorithm: {adv_estimator: gae, filter_groups: {enable: false}}}",
        {"learner.zero_variance_groups": "skip"},
    ),
    (
        "verl",
        "{algorithm: {adv_estimator: opo, filter_groups: {enable: true}}}",
        {"learner.zero_variance_groups": "redraw"},
    ),
    (
        "verl",
        "{algorithm: {adv_estimator: remax}}",
        {"learner.adv_estimator": "remax", "agents.greedy_baseline": True},
    ),
    (
        "verl",
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
        "verl",
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
        "verl",
        "{actor_rollout_ref: {actor: {clip_ratio: 0.3}}}",
        {"learner.loss": "ppo_clip", "learner.pg_clip": 0.3},
    ),
    (
        "verl",
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
        "verl",
        "{actor_rollout_ref: {model: {lora_rank: 8, lora_alpha: 32, target_modules: all-linear}}}",
        {"learner.lora": {"r": 8, "alpha": 32.0, "target_modules": ["all-linear"]}},
    ),
    (
        "verl",
        "{data: {train_files: a.jsonl}, actor_rollout_ref: {rollout: {multi_turn: {enable: true, "
        "max_assistant_turns: 3}}}}",
        {
            "agents.datasets.train": {"path": "a.jsonl", "agent_name": "tool_agent"},
            "agents.loop_args.max_turns": 3,
        },
    ),
    (
        "verl",
        "{reward_model: {enable: true, model: {path: rm}}}",
        {"reward.reward_pretrain": "rm"},
    ),
    (
        "areal",
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
        "areal",
        "{actor: {reward_norm: {mean_level: group, mean_leave1out: true}}}",
        {"learner.adv_estimator": "rloo"},
    ),
    (
        "areal",
        "{actor: {adv_norm: {mean_level: group, std_level: group}}}",
        {"learner.adv_estimator": "grpo", "learner.norm_std": True},
    ),
    (
        "areal",
        "{actor: {importance_sampling_level: sequence, eps_clip: 0.0003, eps_clip_higher: 0.0004}}",
        {
            "learner.loss": "gspo",
            "learner.gspo_clip": 0.0003,
            "learner.gspo_clip_high": 0.0004,
        },
    ),
    (
        "areal",
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
        "areal",
        "{allocation_mode: d2+d3}",
        {"cluster.num_inference_servers": 2, "learner.strategy_args.num_ranks": 3},
    ),
    (
        "areal",
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
        "areal",
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
        "verl",
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
        "areal",
        "{actor: {prox_logp_method: loglinear, recompute_logprob: false, use_m2po_loss: true}}",
        {
            "learner.proximal_logprobs": "interpolate",
            "learner.loss": "m2po",
            "learner.behaviour_correction": "none",
        },
    ),
    (
        "roll",
        "{actor_train: {data_args: {file_name: [data/a.jsonl, b.jsonl], dataset_dir: data}}, "
        "validation: {data_args: {file_name: c.jsonl}, generating_args: {top_p: 0.6}}}",
        {
            "agents.datasets.train_0.path": "data/a.jsonl",
            "agents.datasets.train_1.path": "data/b.jsonl",
            "agents.datasets.validation.path": "c.jsonl",
            "scheduler.tags": ["train_0", "train_1"],
            "scheduler.eval_tags": ["validation"],
            "agents.eval_generating_args.top_p": 0.6,
        },
    ),
    (
        "verl",
        "{algorithm: {rollout_correction: {rollout_is: sequence, rollout_is_threshold: 3}}}",
        {
            "learner.behaviour_correction": "tis",
            "learner.correction_level": "sequence",
            "learner.tis_cap": 3.0,
        },
    ),
    ("roll", "{max_len_mask: true}", {"learner.over_budget_episodes": "mask"}),
    (
        "verl",
        "{data: {max_response_length: 100}, reward_model: {overlong_buffer: {enable: true, len: 20}}}",
        {"learner.overlong_max_tokens": 100, "learner.overlong_buffer_tokens": 20},
    ),
    (
        "roll",
        "{exp_name: a, track_with: wandb}",
        {"learner.wandb": {"project": "a", "mode": "online"}, "learner.tensorboard": False},
    ),
    (
        "verl",
        "{trainer: {logger: [console, wandb, tensorboard], project_name: p}}",
        {"learner.wandb": {"project": "p", "mode": "online"}, "learner.tensorboard": True},
    ),
    (
        "areal",
        "{experiment_name: e, stats_logger: {wandb: {mode: offline}}}",
        {"learner.wandb": {"project": "e", "mode": "offline"}},
    ),
    ("areal", "{gconfig: {top_k: 100000000}}", {"agents.generating_args.top_k": 0}),
    (
        "areal",
        "{actor: {use_decoupled_loss: true, behav_imp_weight_cap: 5.0, eps_clip_higher: 0.3}}",
        {
            "learner.loss": "dapo",
            "learner.pg_clip_high": 0.3,
            "learner.behaviour_correction": "mis",
            "learner.tis_cap": 5.0,
        },
    ),
    (
        "areal",
        "{actor: {use_decoupled_loss: true, behave_imp_weight_cap: 3, "
        "behave_imp_weight_mode: token_truncate}}",
        {"learner.behaviour_correction": "tis", "learner.tis_cap": 3.0},
    ),
    (
        "areal",
        "{actor: {use_decoupled_loss: true}}",  # weighed without a bound
        {"learner.behaviour_correction": "tis", "learner.tis_cap": math.inf},
    ),
    (
        "areal",
        "{actor: {use_decoupled_loss: true, rejection_sampling: "
        "{level: token, action: mask, metric: ratio, upper: 4}}}",
        {"learner.behaviour_correction": "mis", "learner.tis_cap": 4.0},
    ),
    ("areal", "{actor: {use_decoupled_loss: false}}", {"learner.behaviour_correction": "none"}),
    (
        "areal",
        "{rollout: {max_concurrent_rollouts: 16}, gconfig: {n_samples: 4}}",
        {"agents.max_concurrent_episodes": 64},
    ),
    ("areal", "{valid_dataset: {batch_size: 8}}", {"scheduler.eval_groups": None}),
    ("areal", "{actor: {adv_norm: true}}", {"learner.whiten_advantages": True}),
    (
        "areal",
        "{actor: {discount: 0.5, gae_lambda: 0.5}}",  # without values both discount
        {"learner.adv_estimator": "reinforce", "learner.gamma": 0.25},
    ),
    (
        "areal",
        "{actor: {backend: 'fsdp:d4p1t1'}, rollout: {backend: 'sglang:d2p1t1'}}",
        {
            "learner.strategy_args": {"num_ranks": 4, "strategy_name": "fsdp2"},
            "cluster.num_inference_servers": 2,
        },
    ),
    (
        "areal",
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
        "verl",
        "{trainer: {n_gpus_per_node: 4}, actor_rollout_ref: {actor: {strategy: fsdp}}}",
        {
            "learner.strategy_args": {"num_ranks": 4, "strategy_name": "fsdp2"},
            "cluster.num_gpus_per_node": 4,
            "cluster.num_inference_servers": 4,
            "cluster.learner_gpus": [0, 1, 2, 3],
            "cluster.inference_gpus": [0, 1, 2, 3],
        },
    ),
    (
        "verl",
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
        "verl",
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
]


@pytest.mark.parametrize(("system", "piece", "expected"), PIECES)
def test_settings_mean_what_they_mean_together(
    system: str, piece: str, expected: dict[str, Any]
) -> None:
    imported = convert(SYSTEMS[system], yaml.safe_load(piece))
    assert {key: at(imported.content, key) for key in expected} == expected


UNMAPPED: list[tuple[str, str, str, str]] = [
    (
        "roll",
        "{rollout_batch_size: 9, train_env_manager: {group_size: 8}}",
        "rollout_batch_size",
        "multiple",
    ),
    ("roll", "{adv_estimator: lite_ppo}", "adv_estimator", "is none of"),
    (
        "roll",
        "{custom_envs: {S: {env_manager_cls: mine.Manager}}}",
        "custom_envs.S.env_manager_cls",
        "step",
    ),
    (
        "roll",
        "{custom_envs: {S: {env_manager_cls: 0}}}",
        "custom_envs.S.env_manager_cls",
        "name a StepEnvManager or a TrajEnvManager",
    ),
    (
        "roll",
        "{custom_envs: {S: {env_manager_cls: a.StepEnvManager, history_length: -2}}}",
        "custom_envs.S.history_length",
        "the newest among them",
    ),
    (
        "roll",
        "{custom_envs: {S: {env_type: sokoban, env_config: {search_depth: 3}}}}",
        "custom_envs.S.env_config.search_depth",
        "env_type sokoban: 'search_depth' is none of dim_room, ",
    ),
    (
        "roll",
        "{custom_envs: {S: {env_type: sokoban, env_config: {dim_room: large}}}}",
        "custom_envs.S.env_config.dim_room",
        "env_type sokoban: dim_room: Expected `array`",
    ),
    (
        "roll",
        "{custom_envs: {M: {env_type: maths, max_steps: 3}}}",
        "custom_envs.M.max_steps",
        "'max_turns' is none of",
    ),
    (
        "roll",
        "{rollout_batch_size: 64, train_env_manager: {group_size: 0}}",
        "rollout_batch_size",
        "train_env_manager.group_size is 0: give the episodes of a group",
    ),
    (
        "roll",
        "{val_batch_size: 64, val_env_manager: {group_size: 0}}",
        "val_batch_size",
        "val_env_manager.group_size is 0: give the episodes of a group",
    ),
    ("roll", "{async_generation_ratio: .inf}", "async_generation_ratio", "from 0 on"),
    (
        "roll",
        "{custom_envs: {S: {max_tokens_per_step: many}}}",
        "custom_envs.S.max_tokens_per_step",
        "found 'many'",
    ),
    (
        "roll",
        "{adv_estimator: gigpo, reward_normalization: {grouping: batch}}",
        "reward_normalization.grouping",
        "starpo",
    ),
    ("roll", "{track_with: swanlab}", "track_with", "swanlab"),
    (
        "verl",
        "{data: {train_batch_size: 10}, actor_rollout_ref: {actor: {ppo_mini_batch_size: 3}}}",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "does not divide",
    ),
    (
        "verl",
        "{algorithm: {adv_estimator: gae, filter_groups: {enable: true}}}",
        "algorithm.filter_groups.enable",
        "gae learns from groups of equal returns",
    ),
    (
        "verl",
        "{actor_rollout_ref: {actor: {loss_agg_mode: token-median}}}",
        "actor_rollout_ref.actor.loss_agg_mode",
        "token_mean",
    ),
    (
        "verl",
        "{actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 3}}}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "unknown length",
    ),
    ("verl", "{reward_model: {enable: true}}", "reward_model.enable", "does not say which"),
    ("verl", "{trainer: {logger: [console, swanlab]}}", "trainer.logger", "swanlab"),
    ("areal", "{allocation_mode: 'sglang:d2t2+d2'}", "allocation_mode", "one device each"),
    ("areal", "{allocation_mode: 'sglang:d2+d2t2'}", "allocation_mode", "one device each"),
    ("areal", "{allocation_mode: 'sglang:d2+megatron:d2p2'}", "allocation_mode", "one device each"),
    (
        "verl",
        "{actor_rollout_ref: {actor: {megatron: {pipeline_model_parallel_size: 2}}}}",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "a part of each",
    ),
    ("areal", "{allocation_mode: anything}", "allocation_mode", "like sglang:d4"),
    (
        "areal",
        "{gconfig: {temperature: 1.0}, actor: {temperature: 0.5}}",
        "actor.temperature",
        "differs from",
    ),
    ("areal", "{actor: {recompute_logprob: false}}", "actor.recompute_logprob", "interpolate"),
    (
        "areal",
        "{actor: {use_sapo_loss: true, eps_clip_higher: 0.3}}",
        "actor.eps_clip_higher",
        "sapo",
    ),
    (
        "areal",
        "{actor: {reward_norm: {mean_level: group}, discount: 0.9}}",
        "actor.discount",
        "do not discount",
    ),
    (
        "areal",
        "{actor: {reward_norm: {mean_level: group}, gae_lambda: 0.9}}",
        "actor.gae_lambda",
        "do not discount",
    ),
    (
        "areal",
        "{actor: {reward_norm: {mean_level: group, std_level: group}, kl_ctl: 0.1}}",
        "actor.kl_ctl",
        "rewards of tokens, which grpo has not",
    ),
    (
        "areal",
        "{gconfig: {n_samples: 4}, actor: {reward_norm: {mean_level: group, group_size: 8}}}",
        "actor.reward_norm",
        "a group has one size",
    ),
    ("areal", "{actor: {reward_norm: 0}}", "actor.reward_norm", "within their group"),
    (
        "areal",
        "{actor: {behave_imp_weight_mode: sequence_mask}}",
        "actor.behave_imp_weight_mode",
        "rows",
    ),
    (
        "areal",
        "{gconfig: {max_new_tokens: 8}, actor: {max_new_tokens: 9}}",
        "actor.max_new_tokens",
        "differs from gconfig.max_new_tokens (8)",
    ),
    ("areal", "{valid_dataset: {batch_size: 8}}", "valid_dataset.batch_size", "scheduler.eval_groups"),
    ("areal", "{actor: {backend: 'fsdp:d2t2'}}", "actor.backend", "one device each"),
    ("areal", "{actor: {backend: 'archon:d2'}}", "actor.backend", "is none of"),
    ("areal", "{rollout: {backend: sglang}}", "rollout.backend", "sglang:d4"),
    ("areal", "{actor: {backend: 'fsdp:d2'}, ref: {backend: 'fsdp:d1'}}", "ref.backend", "ranks"),
    (
        "verl",
        "{algorithm: {adv_estimator: gae}, actor_rollout_ref: {actor: {ppo_epochs: 1}}, "
        "critic: {ppo_epochs: 2}}",
        "critic.ppo_epochs",
        "differs from actor_rollout_ref.actor.ppo_epochs (1)",
    ),
    (
        "verl",
        "{data: {train_batch_size: 8}, actor_rollout_ref: {actor: {ppo_mini_batch_size: 0}}}",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "whole number from 1",
    ),
    (
        "areal",
        "{critic: {path: p}, actor: {reward_norm: {mean_level: group}}}",
        "actor.reward_norm",
        "with a critic",
    ),
    (
        "areal",
        "{rollout: {consumer_batch_size: 3}, train_dataset: {batch_size: 4}}",
        "train_dataset.batch_size",
        "groups_per_step is 3 by another setting",
    ),
    ("areal", "{gconfig: {top_k: many}}", "gconfig.top_k", "many"),
]


@pytest.mark.parametrize(("system", "piece", "name", "reason"), UNMAPPED)
def test_what_contradicts_or_has_no_meaning_is_unmapped_with_the_reason(
    system: str, piece: str, name: str, reason: str
) -> None:
    unmapped = convert(SYSTEMS[system], yaml.safe_load(piece)).unmapped
    assert list(unmapped) == [name]
    assert reason in unmapped[name]


@pytest.mark.parametrize(
    ("piece", "name", "reason"),
    [
        (
            "{custom_envs: {L: {env_manager_cls: a.TrajEnvManager, history_length: 5}}}",
            "custom_envs.L.history_length",
            "shows all turns",
        ),
        (
            "{actor_infer: {generating_args: {max_new_tokens: 64}}, "
            "custom_envs: {L: {max_tokens_per_step: 32}}}",
            "actor_infer.generating_args.max_new_tokens",
            "is no larger",
        ),
    ],
)
def test_what_changes_nothing_there_either_is_idle(piece: str, name: str, reason: str) -> None:
    imported = convert(SYSTEMS["roll"], yaml.safe_load(piece))
    assert imported.unmapped == {}
    assert list(imported.idle) == [name]
    assert reason in imported.idle[name]


IDLE: list[tuple[str, str, str, str]] = [
    (
        "verl",
        "{actor_rollout_ref: {actor: {use_kl_loss: false, kl_loss_coef: 1}}}",
        "kl_loss_coef",
        "off",
    ),
    ("verl", "{algorithm: {kl_penalty: kl}}", "algorithm.kl_penalty", "use_kl_in_reward is off"),
    ("verl", "{algorithm: {kl_ctrl: {kl_coef: 1}}}", "kl_ctrl.kl_coef", "use_kl_in_reward is off"),
    (
        "verl",
        "{algorithm: {use_kl_in_reward: true, kl_ctrl: {type: fixed, horizon: 9}}}",
        "kl_ctrl.horizon",
        "not adaptive",
    ),
    (
        "verl",
        "{actor_rollout_ref: {model: {lora_rank: 0, lora_alpha: 9}}}",
        "lora_alpha",
        "lora_rank is 0",
    ),
    ("verl", "{actor_rollout_ref: {model: {target_modules: a}}}", "target_modules", "lora_rank is 0"),
    ("verl", "{reward_model: {enable: false, model: {path: rm}}}", "model.path", "enable is off"),
    (
        "verl",
        "{actor_rollout_ref: {actor: {clip_ratio: 1, clip_ratio_low: 0.1, clip_ratio_high: 0.2}}}",
        "actor.clip_ratio",
        "clip_ratio_low and clip_ratio_high",
    ),
    ("verl", "{algorithm: {adv_estimator: grpo}, critic: {ppo_epochs: 5}}", "ppo_epochs", "no critic"),
    (
        "areal",
        "{actor: {behav_imp_weight_cap: 5}}",
        "behav_imp_weight_cap",
        "use_decoupled_loss is off",
    ),
    ("areal", "{actor: {kl_ctl: 0.0, kl_estimator: k1}}", "actor.kl_estimator", "weighs nothing"),
    ("areal", "{actor: {path: p}, ref: {path: r}}", "ref.path", "weighs nothing"),
]


@pytest.mark.parametrize(("system", "piece", "name", "reason"), IDLE)
def test_what_is_switched_off_is_said_to_have_no_effect(
    system: str, piece: str, name: str, reason: str
) -> None:
    imported = convert(SYSTEMS[system], yaml.safe_load(piece))
    assert [key for key in imported.idle if key.endswith(name) and reason in imported.idle[key]]
    assert not imported.unmapped


REPEATED = [
    "{actor_rollout_ref: {actor: {strategy: fsdp2}, ref: {strategy: fsdp2}}}",
    "{algorithm: {adv_estimator: gae}, critic: {ppo_epochs: 1, loss_agg_mode: token-mean}}",
    "{actor_rollout_ref: {rollout: {response_length: 9}}, data: {max_response_length: 9}}",
]


@pytest.mark.parametrize("piece", REPEATED)
def test_what_says_again_what_another_setting_says_is_not_listed(piece: str) -> None:
    imported = convert(SYSTEMS["verl"], yaml.safe_load(piece))
    assert not imported.unmapped
