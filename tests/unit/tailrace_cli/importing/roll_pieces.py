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
    (
        "{actor_infer: {generating_args: {stop_strings: </answer>}}}",
        {"agents.generating_args.stop": ["</answer>"]},
    ),
    (
        "{actor_infer: {generating_args: {stop_strings: [a, b]}}}",
        {"agents.generating_args.stop": ["a", "b"]},
    ),
    ("{max_len_mask: true}", {"learner.over_budget_episodes": "mask"}),
    (
        "{exp_name: a, track_with: wandb}",
        {"learner.wandb": {"project": "a", "mode": "online"}, "learner.tensorboard": False},
    ),
    (
        "{train_env_manager: {group_size: 2}, custom_envs: {L: {env_type: frozen_lake}}, actor_infer: "
        "{generating_args: {temperature: 0.7, top_p: 0.8, top_k: 20, stop_strings: [x]}}}",
        {
            "agents.generating_args.temperature": 0.7,
            "learner.temperature": 0.7,
            "agents.eval_generating_args": {
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "stop": ["x"],
            },
        },
    ),
    (
        "{actor_infer: {generating_args: {temperature: 0.7}}, validation: {generating_args: "
        "{temperature: 0.6}}}",
        {
            "agents.generating_args.temperature": 0.7,
            "agents.eval_generating_args.temperature": 0.6,
        },
    ),
    (
        "{importance_sampling: seq, pg_clip: 0.1}",
        {"learner.loss": "gspo", "learner.gspo_clip": 0.1, "learner.gspo_clip_high": 0.1},
    ),
    (
        "{ratio_type: segment, use_pg_clip_range: true, pg_clip_low: 0.1, pg_clip_high: 0.3}",
        {"learner.loss": "segment", "learner.pg_clip": 0.1, "learner.pg_clip_high": 0.3},
    ),
    ("{ratio_type: token, pg_clip: 0.1}", {"learner.loss": None, "learner.pg_clip": 0.1}),
    ("{use_pg_clip_range: true}", {"learner.loss": "dapo", "learner.pg_clip_high": 0.2}),
    (
        "{pg_variant: tis}",
        {
            "learner.loss": "tis_pg",
            "learner.behaviour_correction": "none",
            "learner.tis_cap": 1.0,
        },
    ),
    (
        "{actor_train: {pg_variant: cispo}}",
        {"learner.loss": "cispo", "learner.cispo_clip": 0.1, "learner.cispo_clip_high": 0.1},
    ),
    (
        "{actor_train: {model_args: {lora_target: 'q_proj, v_proj', lora_rank: 4}}}",
        {"learner.lora": {"r": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}},
    ),
    (
        "{actor_train: {model_args: {lora_target: all, lora_alpha: 3}}}",
        {"learner.lora": {"r": 8, "alpha": 3.0, "target_modules": ["all-linear"]}},
    ),
    (
        "{rollout_batch_size: 64, num_return_sequences_in_group: 4, actor_train: {device_mapping: "
        "'list(range(0, 16))', training_args: {per_device_train_batch_size: 2, "
        "gradient_accumulation_steps: 16}, strategy_args: {strategy_name: megatron_train, "
        "strategy_config: {tensor_model_parallel_size: 2, context_parallel_size: 4}}}}",
        {"learner.num_mini_batches": 4},  # 2 x 16 rows x 2 groups of 8 ranks are a quarter of 256
    ),
    (
        "{actor_train: {device_mapping: '[2, 3]'}, actor_infer: {device_mapping: 'list([0,1])'}}",
        {"cluster.learner_gpus": [2, 3], "cluster.inference_gpus": [0, 1]},
    ),
]

UNMAPPED: list[tuple[str, str, str]] = [
    (
        "{actor_train: {device_mapping: 'list(range(0, 99999999999))'}}",
        "actor_train.device_mapping",
        "99,999,999,999 GPUs in all: give at most 65,536",
    ),
    (
        "{actor_infer: {generating_args: {stop_strings: [a, 1]}}}",
        "actor_infer.generating_args.stop_strings",
        "expected a text or a list of texts, found ['a', 1]",
    ),
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
    (
        "{importance_sampling: seq, dual_clip_loss: true}",
        "dual_clip_loss",
        "the loss gspo has no such bound here",
    ),
    (
        "{actor_train: {strategy_args: {strategy_config: {expert_model_parallel_size: 8}}}}",
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size",
        "tensor parallelism alone",
    ),
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
    (
        "{use_kl_loss: true, kl_loss_coef: 0.1, kl_penalty: kl}",
        "kl_penalty",
        "in the loss it is always k3",
    ),
    ("{train_env_manager: {max_env_num_per_worker: 16}}", "max_env_num_per_worker", "as many workers"),
    ("{val_batch_size: 64}", "val_batch_size", "all prompts of the validation set"),
    ("{pg_clip_low: 0.1}", "pg_clip_low", "use_pg_clip_range is off"),
    ("{use_pg_clip_range: true, pg_clip: 0.1}", "pg_clip", "replace it"),
    ("{pg_variant: topr, pg_clip: 0.1}", "pg_clip", "clips no ratios"),
    ("{adv_estimator: grpo, step_reward_gamma: 0.9}", "step_reward_gamma", "does not look at steps"),
    (
        "{actor_infer: {generating_args: {temperature: 1.0}}, val_env_manager: {generating_args: "
        "{temperature: 0.2}}}",
        "val_env_manager.generating_args.temperature",
        "actor_infer.generating_args replaces it",
    ),
]
