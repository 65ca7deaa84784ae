"""AReaL (inclusionAI/AReaL): the table of its PPO and GRPO experiments, and its defaults."""

from collections.abc import Callable, Iterator
from typing import Any

from tailrace.config.settings import Derived, Refused, Renamed, Rule, same, values
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.areal import loss, placement, rules
from tailrace_cli.importing.rules import (
    NOT_CORRECTED,
    Default,
    System,
    data_files,
    decays,
    is_on,
    listed,
    negated,
    ratio_of_steps,
    read_with,
    repeats,
    to,
    where,
)

_SAMPLING, _EVAL = "agents.generating_args", "agents.eval_generating_args"
_SAMPLED: tuple[tuple[str, Callable[[Any], Any], tuple[str, ...]], ...] = (
    ("max_new_tokens", same, (f"{_SAMPLING}.max_new_tokens",)),
    ("temperature", float, (f"{_SAMPLING}.temperature", "learner.temperature")),
    ("top_p", float, (f"{_SAMPLING}.top_p",)),
    ("top_k", rules.top_k, (f"{_SAMPLING}.top_k",)),
    ("stop", listed, (f"{_SAMPLING}.stop",)),
)
_NOT_SAMPLED = (
    ("min_new_tokens", "a reply may end at any token", 0),
    ("greedy", "set the temperature to 0", False),
)
_ESTIMATOR = ("learner.adv_estimator", "learner.norm_std", "learner.whiten_advantages")
_ONE_MODEL = "a run has one policy, with its own tokenizer"
_ONE_NAME = "the run has one name, exp_name"
_SAME_RANKS = "it computes on the policy's ranks"
_SAME_TYPE = "it computes as the policy does"
_KEYS_OF_OPTIMIZER = (
    ("lr", "learning_rate"),
    ("weight_decay", "weight_decay"),
    ("beta1", "adam_beta1"),
    ("beta2", "adam_beta2"),
    ("eps", "adam_epsilon"),
    ("gradient_clipping", "max_grad_norm"),
)
_SERVERS = (
    ("sglang", "context_length", "max_running_requests", "mem_fraction_static"),
    ("vllm", "max_model_len", "max_num_seqs", "gpu_memory_utilization"),
)


def _server(server: str, length: str, running: str, share: str) -> Iterator[Rule]:
    """Rules for the section of an engine, which counts if the engines are of its kind."""
    yield from where(
        lambda lookup: lookup("inference.engine", server) == server,
        "the engines are of another kind",
        to(f"{server}.{length}", "inference.max_model_len"),
        to(f"{server}.{running}", "inference.max_running"),
        to(f"{server}.{share}", "inference.gpu_memory_utilization"),
        to(f"{server}.dtype", "inference.dtype", by=values.engine_dtype),
        repeats(f"{server}.model_path", "actor.path", _ONE_MODEL),
        repeats(f"{server}.model", "actor.path", _ONE_MODEL),
    )
    yield Refused(server, names.NO_ENGINE)


def _optimizer(role: str, args: str) -> tuple[Renamed | Derived, ...]:
    """Rules for the optimizer of `role`, whose keys here are below `args`."""
    optimizer = f"{role}.optimizer"
    return (
        *(to(f"{optimizer}.{key}", f"{args}.{ours}") for key, ours in _KEYS_OF_OPTIMIZER),
        *where(
            decays(f"{optimizer}.lr_scheduler_type"),
            names.NO_DECAY,
            to(f"{optimizer}.min_lr_ratio", f"{args}.min_lr_ratio"),
        ),
        to(f"{optimizer}.type", f"{args}.optimizer", by=names.optimizer),
        to(f"{optimizer}.lr_scheduler_type", f"{args}.lr_scheduler_type", by=values.schedule),
        ratio_of_steps(
            f"{optimizer}.warmup_steps_proportion", f"{args}.warmup_steps", "total_train_steps"
        ),
    )


def _sampling() -> Iterator[Rule]:
    """Rules for sampling; evaluations have that of training, or `eval_gconfig`."""
    for key, convert, ours in _SAMPLED:
        eval_key = f"{_EVAL}.{ours[0].rpartition('.')[2]}"
        yield rules.sampled(key, ours, eval_key, convert)
        yield to(f"eval_gconfig.{key}", eval_key, by=convert)
    yield to("gconfig.n_samples", "group_size")
    yield to("eval_gconfig.n_samples", "scheduler.eval_group_size")


