"""Table of verl's roles: the policy with its reference, the optimizers, and the critic."""

from collections.abc import Iterator, Mapping
from typing import Any

from tailrace.config.settings import (
    Derived,
    Lookup,
    NoEffectError,
    Refused,
    Renamed,
    Rule,
    value_names,
    values,
)
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.rules import (
    decays,
    is_on,
    negated,
    ratio_of_steps,
    read_with,
    repeats,
    to,
    where,
)
from tailrace_cli.importing.verl import loss, placement, rules
from tailrace_cli.importing.verl.loss import ACTOR
from tailrace_cli.importing.verl.rules import MODEL, ROLLOUT

NO_CRITIC = "there is no critic: algorithm.adv_estimator is not gae"
_REF = "actor_rollout_ref.ref"
_MAX_TOKENS = "learner.max_tokens_per_micro_batch"
_SAME_BATCHES = "policy and critic are trained in the same passes"
_OPTIMIZER = (
    ("optim.lr", "learning_rate"),
    ("optim.weight_decay", "weight_decay"),
    ("grad_clip", "max_grad_norm"),
    ("optim.clip_grad", "max_grad_norm"),
)
_USUAL_RATE = 1e-6
_OLDER_SCHEDULES = ("warmup_style", "lr_decay_style")  # the second with Megatron
_KEYS_OF_LOSSES = {
    "sapo": {
        "tau_pos": "sapo_tau",
        "tau_neg": "sapo_tau_negative",
        "policy_loss.tau_pos": "sapo_tau",
        "policy_loss.tau_neg": "sapo_tau_negative",
    },
    "clip_cov": {
        "policy_loss.clip_cov_ratio": "cov_fraction",
        "policy_loss.clip_cov_lb": "clip_cov_low",
        "policy_loss.clip_cov_ub": "clip_cov_high",
    },
    "kl_cov": {
        "policy_loss.kl_cov_ratio": "cov_fraction",
        "policy_loss.ppo_kl_coef": "kl_cov_coef",
    },
}
_OF_ACTOR = (
    ("strategy", "fsdp"),
    ("ppo_epochs", 1),
    ("ppo_mini_batch_size", 256),
    ("use_dynamic_bsz", False),
    ("shuffle", False),
    ("loss_agg_mode", "token-mean"),
    ("ulysses_sequence_parallel_size", 1),
)


def _optimizer(role: str, args: str) -> tuple[Rule, ...]:
    """Rules for the optimizer of `role`, whose keys here are below `args`."""
    optim, schedule = f"{role}.optim", (f"{args}.lr_scheduler_type",)

    def betas(both: Any, _lookup: Lookup) -> Mapping[str, Any]:
        first, second = both
        return {f"{args}.adam_beta1": first, f"{args}.adam_beta2": second}

    def warmup(steps: Any, _lookup: Lookup) -> Mapping[str, Any]:
        return {f"{args}.warmup_steps": steps} if steps >= 0 else {}  # negative: the ratio counts

    def older(style: Any, lookup: Lookup) -> Mapping[str, Any]:
        if lookup(f"{optim}.lr_scheduler_type") is not None:
            raise NoEffectError("optim.lr_scheduler_type replaces it")
        return {schedule[0]: values.schedule(style)}

    def lowest(rate: Any, lookup: Lookup) -> Mapping[str, Any]:
        share = rate / lookup(f"{args}.learning_rate", _USUAL_RATE)
        return {f"{args}.min_lr_ratio": round(share, 9)}

    return (
        *(to(f"{role}.{key}", f"{args}.{ours}") for key, ours in _OPTIMIZER),
        *where(
            decays(*(f"{optim}.{key}" for key in ("lr_scheduler_type", *_OLDER_SCHEDULES))),
            names.NO_DECAY,
            to(f"{optim}.min_lr_ratio", f"{args}.min_lr_ratio"),
            Derived(f"{optim}.min_lr", (f"{args}.min_lr_ratio",), lowest, "a share of `lr`"),
        ),
        Refused(f"{optim}.lr_warmup_init", "the rate rises from 0", (0.0,)),
        Derived(f"{optim}.betas", (f"{args}.adam_beta1", f"{args}.adam_beta2"), betas, "both of AdamW"),
        Derived(f"{optim}.lr_warmup_steps", (f"{args}.warmup_steps",), warmup, "if not negative"),
        ratio_of_steps(
            f"{optim}.lr_warmup_steps_ratio", f"{args}.warmup_steps", "trainer.total_training_steps"
        ),
        to(f"{optim}.optimizer", f"{args}.optimizer", by=names.optimizer),
        Renamed(f"{optim}.lr_scheduler_type", schedule, values.schedule),
        *(
            Derived(f"{optim}.{key}", schedule, older, "not beside `lr_scheduler_type`")
            for key in _OLDER_SCHEDULES
        ),
    )


