"""ROLL (alibaba/ROLL): the table of its pipelines, and its defaults.

Its roles have names that our experiments accept too: their rules are those of our own tables.
"""

from collections.abc import Iterator

from tailrace.config.settings import TABLES, Derived, Refused, Renamed, values
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.roll import environments, loss, rules
from tailrace_cli.importing.rules import (
    NOT_CORRECTED,
    SYNCHRONOUS,
    Default,
    System,
    data_files,
    is_on,
    ratio_of_steps,
    read_with,
    run_name,
    to,
    where,
)

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
_MACHINES = ("colocated", "cluster.num_nodes")
_READING = ("action_pattern", "action_lookup", "grid_lookup", "grid_vocab", "env_instruction")
_OWN_READING = "environments here have their own formats of replies and observations"
_NO_SHARING = "ranks share layers by tensor parallelism alone"
_ONE_REPLY = "environments get one reply a turn"
_SAMPLING, _EVAL = "agents.generating_args", "agents.eval_generating_args"
_TRAIN = rules.CONFIG
_INFER = "actor_infer.strategy_args.strategy_config"
_OURS = tuple(
    rule
    for table in TABLES.values()
    for rule in table
    if rule.name not in ("critic", "reference", "custom_envs")
)

_ARGS = (("learning_rate", 5e-5), ("lr_scheduler_type", "linear"), ("adam_beta2", 0.999))

# Source: `base_config.py`, `agentic_config.py`, `model_args.py` of ROLL, and the `TrainingArguments` of
# Hugging Face; only where our default differs.
_DEFAULTS = (
    Default("seed", 42),
    Default("max_steps", 500),
    Default("eval_steps", 10),
    Default("rollout_batch_size", 128),
    Default("adv_estimator", "gae"),
    Default("loss_agg_mode", "seq-mean-token-mean"),
    Default("init_kl_coef", 0.2),
    Default("kl_penalty", "kl"),
    *(
        Default(f"{section}.generating_args.{key}", value, within=f"{section}.generating_args")
        for section in ("actor_infer", "validation")
        for key, value in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50))
    ),
    Default("train_env_manager.group_size", 1, within="train_env_manager"),
    Default("actor_train.model_args.dtype", "bf16"),
    Default("actor_train.model_args.disable_gradient_checkpointing", False),
    *(Default(f"actor_train.training_args.{key}", value) for key, value in _ARGS),
    *(Default(f"critic.training_args.{key}", value, within="critic") for key, value in _ARGS),
)


def _evaluated_sampling(section: str) -> Iterator[Renamed]:
    yield to(f"{section}.generating_args.temperature", f"{_EVAL}.temperature")
    yield to(f"{section}.generating_args.top_p", f"{_EVAL}.top_p")
    yield to(f"{section}.generating_args.top_k", f"{_EVAL}.top_k", by=names.not_negative)


