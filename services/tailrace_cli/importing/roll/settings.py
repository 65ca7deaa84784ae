"""ROLL (alibaba/ROLL): pipelines of agents and of verifiable rewards.

Its roles have the names that ours have too: those lines are the table of our own settings.
"""

from __future__ import annotations

from tailrace.config.settings import TABLES, Derived, Refused, values
from tailrace_cli.importing import words
from tailrace_cli.importing.roll import environments, rules
from tailrace_cli.importing.roll.defaults import ALWAYS, DEFAULTS
from tailrace_cli.importing.rules import System, nothing, ratio_of_steps, run_name, to, when

_OF_CRITIC = "there is no critic: adv_estimator is not gae"
_RUN = (
    "seed",
    "output_dir",
    "logging_dir",
    "render_save_dir",
    "max_steps",
    "logging_steps",
    "pretrain",
)
_ENV = "custom_envs.*"
_READING = ("action_pattern", "action_lookup", "grid_lookup", "grid_vocab", "env_instruction")
_OWN_READING = "environments here read replies and write observations in words of their own"
_INFER = "actor_infer.strategy_args.strategy_config"
_OURS = tuple(
    setting
    for table in TABLES.values()
    for setting in table
    if setting.name not in ("critic", "reference", "custom_envs")
)

ROLL = System(
    "roll",
    "ROLL",
    (
        to("exp_name", "exp_name", by=run_name),
        *(to(key, key) for key in _RUN),
        to("save_steps", "save_steps", by=words.steps_or_never),
        to("eval_steps", "eval_steps", by=words.steps_or_never),
        to("resume_from_checkpoint", "resume_from_checkpoint"),
        Derived("track_with", words.TRACKERS, rules.tracker, "`wandb` and `tensorboard`"),
        Derived(
            "rollout_batch_size", ("groups_per_step",), rules.groups, "episodes of a step, by group"
        ),
        to("num_return_sequences_in_group", "group_size"),
        Derived(
            "actor_infer.generating_args.num_return_sequences",
            ("group_size",),
            rules.replies,
            "with `train_env_manager` 1",
        ),
        Refused("train_env_manager.format_penalty", "give it to environments, in their env_config"),
        Refused("val_env_manager.format_penalty", "give it to environments, in their env_config"),
        to("max_grad_norm", "learner.training_args.max_grad_norm"),
        Refused("reward_pretrain", "give it again if a component of the reward shall be this model"),
        Refused("rpc_timeout", "every call has a deadline of its own"),
        Refused("system_envs", "set the variables where tailrace starts (cluster.keep_environment)"),
        Derived("tracker_kwargs.project", (), nothing, "with `track_with: wandb`"),
        Refused("tracker_kwargs", "metrics lie in the run directory"),
        Derived(
            "train_env_manager.num_env_groups", ("groups_per_step",), rules.env_groups, "of a step"
        ),
        Derived("val_batch_size", ("scheduler.eval_groups",), rules.evaluation, "episodes, by group"),
        to("sequence_length", *rules.LENGTHS),
        Derived("response_length", rules.LENGTHS, rules.longest, "with `prompt_length`"),
        Derived("prompt_length", (), nothing, "with `response_length`"),
        to("async_generation_ratio", "max_staleness", by=rules.staleness),
        Derived(
            "adv_estimator", ("learner.adv_estimator",), rules.estimator, "with `reward_normalization`"
        ),
        Derived(
            f"{rules.NORM}.grouping",
            ("learner.reward_grouping",),
            rules.grouping,
            "beyond groups: `starpo`",
        ),
        Derived(f"{rules.NORM}.method", ("learner.reward_norm",), rules.method, "of `starpo`"),
        to("step_reward_gamma", "learner.step_gamma"),
        to("episode_reward_weight", "learner.episode_advantage_weight"),
        to("step_reward_weight", "learner.step_advantage_weight"),
        to("pg_clip_low", "learner.pg_clip"),
        to("pg_clip_high", "learner.pg_clip_high"),
        Derived("pg_variant", ("learner.loss", "learner.behaviour_correction"), rules.loss, "the loss"),
        Derived("actor_train.pg_variant", ("learner.loss",), rules.loss, "the loss"),
        Derived(
            "use_pg_clip_range",
            ("learner.loss",),
            lambda used, _lookup: {"learner.loss": "dapo"} if used else {},
            "a range of its own above 1 is `dapo`",
        ),
        Derived(
            "dual_clip_loss",
            ("learner.dual_clip",),
            lambda used, lookup: (
                {"learner.dual_clip": 1.0 + 2.0 * lookup("pg_clip", 0.2)} if used else {}
            ),
            "1 + 2 `pg_clip`",
        ),
        to("max_len_mask", "learner.over_budget_episodes", by=words.masked),
        to("loss_agg_mode", "learner.loss_aggregation", by=words.aggregation),
        Derived(
            "use_kl_loss", ("learner.init_kl_coef", "learner.kl_in"), rules.kl_in_loss, "KL in the loss"
        ),
        Derived(
            "add_token_level_kl",
            ("learner.init_kl_coef", "learner.kl_in"),
            rules.kl_in_reward,
            "KL in the reward",
        ),
        Derived("kl_loss_coef", (), nothing, "with `use_kl_loss`"),
        Derived("init_kl_coef", (), nothing, "with `add_token_level_kl`"),
        when("kl_penalty", "learner.kl_estimator", rules.has_kl, words.NO_KL, words.kl_estimator),
        when("target_kl", "learner.target_kl", rules.has_kl, words.NO_KL),
        when("kl_horizon", "learner.kl_horizon", rules.has_kl, words.NO_KL),
        when("value_clip", "learner.critic.value_clip", rules.has_critic, _OF_CRITIC),
        when("critic_warmup", "learner.critic.critic_warmup", rules.has_critic, _OF_CRITIC),
        when(
            "lambd",
            "learner.lambd",
            rules.has_critic,
            "the estimator is not gae, which alone looks ahead by values",
        ),
        to(
            "actor_train.model_args.flash_attn",
            "learner.model_args.attn_implementation",
            by=values.attention,
        ),
        ratio_of_steps(
            "actor_train.training_args.warmup_ratio", "learner.training_args.warmup_steps", "max_steps"
        ),
        to("actor_infer.generating_args.stop_strings", "agents.generating_args.stop", by=tuple),
        to(f"{_INFER}.gpu_memory_utilization", "inference.gpu_memory_utilization"),
        to(f"{_INFER}.max_model_len", "inference.max_model_len"),
        to(f"{_INFER}.max_num_seqs", "inference.max_running"),
        to(f"{_INFER}.max_num_batched_tokens", "inference.max_batched_tokens"),
        Refused(_INFER, words.NO_ENGINE),
        Derived(
            "actor_train.data_args.file_name",
            ("agents.datasets.train.path", "scheduler.tags"),
            rules.train_files,
            "data sets `train`, in `dataset_dir`; rows need a `prompt`",
        ),
        Derived(
            "validation.data_args.file_name",
            ("agents.datasets.validation.path", "scheduler.eval_tags"),
            rules.validation_files,
            "data sets `validation`",
        ),
        *(
            Derived(f"{role}.data_args.dataset_dir", (), nothing, "with `file_name`")
            for role in ("actor_train", "validation")
        ),
        *(
            to(f"validation.generating_args.{key}", f"agents.eval_generating_args.{key}")
            for key in ("max_new_tokens", "temperature", "top_p", "top_k")
        ),
        to("validation.generating_args.num_return_sequences", "scheduler.eval_group_size"),
        Refused("validation.generating_args.num_beams", "replies are sampled, never searched", (1,)),
        to("validation.eval_steps", "eval_steps", by=words.steps_or_never),
        to(f"{_ENV}.env_type", "agents.custom_envs.*.env_type"),
        Derived(
            f"{_ENV}.max_tokens_per_step",
            ("agents.custom_envs.*.max_tokens_per_step", *environments.BUDGETS),
            environments.tokens_per_step,
            "the smaller of it and `actor_infer.generating_args.max_new_tokens`, and the episode's "
            "budget: so many tokens in each of its turns",
        ),
        Derived(
            environments.REPLY,
            ("agents.custom_envs.*.max_tokens_per_step", *environments.BUDGETS),
            environments.reply_tokens,
            "of one reply: with environments see their `max_tokens_per_step`",
        ),
        to(f"{_ENV}.max_steps", "agents.custom_envs.*.env_config.max_turns"),
        Derived(
            f"{_ENV}.env_manager_cls",
            ("granularity", environments.HISTORY_TURNS),
            environments.manager,
            "`StepEnvManager` is `step`, and shows the newest observation alone without "
            "`history_length`; `TrajEnvManager` is `trajectory`",
        ),
        Derived(
            f"{_ENV}.history_length",
            (environments.HISTORY_TURNS,),
            environments.history,
            "one less, since the newest observation counts there; 0: all. With `StepEnvManager`",
        ),
        to(f"{_ENV}.use_thread_lock", "agents.custom_envs.*.in_threads"),
        to(f"{_ENV}.env_config.max_steps", "agents.custom_envs.*.env_config.max_turns"),
        to(
            f"{_ENV}.env_config.format_penalty",
            "agents.custom_envs.*.env_config.invalid_action_penalty",
            by=abs,
        ),
        *(Refused(f"{_ENV}.env_config.{key}", _OWN_READING) for key in _READING),
        to(
            f"{_ENV}.env_config.*",
            "agents.custom_envs.*.env_config.*",
            remark="keys that the type has here",
        ),
        *_OURS,
    ),
    DEFAULTS,
    ALWAYS,
)