def _of_losses() -> Iterator[Derived]:
    """Rules for settings that one loss reads."""
    for mode, keys in _KEYS_OF_LOSSES.items():
        rules_of_mode = (
            to(f"{ACTOR}.{name}", f"learner.{key}", by=float) for name, key in keys.items()
        )
        yield from where(loss.has_mode(mode), f"the loss is not {mode}", *rules_of_mode)


ACTOR_AND_REFERENCE: tuple[Rule, ...] = (
    to(f"{MODEL}.path", "pretrain"),
    to(
        f"{MODEL}.enable_gradient_checkpointing",
        "learner.model_args.disable_gradient_checkpointing",
        by=negated,
    ),
    Refused(f"{MODEL}.use_remove_padding", "rows are packed, there is no padding", (True,)),
    Refused(f"{MODEL}.trust_remote_code", "code of models is never run", (False,)),
    Derived(f"{MODEL}.lora_rank", ("learner.lora.r",), rules.lora, "with its scale and layers"),
    *where(
        is_on(f"{MODEL}.lora_rank"),
        "lora_rank is 0",
        *(read_with(f"{MODEL}.{key}", "lora_rank") for key in ("lora_alpha", "target_modules")),
    ),
    Derived(
        f"{MODEL}.lora.rank", ("learner.lora.r",), rules.megatron_lora, "with its scale and layers"
    ),
    *where(
        is_on(f"{MODEL}.lora.rank"),
        "lora.rank is 0",
        *(read_with(f"{MODEL}.lora.{key}", "lora.rank") for key in ("alpha", "target_modules")),
        Refused(f"{MODEL}.lora.dropout", "adapters have no dropout", (0.0,)),
    ),
    to(
        f"{ACTOR}.strategy",
        "learner.strategy_args.strategy_name",
        by=value_names("fsdp2", "megatron", fsdp="fsdp2"),
    ),
    Derived(
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        ("learner.strategy_args.tensor_parallel_size", "learner.strategy_args.num_ranks"),
        rules.tensor_parallel,
        "one group of ranks that share the layers, with `strategy: megatron`",
    ),
    Refused(f"{ACTOR}.megatron.pipeline_model_parallel_size", names.NO_STAGES, (1,)),
    Derived(
        f"{ACTOR}.ppo_mini_batch_size",
        ("learner.num_mini_batches", "groups_per_step"),
        placement.updates,
        "per update; with `async_training` several of them are a step",
    ),
    Derived(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        (_MAX_TOKENS,),
        rules.row_budget,
        "times the longest row",
    ),
    *where(
        is_on(f"{ACTOR}.use_dynamic_bsz"),
        "use_dynamic_bsz is off",
        to(f"{ACTOR}.ppo_max_token_len_per_gpu", _MAX_TOKENS),
    ),
    read_with(f"{ACTOR}.use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    Refused(f"{ACTOR}.shuffle", "mini-batches are made of groups as they arrive", (False,)),
    to(f"{ACTOR}.ppo_epochs", "learner.ppo_epochs"),
    Derived(f"{ACTOR}.clip_ratio", loss.CLIPS, loss.clip_both, "unless both sides have their own"),
    *(
        Derived(f"{ACTOR}.{key}", loss.CLIPS, loss.clip, "`dapo` if they differ and are of `vanilla`")
        for key in ("clip_ratio_low", "clip_ratio_high")
    ),
    Derived(
        f"{ACTOR}.clip_ratio_c",
        ("learner.dual_clip", "learner.dppo_cap"),
        loss.upper_bound,
        "of `vanilla` and `dppo_tv`",
    ),
    Derived(loss.MODE, (*loss.CLIPS, loss.AGGREGATION[0]), loss.loss, "the loss, with its clips"),
    *_of_losses(),
    Derived(
        f"{ACTOR}.loss_agg_mode",
        loss.AGGREGATION,
        loss.aggregation,
        "not of `gspo`, `sapo` and `geo_mean`, which always take the mean of rows",
    ),
    *where(
        loss.has_norm,
        "loss_agg_mode has no such factor",
        read_with(f"{ACTOR}.loss_scale_factor", "loss_agg_mode"),
    ),
    to(f"{ACTOR}.entropy_coeff", "learner.entropy_loss_coef"),
    Derived(f"{ACTOR}.use_kl_loss", ("learner.init_kl_coef",), rules.kl_in_loss, "KL in the loss"),
    *where(
        is_on(f"{ACTOR}.use_kl_loss"),
        "use_kl_loss is off",
        read_with(f"{ACTOR}.kl_loss_coef", "use_kl_loss"),
    ),
    *where(
        lambda lookup: bool(rules.kl_of_loss(lookup)),
        "use_kl_loss is off, or kl_loss_coef is 0",
        to(f"{ACTOR}.kl_loss_type", "learner.kl_estimator", by=names.kl_estimator),
    ),
    *_optimizer(ACTOR, "learner.training_args"),
    *where(
        rules.has_reference,
        "no divergence is computed, so there is no reference",
        to(f"{_REF}.fsdp_config.param_offload", "learner.reference.offload"),
        to(f"{_REF}.megatron.param_offload", "learner.reference.offload"),
    ),
    repeats(f"{_REF}.strategy", f"{ACTOR}.strategy", "it computes on the learner's ranks"),
    repeats(
        f"{_REF}.ulysses_sequence_parallel_size",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "the reference computes as the policy does",
        1,
    ),
    Refused(f"{ACTOR}.ulysses_sequence_parallel_size", names.ONE_DEVICE, (1,)),
    repeats(f"{ROLLOUT}.prompt_length", "data.max_prompt_length", "prompts have one bound"),
    repeats(f"{ROLLOUT}.response_length", "data.max_response_length", "replies have one bound"),
)

CRITIC: tuple[Rule, ...] = (
    *where(
        rules.has_critic,
        NO_CRITIC,
        to("critic.cliprange_value", "learner.critic.value_clip"),
        *_optimizer("critic", "learner.critic.training_args"),
        *(repeats(f"critic.{key}", f"{ACTOR}.{key}", _SAME_BATCHES, value) for key, value in _OF_ACTOR),
        repeats("critic.rollout_n", f"{ROLLOUT}.n", "a group has one size", 1),
        *(
            repeats(f"critic.model.{key}", f"{MODEL}.{key}", "as the policy is read", False)
            for key in ("trust_remote_code", "use_remove_padding")
        ),
        repeats("critic.model.tokenizer_path", f"{MODEL}.path", "a run has one tokenizer"),
        repeats(
            "critic.model.enable_gradient_checkpointing",
            f"{MODEL}.enable_gradient_checkpointing",
            "policy and critic compute alike",
            True,
        ),
    ),
    Derived(
        "critic.model.path", ("learner.critic.pretrain",), rules.critic_path, "if not the policy's"
    ),
)