ROLL = System(
    "roll",
    "ROLL",
    (
        to("exp_name", "exp_name", by=run_name),
        *(to(key, key) for key in _RUN),
        to("save_steps", "save_steps", by=names.not_negative),
        to("eval_steps", "eval_steps", by=names.not_negative),
        to("resume_from_checkpoint", "resume_from_checkpoint"),
        Derived(
            "track_with", names.TRACKERS, rules.tracker, "`wandb`, `mlflow`, `trackio`, `tensorboard`"
        ),
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
        read_with("tracker_kwargs.project", "track_with"),
        Refused("tracker_kwargs", "metrics are in the run directory"),
        *(
            Derived(f"{manager}_env_manager.max_env_num_per_worker", (), rules.workers, "no bound")
            for manager in ("train", "val")
        ),
        Derived(
            "train_env_manager.num_env_groups", ("groups_per_step",), rules.env_groups, "of a step"
        ),
        Derived("val_batch_size", ("scheduler.eval_groups",), rules.evaluation, "episodes, by group"),
        to("sequence_length", *rules.LENGTHS),
        Derived("response_length", rules.LENGTHS, rules.longest, "with `prompt_length`"),
        read_with("prompt_length", "response_length"),
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
        *where(
            lambda lookup: lookup("adv_estimator") in ("gigpo", "step_reinforce"),
            "the estimator does not look at steps",
            to("step_reward_gamma", "learner.step_gamma"),
        ),
        *where(
            lambda lookup: lookup("adv_estimator") == "gigpo",
            "the estimator is not gigpo",
            to("episode_reward_weight", "learner.episode_advantage_weight"),
            to("step_reward_weight", "learner.step_advantage_weight"),
        ),
        Derived("pg_variant", loss.VARIANT, loss.loss, "the loss"),
        Derived("actor_train.pg_variant", loss.VARIANT, loss.loss, "the loss"),
        Derived("importance_sampling", loss.SETS, loss.ratio, "`seq` is `gspo`"),
        Derived("ratio_type", loss.SETS, loss.ratio, "`segment` is `segment`"),
        Derived("use_pg_clip_range", loss.SETS, loss.side, "a range of its own above 1 is `dapo`"),
        Derived("pg_clip", loss.SETS, loss.clip, "unless `use_pg_clip_range`"),
        *(
            Derived(f"pg_clip_{side}", loss.SETS, loss.side, "with `use_pg_clip_range`")
            for side in ("low", "high")
        ),
        Derived(
            "dual_clip_loss",
            ("learner.dual_clip",),
            loss.dual_clip,
            "1 + 2 `pg_clip`, of losses that clip",
        ),
        to("max_len_mask", "learner.over_budget_episodes", by=names.masked),
        to("loss_agg_mode", "learner.loss_aggregation", by=names.aggregation),
        Derived(
            "use_kl_loss", ("learner.init_kl_coef", "learner.kl_in"), rules.kl_in_loss, "KL in the loss"
        ),
        Derived(
            "add_token_level_kl",
            ("learner.init_kl_coef", "learner.kl_in"),
            rules.kl_in_reward,
            "KL in the reward",
        ),
        read_with("kl_loss_coef", "use_kl_loss"),
        *where(
            is_on("add_token_level_kl"),
            "add_token_level_kl is off",
            read_with("init_kl_coef", "add_token_level_kl"),
        ),
        *where(
            loss.in_reward,
            loss.NOT_IN_REWARD,
            to("kl_penalty", "learner.kl_estimator", by=names.kl_estimator),
            to("target_kl", "learner.target_kl"),
            to("kl_horizon", "learner.kl_horizon"),
        ),
        *where(
            rules.has_critic,
            "there is no critic: adv_estimator is not gae",
            to("value_clip", "learner.critic.value_clip"),
            to("critic_warmup", "learner.critic.critic_warmup"),
        ),
        *where(rules.has_critic, names.NO_LAMBDA, to("lambd", "learner.lambd")),
        to(
            "actor_train.model_args.flash_attn",
            "learner.model_args.attn_implementation",
            by=values.attention,
        ),
        ratio_of_steps(
            "actor_train.training_args.warmup_ratio", "learner.training_args.warmup_steps", "max_steps"
        ),
        rules.sampling("stop_strings", f"{_SAMPLING}.stop"),
        rules.sampling("temperature", f"{_SAMPLING}.temperature", "learner.temperature"),
        rules.sampling("top_p", f"{_SAMPLING}.top_p"),
        rules.sampling("top_k", f"{_SAMPLING}.top_k"),
        to(f"{_INFER}.gpu_memory_utilization", "inference.gpu_memory_utilization"),
        to(f"{_INFER}.mem_fraction_static", "inference.gpu_memory_utilization"),
        to(f"{_INFER}.max_model_len", "inference.max_model_len"),
        to(f"{_INFER}.max_num_seqs", "inference.max_running"),
        to(f"{_INFER}.max_num_batched_tokens", "inference.max_batched_tokens"),
        Derived(
            rules.GPUS_OF_ROLES[0],
            ("cluster.learner_gpus", "learner.strategy_args.num_ranks", *_MACHINES),
            rules.learner_gpus,
            "a rank on each; `colocated` where engines share one",
        ),
        Derived(
            rules.GPUS_OF_ROLES[1],
            ("cluster.inference_gpus", "cluster.num_inference_servers", *_MACHINES),
            rules.engine_gpus,
            "engines on them; `colocated` where the learner shares one",
        ),
        Refused(_INFER, names.NO_ENGINE),
        Refused(f"{_TRAIN}.expert_model_parallel_size", _NO_SHARING, (1,)),
        Refused(f"{_TRAIN}.context_parallel_size", _NO_SHARING, (1,)),
        Derived(
            "actor_train.training_args.gradient_accumulation_steps",
            ("learner.num_mini_batches",),
            rules.updates,
            "passes of an update; a step's rows (`group_size` x `groups_per_step`) divided by an "
            "update's",
        ),
        Derived(
            f"{rules.MODEL}.lora_target",
            ("learner.lora.r", "learner.lora.alpha", "learner.lora.target_modules"),
            rules.lora,
            "layers, with rank and scale",
        ),
        *where(
            is_on(f"{rules.MODEL}.lora_target"),
            "lora_target names no layers",
            *(read_with(f"{rules.MODEL}.lora_{key}", "lora_target") for key in ("rank", "alpha")),
            Refused(f"{rules.MODEL}.lora_dropout", "adapters have no dropout", (0.0,)),
        ),
        data_files(
            "actor_train.data_args.file_name",
            "train",
            "scheduler.tags",
            "data sets `train`, in `dataset_dir`; rows need a `prompt`",
            rules.in_folder("actor_train"),
        ),
        data_files(
            "validation.data_args.file_name",
            "validation",
            "scheduler.eval_tags",
            "data sets `validation`",
            rules.in_folder("validation"),
        ),
        *(
            read_with(f"{role}.data_args.dataset_dir", "file_name")
            for role in ("actor_train", "validation")
        ),
        *_evaluated_sampling("validation"),
        *where(
            lambda lookup: lookup("actor_infer.generating_args") is None,
            "actor_infer.generating_args replaces it",
            *_evaluated_sampling("val_env_manager"),
        ),
        to("validation.generating_args.max_new_tokens", f"{_EVAL}.max_new_tokens"),
        Derived(
            environments.EVALUATED_REPLY,
            environments.BUDGETS,
            environments.evaluated_reply,
            "of one reply: with environments see their `max_tokens_per_step`",
        ),
        Derived(
            environments.TRAINED_REPLY,
            ("agents.custom_envs.*.max_tokens_per_step", *environments.BUDGETS),
            environments.trained_reply,
            "as `actor_infer.generating_args.max_new_tokens`",
        ),
        rules.trained_sampling("temperature", f"{_SAMPLING}.temperature", "learner.temperature"),
        rules.trained_sampling("top_p", f"{_SAMPLING}.top_p"),
        rules.trained_sampling("top_k", f"{_SAMPLING}.top_k"),
        *(
            Refused(f"{manager}_env_manager.generating_args.num_return_sequences", _ONE_REPLY, (1,))
            for manager in ("train", "val")
        ),
        to("validation.generating_args.num_return_sequences", "scheduler.eval_group_size"),
        Refused("validation.generating_args.num_beams", "replies are sampled, never searched", (1,)),
        to("validation.eval_steps", "eval_steps", by=names.not_negative),
        to(f"{_ENV}.env_type", "agents.custom_envs.*.env_type"),
        Derived(
            f"{_ENV}.max_tokens_per_step",
            ("agents.custom_envs.*.max_tokens_per_step", *environments.BUDGETS),
            environments.tokens_per_step,
            "the smaller of it and `actor_infer.generating_args.max_new_tokens`, and the episode's "
            "budget: this number of tokens in each turn",
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
    _DEFAULTS,
    NOT_CORRECTED | SYNCHRONOUS | {"learner.critic.value_clip": 0.0},
    (
        "hydra",
        "rpc_timeout",
        "tracker_kwargs*",
        "checkpoint_config*",
        "custom_env.*",  # a library, of which `custom_envs` takes entries
        "reward_pretrain",
        "*.infer_batch_size",
        "actor_infer.model_args.*attn*",  # engines have their own
        "actor_infer.model_args.lora_*",
        "reference.model_args.lora_*",
        "*.training_args.num_train_epochs",  # `max_steps` counts
        "is_num_return_sequences_expand",
        "*.data_args.template",
        "*.data_args.preprocessing_num_workers",
        "reference.model_args.disable_gradient_checkpointing",
        "reference.strategy_args*",
        f"{_TRAIN}.use_distributed_optimizer",
        f"{_TRAIN}.recompute_granularity",
        f"{_TRAIN}.sequence_parallel",
        f"{_INFER}.block_size",
        f"{_INFER}.load_format",
        "all_response_pattern",
    ),
)
