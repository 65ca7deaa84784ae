"""Pieces of ROLL's configurations, and what they become: cases of `test_rules.py`."""

from __future__ import annotations

from typing import Any

PIECES: list[tuple[str, dict[str, Any]]] = [
    ("{rollout_batch_size: 64, num_return_sequences_in_group: 8}", {"groups_per_step": 64}),
    (
        "{rollout_batch_size: 64, train_env_manager: {group_size: 8}}",
        {"groups_per_step": 8, "group_size": 8},
    ),
    ("{train_env_manager: {num_env_groups: 5}}", {"groups_per_step": 5}),
    ("{prompt_length: 10, response_length: 20}", {"agents.max_episode_tokens": 30}),
    (
        "{sequence_length: 50, prompt_length: 10, response_length: 20}",
        {"agents.max_episode_tokens": 50, "inference.max_model_len": 50},
    ),
    ("{async_generation_ratio: 0.5}", {"max_staleness": 1}),
    (
        "{adv_estimator: gigpo, step_reward_gamma: 0.9, episode_reward_weight: 0.5}",
        {
            "learner.adv_estimator": "gigpo",
            "learner.step_gamma": 0.9,
            "learner.episode_advantage_weight": 0.5,
        },
    ),
    (
        "{adv_estimator: grpo, reward_normalization: {grouping: batch, method: mean}}",
        {
            "learner.adv_estimator": "starpo",
            "learner.reward_grouping": "batch",
            "learner.reward_norm": "mean",
        },
    ),
    (
        "{adv_estimator: gae, value_clip: 0.3, lambd: 0.9, gamma: 0.99}",
        {
            "learner.adv_estimator": "gae",
            "learner.critic": {"value_clip": 0.3},
            "learner.lambd": 0.9,
            "learner.gamma": 0.99,
        },
    ),
    ("{pg_variant: topr}", {"learner.loss": "topr", "learner.behaviour_correction": "none"}),
    (
        "{use_pg_clip_range: true, pg_clip_low: 0.1, pg_clip_high: 0.3}",
        {"learner.loss": "dapo", "learner.pg_clip": 0.1, "learner.pg_clip_high": 0.3},
    ),
    (
        "{add_token_level_kl: true, init_kl_coef: 0.2, kl_penalty: mse, target_kl: 0.1}",
        {
            "learner.init_kl_coef": 0.2,
            "learner.kl_in": "reward",
            "learner.kl_estimator": "k2",
            "learner.target_kl": 0.1,
        },
    ),
    (
        "{custom_envs: {S: {env_manager_cls: a.b.StepEnvManager, env_config: {format_penalty: -0.5}}}}",
        {
            "granularity": "step",
            "agents.custom_envs.S.env_config": {"invalid_action_penalty": 0.5},
        },
    ),
    (
        "{custom_envs: {S: {env_manager_cls: a.StepEnvManager, history_length: 0}}}",
        {"granularity": "step", "agents.custom_envs.S.history_turns": None},
    ),
    (
        "{custom_envs: {S: {env_type: mine, env_config: {anything: 1}}}}",
        {"agents.custom_envs.S.env_config.anything": 1},
    ),
    (
        "{actor_infer: {generating_args: {max_new_tokens: 9}}}",
        {"agents.generating_args.max_new_tokens": 9},
    ),
    (
        "{actor_infer: {generating_args: {max_new_tokens: 9}}, custom_envs: {L: {env_type: "
        "frozen_lake}}}",
        {
            "agents.custom_envs.L.max_tokens_per_step": 9,
            "agents.generating_args.max_new_tokens": 90,  # ten turns, unless it says more
        },
    ),
    (
        "{sequence_length: 700, custom_envs: {S: {env_type: mine, max_tokens_per_step: 9}}}",
        {"agents.generating_args.max_new_tokens": 700},
    ),
    (
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
    ("{max_len_mask: true}", {"learner.over_budget_episodes": "mask"}),
    (
        "{exp_name: a, track_with: wandb}",
        {"learner.wandb": {"project": "a", "mode": "online"}, "learner.tensorboard": False},
    ),
]

UNMAPPED: list[tuple[str, str, str]] = [
    ("{rollout_batch_size: 9, train_env_manager: {group_size: 8}}", "rollout_batch_size", "multiple"),
    ("{adv_estimator: lite_ppo}", "adv_estimator", "is none of"),
    ("{custom_envs: {S: {env_manager_cls: mine.Manager}}}", "custom_envs.S.env_manager_cls", "step"),
    (
        "{custom_envs: {S: {env_manager_cls: 0}}}",
        "custom_envs.S.env_manager_cls",
        "name a StepEnvManager or a TrajEnvManager",
    ),
    (
        "{custom_envs: {S: {env_manager_cls: a.StepEnvManager, history_length: -2}}}",
        "custom_envs.S.history_length",
        "the newest among them",
    ),
    (
        "{custom_envs: {S: {env_type: sokoban, env_config: {search_depth: 3}}}}",
        "custom_envs.S.env_config.search_depth",
        "env_type sokoban: 'search_depth' is none of dim_room, ",
    ),
    (
        "{custom_envs: {S: {env_type: sokoban, env_config: {dim_room: large}}}}",
        "custom_envs.S.env_config.dim_room",
        "env_type sokoban: dim_room: Expected `array`",
    ),
    (
        "{custom_envs: {M: {env_type: maths, max_steps: 3}}}",
        "custom_envs.M.max_steps",
        "'max_turns' is none of",
    ),
    (
        "{rollout_batch_size: 64, train_env_manager: {group_size: 0}}",
        "rollout_batch_size",
        "train_env_manager.group_size is 0: give the episodes of a group",
    ),
    (
        "{val_batch_size: 64, val_env_manager: {group_size: 0}}",
        "val_batch_size",
        "val_env_manager.group_size is 0: give the episodes of a group",
    ),
    ("{async_generation_ratio: .inf}", "async_generation_ratio", "from 0 on"),
    (
        "{custom_envs: {S: {max_tokens_per_step: many}}}",
        "custom_envs.S.max_tokens_per_step",
        "found 'many'",
    ),
    (
        "{adv_estimator: gigpo, reward_normalization: {grouping: batch}}",
        "reward_normalization.grouping",
        "starpo",
    ),
    ("{track_with: swanlab}", "track_with", "swanlab"),
]

IDLE: list[tuple[str, str, str]] = [
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
]
