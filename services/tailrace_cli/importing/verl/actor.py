"""verl's policy: the model, the actor that trains it, and the reference."""

from __future__ import annotations

from tailrace.config.settings import Derived, Refused, Setting
from tailrace.config.settings.setting import choice
from tailrace_cli.importing import words
from tailrace_cli.importing.rules import beside, not_, nothing, repeats, to, when
from tailrace_cli.importing.verl import rules
from tailrace_cli.importing.verl.optimizer import optimizer
from tailrace_cli.importing.verl.rules import ACTOR, MODEL, ROLLOUT

_REF = "actor_rollout_ref.ref"
_CLIPS = ("learner.loss", "learner.pg_clip", "learner.pg_clip_high")

ACTOR_AND_REFERENCE: tuple[Setting, ...] = (
    to(f"{MODEL}.path", "pretrain"),
    to(
        f"{MODEL}.enable_gradient_checkpointing",
        "learner.model_args.disable_gradient_checkpointing",
        by=not_,
    ),
    Refused(f"{MODEL}.use_remove_padding", "rows are packed, there is no padding", (True,)),
    Refused(f"{MODEL}.trust_remote_code", "code of models is never run", (False,)),
    Derived(f"{MODEL}.lora_rank", ("learner.lora.r",), rules.lora, "with its scale and layers"),
    *(
        beside(f"{MODEL}.{key}", rules.has_adapters, "lora_rank is 0", "with `lora_rank`")
        for key in ("lora_alpha", "target_modules")
    ),
    to(
        f"{ACTOR}.strategy",
        "learner.strategy_args.strategy_name",
        by=choice("fsdp2", "megatron", fsdp="fsdp2"),
    ),
    Derived(
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        ("learner.strategy_args.tensor_parallel_size", "learner.strategy_args.num_ranks"),
        rules.tensor_parallel,
        "one group of ranks that share the layers, with `strategy: megatron`",
    ),
    Refused(f"{ACTOR}.megatron.pipeline_model_parallel_size", words.NO_STAGES, (1,)),
    Derived(f"{ACTOR}.ppo_mini_batch_size", ("learner.num_mini_batches",), rules.updates, "per update"),
    Derived(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        ("learner.max_tokens_per_micro_batch",),
        rules.row_budget,
        "times the longest row",
    ),
    when(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "learner.max_tokens_per_micro_batch",
        lambda lookup: bool(lookup(f"{ACTOR}.use_dynamic_bsz")),
        "use_dynamic_bsz is off",
    ),
    Derived(f"{ACTOR}.use_dynamic_bsz", (), nothing, "passes are always packed by tokens"),
    Refused(f"{ACTOR}.shuffle", "mini-batches are made of groups as they arrive", (False,)),
    to(f"{ACTOR}.ppo_epochs", "learner.ppo_epochs"),
    Derived(f"{ACTOR}.clip_ratio", _CLIPS, rules.clip_both, "unless both sides have their own"),
    *(
        Derived(f"{ACTOR}.{key}", _CLIPS, rules.clip, "`dapo` if they differ")
        for key in ("clip_ratio_low", "clip_ratio_high")
    ),
    when(
        f"{ACTOR}.clip_ratio_c",
        "learner.dual_clip",
        rules.is_vanilla,
        "the loss is not vanilla, which alone has this bound",
    ),
    Derived(f"{ACTOR}.policy_loss.loss_mode", ("learner.loss",), rules.loss, "the loss"),
    to(f"{ACTOR}.loss_agg_mode", "learner.loss_aggregation", by=words.aggregation),
    to(f"{ACTOR}.entropy_coeff", "learner.entropy_loss_coef"),
    Derived(f"{ACTOR}.use_kl_loss", ("learner.init_kl_coef",), rules.kl_in_loss, "KL in the loss"),
    beside(
        f"{ACTOR}.kl_loss_coef",
        lambda lookup: bool(lookup(f"{ACTOR}.use_kl_loss")),
        "use_kl_loss is off",
        "with `use_kl_loss`",
    ),
    when(
        f"{ACTOR}.kl_loss_type",
        "learner.kl_estimator",
        lambda lookup: bool(lookup(f"{ACTOR}.use_kl_loss")),
        words.NO_KL,
        words.kl_estimator,
    ),
    *optimizer(ACTOR, "learner.training_args"),
    Refused(f"{_REF}.fsdp_config.param_offload", "set learner.reference.offload", (False,)),
    repeats(f"{_REF}.strategy", f"{ACTOR}.strategy", "it computes on the learner's ranks"),
    *(
        repeats(f"{section}.log_prob_{key}", f"{ACTOR}.{actors}", "passes are packed alike")
        for section in (_REF, ROLLOUT)
        for key, actors in (
            ("use_dynamic_bsz", "use_dynamic_bsz"),
            ("max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
        )
    ),
    repeats(
        f"{_REF}.ulysses_sequence_parallel_size",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "the reference computes as the policy does",
        1,
    ),
    Refused(f"{ACTOR}.ulysses_sequence_parallel_size", words.PARALLEL, (1,)),
    repeats(f"{ROLLOUT}.prompt_length", "data.max_prompt_length", "prompts have one bound"),
    repeats(f"{ROLLOUT}.response_length", "data.max_response_length", "replies have one bound"),
)
