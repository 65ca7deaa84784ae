"""Checks of the `learner` section beyond types: numbers, combinations, keys that nothing reads.

What depends on the chosen
algorithms, built-in or a user's, is asked of their declarations.
"""

import inspect
from collections.abc import Iterable

from tailrace.config.suggestions import did_you_mean
from tailrace_learner.config_algorithm import SHARED, AlgorithmConfig
from tailrace_learner.config_execution import StrategyArgs
from tailrace_learner.config_models import CriticArgs, ReferenceArgs, TrainingArgs, check_numbers
from tailrace_learner.config_registry import ESTIMATORS, METRICS, OPTIMIZERS, REGISTRIES

_RANGES = {
    "unbounded": "tis_cap pg_clip_high cispo_clip_high icepop_high clip_cov_high",
    "at_least_one": "num_mini_batches ppo_epochs kl_horizon num_threads max_tokens_per_micro_batch "
    "logprob_chunk_tokens max_retained_bytes min_mismatch_tokens",
    "positive": "pg_clip pg_clip_high tis_cap gspo_clip gspo_clip_high gmpo_clip cispo_clip "
    "cispo_clip_high sapo_tau sapo_tau_negative m2_threshold dppo_delta dppo_cap temperature",
    "not_negative": "loss_norm_tokens reward_clip advantage_clip overlong_max_tokens "
    "overlong_buffer_tokens dual_clip kimi_tau kl_cov_coef dppo_kl_coef icepop_low geometric_mask "
    "init_kl_coef target_kl min_tokens_per_micro_batch save_total_limit mismatch_versions",
    "shares": "gamma lambd step_gamma cov_fraction",
}
# Keys that nothing reads without a reference, with the values that ask for nothing.
_OF_REFERENCE: dict[str, frozenset[object]] = {
    "kl_estimator": frozenset({"k3"}),
    "kl_in": frozenset({None, "loss"}),
    "target_kl": frozenset({0.0}),
    "kl_horizon": frozenset({10_000}),
}


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raises `ValueError` for values and combinations that cannot be."""
    check_numbers(config, **_RANGES)
    _check_divergence(config)
    _check_combinations(config)
    _check_readers(config)
    _check_redraw(config)


def check_roles(
    config: AlgorithmConfig,
    reference: ReferenceArgs | None,
    critic: CriticArgs | None,
    strategy_args: StrategyArgs,
) -> None:
    """Raises `ValueError` for a model that nothing uses, and for one that is missing."""
    if reference is not None:
        _check_reference(reference, config, strategy_args.resolved_name)
    if critic is not None:
        _check_critic(critic, config, strategy_args.num_ranks)
    elif config.estimator.needs_values:
        raise ValueError(
            f"adv_estimator {config.adv_estimator!r} needs values: give learner.critic ({{}} is a copy "
            "of the policy) or use another estimator"
        )


def _check_schedule(args: TrainingArgs, section: str) -> None:
    if args.min_lr_ratio and args.lr_scheduler_type == "constant":
        raise ValueError(
            f"{section}.min_lr_ratio is not read with lr_scheduler_type constant: remove it, or use "
            "linear or cosine"
        )


def check_optimizer(args: TrainingArgs, section: str, strategy: str) -> None:
    """Raises `ValueError` for an optimizer that does not take its arguments or fit the strategy."""
    declared, name = OPTIMIZERS.find(args.optimizer), f"{section}.optimizer {args.optimizer!r}"
    try:
        inspect.signature(declared.fn).bind([], args, **args.optimizer_args)
    except TypeError as error:
        raise ValueError(f"{section}.optimizer_args: {name}: {error}: correct the arguments") from error
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if key not in declared.reads and getattr(args, key) != getattr(TrainingArgs(), key):
            raise ValueError(f"{section}.{key} is not read by {name}: remove it")
    _check_schedule(args, section)
    if strategy == "deepspeed" and args.optimizer != "adamw":
        raise ValueError(f"{name}: strategy_name deepspeed takes adamw alone: use it, or fsdp2")
    if strategy != "single" and not declared.elementwise:
        raise ValueError(
            f"{name} is not declared elementwise, and strategy_name {strategy} cuts weights over "
            "ranks: declare it so if it updates each element by itself, or use one rank"
        )


def check_metrics(names: Iterable[str]) -> None:
    """Raises `ValueError` for a metric that is always there; `ConfigError` for one that cannot be."""
    for name in names:
        if name in METRICS:
            raise ValueError(f"metrics: {name!r} is always on: name metrics of your own alone")
        METRICS.find(name)


def _check_norm(config: AlgorithmConfig) -> None:
    reads_norm = config.loss_aggregation == "seq_mean_token_sum_norm"
    if reads_norm and not config.loss_norm_tokens:
        raise ValueError("loss_norm_tokens must be given with loss_aggregation seq_mean_token_sum_norm")
    if config.loss_norm_tokens and not reads_norm:
        raise ValueError(
            f"loss_norm_tokens is not read by loss_aggregation {config.loss_aggregation!r} (only by "
            "seq_mean_token_sum_norm): remove it or choose that"
        )


def _check_combinations(config: AlgorithmConfig) -> None:
    _check_norm(config)
    if 0 < config.dual_clip <= 1:
        raise ValueError("dual_clip must be above 1, or 0 to switch it off")
    if bool(config.overlong_max_tokens) != bool(config.overlong_buffer_tokens):
        raise ValueError("overlong_max_tokens and overlong_buffer_tokens are given together")
    if config.overlong_buffer_tokens > config.overlong_max_tokens:
        raise ValueError("overlong_buffer_tokens must not exceed overlong_max_tokens")
    for low, high in (("icepop_low", "icepop_high"), ("clip_cov_low", "clip_cov_high")):
        if getattr(config, low) >= getattr(config, high):
            raise ValueError(f"{low} must be below {high}")
    if config.policy_loss.off_policy and config.behaviour_correction != "none":
        raise ValueError(
            f"loss {config.loss!r} weighs tokens by the policy that sampled them; "
            f"behaviour_correction {config.behaviour_correction!r} would do it again: set it to none"
        )


def _check_readers(config: AlgorithmConfig) -> None:
    """Every key that is set has a reader among the chosen algorithms, and what they read exists."""
    chosen = {registry.key: getattr(config, registry.key) for registry in REGISTRIES}
    read: set[str] = set()
    for registry in REGISTRIES:
        declared = registry.find(chosen[registry.key])
        for key in declared.reads:
            if key not in config.__struct_fields__:
                raise ValueError(
                    f"{registry.key} {chosen[registry.key]!r} reads {key!r}, which is no key of the "
                    f"learner section; {did_you_mean(key, config.__struct_fields__)}"
                )
        read |= declared.keys
    for key in sorted(_keys_set(config) - read - SHARED):
        for registry in REGISTRIES:
            if readers := registry.readers(key):
                raise ValueError(
                    f"{key} is not read by {registry.key} {chosen[registry.key]!r} (only by "
                    f"{', '.join(readers)}): remove it or choose one of these"
                )


def _keys_set(config: AlgorithmConfig) -> set[str]:
    """Keys whose value is not the default."""
    fields, defaults = config.__struct_fields__, config.__struct_defaults__
    pairs = zip(fields[-len(defaults) :], defaults, strict=True)
    return {key for key, default in pairs if getattr(config, key) != default}


def _check_redraw(config: AlgorithmConfig) -> None:
    """An estimator that compares groups only with some settings reads the key only with these."""
    choice = config.zero_variance_groups
    is_asked = config.estimator.compares_group and choice != "count"
    if is_asked and not config.needs_two_members:
        raise ValueError(
            f"zero_variance_groups {choice!r} is not read by adv_estimator {config.adv_estimator!r} "
            f"with reward_grouping {config.reward_grouping!r} and reward_norm {config.reward_norm!r}, "
            "which do not compare the members of a group: remove it, or use reward_grouping "
            "traj_group_id with reward_norm mean_std or mean"
        )


def _check_divergence(config: AlgorithmConfig) -> None:
    for key, neutral in () if config.needs_reference else _OF_REFERENCE.items():
        if getattr(config, key) not in neutral:
            raise ValueError(f"{key} is not read while init_kl_coef is 0: remove it or set that")
    if config.kl_horizon not in _OF_REFERENCE["kl_horizon"] and not config.target_kl:
        raise ValueError("kl_horizon is not read without target_kl: remove it or set that")
    if not config.rewards_divergence:
        return
    if not config.estimator.token_rewards:
        raise ValueError(
            f"kl_in 'reward' needs rewards of single tokens, adv_estimator {config.adv_estimator!r} "
            f"has none: set kl_in to loss, or use {ESTIMATORS.all_with('token_rewards')}"
        )
    if config.policy_loss.has_divergence:
        raise ValueError(
            f"kl_in 'reward' (null means it with {ESTIMATORS.all_with('divergence_in_reward')}) with "
            f"loss {config.loss!r}, which has its divergence in the loss: set kl_in to loss, or use "
            "loss ppo_clip"
        )


def _check_reference(reference: ReferenceArgs, config: AlgorithmConfig, strategy: str) -> None:
    if not config.needs_reference:
        raise ValueError("reference is not read while init_kl_coef is 0: remove it or set that")
    if reference.sharded and strategy != "fsdp2":
        raise ValueError(
            "reference.sharded cuts weights as strategy_args.strategy_name fsdp2 does, here is "
            f"{strategy}: use fsdp2 (num_ranks above 1), or remove it"
        )


def _check_critic(critic: CriticArgs, config: AlgorithmConfig, num_ranks: int) -> None:
    if not config.estimator.needs_values:
        raise ValueError(
            f"critic is not read by adv_estimator {config.adv_estimator!r} (only by "
            f"{ESTIMATORS.all_with('needs_values')}): remove it"
        )
    if critic.shared and num_ranks > 1:
        raise ValueError(
            f"critic.shared with {num_ranks} ranks: a trunk on several ranks cannot have a value head; "
            "set critic.shared to false, or strategy_args.num_ranks to 1"
        )