_AGENTS = ("rollout.agent", "rollout.openai")  # newer and older versions
_OTHER_MEANINGS = {
    "turn_discount": "there it discounts from call to call in the order of time; here from the calls "
    "that continue a call, whose mean return counts",
    "export_style": "there `concat` needs one conversation without branches; here every branch is a "
    "row, and what branches share is trained once",
}


def _agent(section: str) -> tuple[Renamed | Derived | Refused, ...]:
    """Rules for agents that play against an endpoint; see `_OTHER_MEANINGS`."""
    workflow = "agents.workflow"
    return (
        to(f"{section}.mode", f"{workflow}.mode", by=names.agent_mode),
        to(f"{section}.agent_cls_path", f"{workflow}.agent"),
        to(f"{section}.subproc_max_workers", f"{workflow}.subproc_max_workers"),
        to(f"{section}.turn_discount", f"{workflow}.turn_discount", by=float),
        to(f"{section}.export_style", f"{workflow}.export_style"),
        repeats(
            f"{section}.engine_max_tokens",
            "gconfig.max_tokens",
            "an episode has one bound of its tokens",
        ),
        to(f"{section}.session_timeout_seconds", f"{workflow}.timeout_s", by=float),
        to(f"{section}.tool_call_parser", "chat.tool_parser", by=names.tool_parser),
        to(f"{section}.reasoning_parser", "chat.reasoning_parser", by=names.reasoning_parser),
    )


_DEFAULTS_OF_OPTIMIZER = (("lr", 1e-3), ("weight_decay", 0.01), ("beta2", 0.999))
# Source: `cli_args.py` of AReaL; only where our default differs.
_DEFAULTS = (
    Default("seed", 1),
    Default("total_train_epochs", 1, unless=("total_train_steps",)),
    Default("gconfig.n_samples", 1),
    Default("gconfig.max_new_tokens", 16384),
    Default("gconfig.max_tokens", 32768, unless=("train_dataset.max_length",)),
    Default("eval_gconfig.max_new_tokens", 16384, within="eval_gconfig"),
    Default("train_dataset.batch_size", 1, unless=("rollout.consumer_batch_size",)),
    Default("rollout.max_head_offpolicyness", 0),
    Default("actor.dtype", "bfloat16"),
    *(Default(f"actor.optimizer.{key}", value) for key, value in _DEFAULTS_OF_OPTIMIZER),
    Default("actor.ppo_n_minibatches", 4),
    Default("actor.reward_clip", 20.0),
    Default("actor.gae_lambda", 1.0),
    Default("actor.kl_ctl", 0.1),
    Default("actor.kl_estimator", "k1"),
    Default("actor.recompute_logprob", False),
    Default(
        "actor.behave_imp_weight_cap",
        5.0,
        unless=("actor.behav_imp_weight_cap", "actor.rejection_sampling"),
    ),
    Default("critic.eps_clip", 0.5, within="critic"),
    *(
        Default(f"critic.optimizer.{key}", value, within="critic")
        for key, value in _DEFAULTS_OF_OPTIMIZER
    ),
)

_HARMLESS = (  # where files go, how processes start, and copies of other settings
    "*.fileroot",
    "*.scheduling_spec*",
    "*.scheduling_strategy*",
    "*.skip_tokenizer_init",
    "*.pin_memory",
    "*_dataset.type",
    "valid_dataset.shuffle",
    "valid_dataset.drop_last",
    "*.num_workers",
    "actor.pad_to_maximum",
    "actor.weight_update_mode",
    "actor.mb_spec.*",
    "critic.mb_spec.*",
    "gconfig.lora_name",
    "rollout.use_lora",
    "rollout.request_retries",
    "rollout.request_timeout",
    "sglang.*lora*",
    "sglang.log_level",
    "vllm.*lora*",
    "cluster.name_resolve.*",
    "launcher.*",
    "perf_tracer.*",
    "recover.*",
    "ref.mb_spec.*",
    "rollout.dump_to_file",
    "rollout.enable_rollout_tracing",
    "rollout.setup_timeout",
    "rollout.tokenizer_path",
    "scheduler.*",
    "sglang.random_seed",
    "sglang.attention_backend",
    "vllm.seed",
    "vllm.enforce_eager",
)

AREAL = System(
    "areal",
    "AReaL",
    (
        Derived("experiment_name", ("exp_name",), rules.name, "with `trial_name`"),
        read_with("trial_name", "experiment_name"),
        repeats("*.experiment_name", "experiment_name", _ONE_NAME),
        repeats("*.trial_name", "trial_name", _ONE_NAME),
        to("seed", "seed"),
        to("total_train_steps", "max_steps"),
        *where(
            lambda lookup: lookup("total_train_steps") is None,
            "total_train_steps is given",
            to("total_train_epochs", "num_epochs"),
        ),
        Refused("enable_offload", "give colocated, where learner and engines share GPUs", (False,)),
        Refused("async_training", "give max_staleness: 0 is synchronous", (True,)),
        repeats("tokenizer_path", "actor.path", _ONE_MODEL),
        Derived(
            "actor.backend", placement.RANKS, placement.trained_by, "the strategy, and ranks: `fsdp:d4`"
        ),
        Derived("rollout.backend", placement.ENGINES, placement.served_by, "engines: `sglang:d4t2`"),
        repeats("critic.backend", "actor.backend", _SAME_RANKS),
        repeats("ref.backend", "actor.backend", _SAME_RANKS),
        Derived(
            "allocation_mode",
            (*placement.ENGINES, *placement.RANKS),
            placement.allocation,
            "engines and ranks; engines, and ranks of `megatron`, may be tensor-parallel",
        ),
        to("cluster.fileroot", "output_dir"),
        to("cluster.n_gpus_per_node", "cluster.num_gpus_per_node"),
        to("cluster.n_nodes", "cluster.num_nodes"),
        Derived(
            "rollout.max_concurrent_rollouts",
            ("agents.max_concurrent_episodes",),
            rules.prompts_at_once,
            "times `gconfig.n_samples`",
        ),
        to("rollout.max_head_offpolicyness", "max_staleness"),
        to("rollout.consumer_batch_size", "groups_per_step"),
        *_sampling(),
        to("gconfig.max_tokens", "agents.max_episode_tokens"),
        *(
            Refused(f"{section}.{key}", reason, (harmless,))
            for section in ("gconfig", "eval_gconfig")
            for key, reason, harmless in _NOT_SAMPLED
        ),
        to("actor.path", "pretrain"),
        Refused("*.init_from_scratch", "describe the model under learner.from_scratch", (False,)),
        Refused("*.disable_dropout", "there never is dropout", (True,)),
        to("actor.dtype", "learner.model_args.dtype", by=values.dtype),
        to("actor.attn_impl", "learner.model_args.attn_implementation", by=values.attention),
        to(
            "actor.gradient_checkpointing",
            "learner.model_args.disable_gradient_checkpointing",
            by=negated,
        ),
        Derived(
            "actor.mb_spec.max_tokens_per_mb",
            ("learner.max_tokens_per_micro_batch", "learner.min_tokens_per_micro_batch"),
            rules.tokens_of_a_pass,
            "tokens of a pass",
        ),
        *_optimizer("actor", "learner.training_args"),
        repeats("actor.group_size", "gconfig.n_samples", "a group has one size"),
        repeats("actor.max_new_tokens", "gconfig.max_new_tokens", "replies have one bound"),
        repeats(
            "actor.temperature", "gconfig.temperature", "log-probabilities are taken at the temperature"
        ),
        Derived("actor.use_m2po_loss", ("learner.loss",), loss.m2po, "the loss"),
        Derived("actor.m2_threshold", loss.M2PO, loss.threshold, "with the loss `m2po`"),
        Derived("actor.use_sapo_loss", ("learner.loss",), loss.sapo, "the loss"),
        *where(
            is_on("actor.use_sapo_loss"),
            "use_sapo_loss is off",
            to("actor.sapo_tau_pos", "learner.sapo_tau", by=float),
            to("actor.sapo_tau_neg", "learner.sapo_tau_negative", by=float),
        ),
        Derived("actor.importance_sampling_level", loss.LEVEL, loss.level, "`gspo` by sequence"),
        Derived("actor.rejection_sampling", loss.WEIGHTS, loss.rejection, "of tokens by their ratio"),
        Derived(
            "actor.use_decoupled_loss", loss.WEIGHTS, loss.decoupled, "`mis`, or `tis` if truncated"
        ),
        *(
            rule
            for word in loss.SPELLINGS
            for rule in (
                Derived(f"actor.{word}_imp_weight_mode", (), loss.mode, "with `use_decoupled_loss`"),
                Derived(f"actor.{word}_imp_weight_cap", (), loss.cap, "with `use_decoupled_loss`"),
            )
        ),
        Derived("actor.eps_clip", ("learner.pg_clip",), loss.clip, "below 1, and above where alone"),
        Derived("actor.eps_clip_higher", ("learner.loss",), loss.clip_higher, "`dapo`"),
        to("actor.c_clip", "learner.dual_clip"),
        Derived("actor.recompute_logprob", (), loss.recomputes, "else nothing is compared with"),
        to("actor.prox_logp_method", "learner.proximal_logprobs", by=rules.proximal),
        to("actor.ppo_n_minibatches", "learner.num_mini_batches"),
        to("actor.reward_clip", "learner.reward_clip", by=float),
        Derived(
            "actor.overlong_reward_penalty",
            ("learner.overlong_max_tokens", "learner.overlong_buffer_tokens"),
            rules.overlong,
            "with `actor.overlong_tokens` and the longest reply",
        ),
        *where(
            is_on("actor.overlong_reward_penalty"),
            "overlong_reward_penalty is off",
            read_with("actor.overlong_tokens", "overlong_reward_penalty"),
            Refused("actor.overlong_penalty_factor", "the penalty rises to 1", (1.0,)),
        ),
        Derived(
            "actor.use_lora",
            ("learner.lora.r", "learner.lora.alpha", "learner.lora.target_modules"),
            rules.lora,
            "with rank, scale and layers",
        ),
        *where(
            is_on("actor.use_lora"),
            "use_lora is off",
            *(
                read_with(f"actor.{key}", "use_lora")
                for key in ("lora_rank", "lora_alpha", "target_modules")
            ),
            Refused("actor.peft_type", "adapters are of one type", ("lora",)),
        ),
        Refused("actor.reward_scaling", "give the weight of a component under reward.rewards", (1.0,)),
        Refused("actor.reward_bias", "rewards are compared with each other or with values", (0.0,)),
        Derived("actor.reward_norm", _ESTIMATOR, rules.reward_norm, "the estimator"),
        Derived("actor.adv_norm", _ESTIMATOR, rules.adv_norm, "the estimator"),
        Derived("actor.group_reward_norm", _ESTIMATOR, rules.group_norm, "the estimator"),
        Derived("critic.path", ("learner.critic",), rules.critic, "the estimator is `gae`"),
        Derived("actor.discount", ("learner.gamma",), rules.discount, "where an estimator discounts"),
        Derived(
            "actor.gae_lambda",
            ("learner.lambd", "learner.gamma", "learner.adv_estimator"),
            rules.gae_lambda,
            "`reinforce` without critic and norms",
        ),
        Derived("actor.kl_ctl", ("learner.init_kl_coef", "learner.kl_in"), rules.kl, "in the reward"),
        Derived(
            "actor.kl_estimator", ("learner.kl_estimator",), rules.kl_estimator, "with `actor.kl_ctl`"
        ),
        Refused("critic.is_critic", "a critic is one", (True,)),
        *where(
            rules.has_critic,
            "there is no critic: critic.path is not given",
            to("critic.eps_clip", "learner.critic.value_clip"),
            *_optimizer("critic", "learner.critic.training_args"),
        ),
        repeats("critic.dtype", "actor.dtype", _SAME_TYPE),
        repeats(
            "critic.ppo_n_minibatches", "actor.ppo_n_minibatches", "both are trained in the same passes"
        ),
        Derived("ref.path", ("learner.reference.pretrain",), rules.reference, "unless the policy's"),
        repeats("ref.dtype", "actor.dtype", _SAME_TYPE),
        *(rule for server in _SERVERS for rule in _server(*server)),
        to("train_dataset.batch_size", "groups_per_step"),
        data_files(
            "train_dataset.path",
            "train",
            "scheduler.tags",
            "the data set `train`; rows need a `prompt`",
        ),
        Derived(
            "train_dataset.max_length",
            ("agents.max_episode_tokens",),
            rules.longest,
            "with `gconfig.max_new_tokens`",
        ),
        Refused("train_dataset.shuffle", "rows are shuffled anew in every epoch", (True,)),
        Refused(
            "valid_dataset.batch_size",
            "rows that a loader gives at once; give scheduler.eval_groups, the rows of an evaluation",
        ),
        data_files(
            "valid_dataset.path", "validation", "scheduler.eval_tags", "the data set `validation`"
        ),
        to("saver.freq_steps", "save_steps"),
        to("evaluator.freq_steps", "eval_steps"),
        Derived("stats_logger.wandb.mode", names.TRACKERS, rules.tracker, "if not disabled"),
        *where(
            lambda lookup: lookup("stats_logger.wandb.mode", "disabled") != "disabled",
            "stats_logger.wandb.mode is disabled",
            read_with("stats_logger.wandb.project", "stats_logger.wandb.mode"),
        ),
        to("workflow", "agents.workflow.agent"),
        *(rule for section in _AGENTS for rule in _agent(section)),
    ),
    _DEFAULTS,
    NOT_CORRECTED,
    _HARMLESS,
    differs={f"{section}.{key}": text for section in _AGENTS for key, text in _OTHER_MEANINGS.items()},
)
