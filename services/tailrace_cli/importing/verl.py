"""verl (volcengine/verl): the PPO trainer's configuration."""

from __future__ import annotations

from tailrace.config.settings import Derived, Refused, values
from tailrace.config.settings.setting import choice
from tailrace_cli.importing import verl_rules as rules
from tailrace_cli.importing import words
from tailrace_cli.importing.rules import System, not_, nothing, ratio_of_steps, run_name, to, when
from tailrace_cli.importing.verl_rules import ACTOR, MODEL, ROLLOUT

_REF = "actor_rollout_ref.ref"
_ARGS = "learner.training_args"
_CRITIC_ARGS = "learner.critic.training_args"
_SAMPLING = "agents.generating_args"
_EVAL = "agents.eval_generating_args"
_OF_CRITIC = "there is no critic: algorithm.adv_estimator is not gae"
_FUNCTION = (
    "functions of rewards have other arguments here: write `def f(task, messages, metrics) -> float`, "
    "which finds the row in task.row, and name it under reward.rewards"
)
_CLIPS = ("learner.loss", "learner.pg_clip", "learner.pg_clip_high")
_RESUMES = ("auto", "disable", "resume_path")
_OPTIMIZER = (
    ("lr", "learning_rate"),
    ("weight_decay", "weight_decay"),
    ("min_lr_ratio", "min_lr_ratio"),
)

VERL = System(
    "verl",
    "verl",
    (
        to("trainer.experiment_name", "exp_name", by=run_name),
        to("trainer.default_local_dir", "output_dir"),
        to("trainer.total_training_steps", "max_steps"),
        to("trainer.save_freq", "save_steps", by=words.steps_or_never),
        to("trainer.test_freq", "eval_steps", by=words.steps_or_never),
        to("trainer.n_gpus_per_node", "cluster.num_gpus_per_node"),
        Refused("trainer.nnodes", "a local cluster is one machine", (1,)),
        Refused("trainer.val_before_train", "every run is evaluated before its first step", (True,)),
        Derived("trainer.logger", words.TRACKERS, rules.trackers, "`wandb` and `tensorboard`"),
        Derived("trainer.project_name", (), nothing, "with `trainer.logger`, for `wandb`"),
        to("trainer.resume_from_path", "resume_from_checkpoint"),
        Refused("trainer.resume_mode", "give resume_from_checkpoint", _RESUMES),
        to("trainer.max_actor_ckpt_to_keep", "learner.save_total_limit"),
        when("trainer.critic_warmup", "learner.critic.critic_warmup", rules.has_critic, _OF_CRITIC),
        Refused("trainer.total_epochs", words.NO_EPOCHS),
        Derived(
            "data.train_files",
            ("agents.datasets.train.path", "scheduler.tags"),
            lambda paths, _: words.datasets("train", "scheduler.tags", paths),
            "data sets `train`; rows need a `prompt`",
        ),
        Derived(
            "data.val_files",
            ("agents.datasets.validation.path", "scheduler.eval_tags"),
            lambda paths, _: words.datasets("validation", "scheduler.eval_tags", paths),
            "data sets `validation`",
        ),
        Refused("data.prompt_key", "a converter gives rows a `prompt`", ("prompt",)),
        Refused("data.shuffle", "rows are shuffled anew in every epoch", (True,)),
        to("data.seed", "seed"),
        to("data.train_batch_size", "groups_per_step"),
        to("data.val_batch_size", "scheduler.eval_groups"),
        Derived(
            "data.max_prompt_length",
            ("agents.max_episode_tokens", "inference.max_model_len"),
            rules.longest,
            "with `data.max_response_length`",
        ),
        to("data.max_response_length", f"{_SAMPLING}.max_new_tokens", f"{_EVAL}.max_new_tokens"),
        to(f"{MODEL}.path", "pretrain"),
        to(
            f"{MODEL}.enable_gradient_checkpointing",
            "learner.model_args.disable_gradient_checkpointing",
            by=not_,
        ),
        Refused(f"{MODEL}.use_remove_padding", "rows are packed, there is no padding", (True,)),
        Refused(f"{MODEL}.trust_remote_code", "code of models is never run", (False,)),
        Derived(f"{MODEL}.lora_rank", ("learner.lora.r",), rules.lora, "with its scale and layers"),
        Derived(f"{MODEL}.lora_alpha", (), nothing, "with `lora_rank`"),
        Derived(f"{MODEL}.target_modules", (), nothing, "with `lora_rank`"),
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
        Derived(
            f"{ACTOR}.ppo_mini_batch_size", ("learner.num_mini_batches",), rules.updates, "per update"
        ),
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
        to(f"{ACTOR}.grad_clip", f"{_ARGS}.max_grad_norm"),
        to(f"{ACTOR}.optim.clip_grad", f"{_ARGS}.max_grad_norm"),
        *(
            Derived(f"{ACTOR}.{key}", _CLIPS, rules.clip, "`dapo` if they differ")
            for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
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
        Derived(f"{ACTOR}.kl_loss_coef", (), nothing, "with `use_kl_loss`"),
        when(
            f"{ACTOR}.kl_loss_type",
            "learner.kl_estimator",
            lambda lookup: bool(lookup(f"{ACTOR}.use_kl_loss")),
            words.NO_KL,
            words.kl_estimator,
        ),
        *(to(f"{ACTOR}.optim.{key}", f"{_ARGS}.{ours}") for key, ours in _OPTIMIZER),
        Derived(
            f"{ACTOR}.optim.betas",
            (f"{_ARGS}.adam_beta1", f"{_ARGS}.adam_beta2"),
            rules.betas,
            "both of AdamW",
        ),
        Derived(f"{ACTOR}.optim.lr_warmup_steps", (f"{_ARGS}.warmup_steps",), rules.warmup, "steps"),
        ratio_of_steps(
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            f"{_ARGS}.warmup_steps",
            "trainer.total_training_steps",
        ),
        to(f"{ACTOR}.optim.lr_scheduler_type", f"{_ARGS}.lr_scheduler_type", by=values.schedule),
        when(
            f"{ACTOR}.optim.warmup_style",
            f"{_ARGS}.lr_scheduler_type",
            rules.schedule,
            "optim.lr_scheduler_type says it already",
            values.schedule,
        ),
        Refused(f"{_REF}.fsdp_config.param_offload", "set learner.reference.offload", (False,)),
        Refused(f"{ROLLOUT}.name", words.NO_ENGINE, ("hf",)),
        Refused(f"{ROLLOUT}.tensor_model_parallel_size", words.PARALLEL, (1,)),
        to(f"{ROLLOUT}.n", "group_size"),
        to(f"{ROLLOUT}.temperature", f"{_SAMPLING}.temperature", "learner.temperature", by=float),
        to(f"{ROLLOUT}.top_p", f"{_SAMPLING}.top_p", by=float),
        to(f"{ROLLOUT}.top_k", f"{_SAMPLING}.top_k", by=words.all_or),
        to(f"{ROLLOUT}.dtype", "inference.dtype", by=values.engine_dtype),
        to(f"{ROLLOUT}.gpu_memory_utilization", "inference.gpu_memory_utilization"),
        to(f"{ROLLOUT}.max_num_seqs", "inference.max_running"),
        to(f"{ROLLOUT}.max_num_batched_tokens", "inference.max_batched_tokens"),
        Derived(f"{ROLLOUT}.max_model_len", (), nothing, "with `data.max_prompt_length`"),
        to(f"{ROLLOUT}.val_kwargs.temperature", f"{_EVAL}.temperature", by=float),
        to(f"{ROLLOUT}.val_kwargs.top_p", f"{_EVAL}.top_p", by=float),
        to(f"{ROLLOUT}.val_kwargs.top_k", f"{_EVAL}.top_k", by=words.all_or),
        to(f"{ROLLOUT}.val_kwargs.n", "scheduler.eval_group_size"),
        Derived(
            f"{ROLLOUT}.multi_turn.enable",
            ("agents.datasets.train.agent_name",),
            rules.loop,
            "rows are played by `tool_agent`",
        ),
        to(f"{ROLLOUT}.multi_turn.max_assistant_turns", "agents.loop_args.max_turns"),
        Refused(
            f"{ROLLOUT}.multi_turn.tool_config_path",
            "tools are workers here: name them under cluster.tool_workers and in the rows",
        ),
        Refused(ROLLOUT, words.NO_ENGINE),
        Derived(
            "algorithm.adv_estimator",
            ("learner.adv_estimator",),
            rules.estimator,
            "`remax` with `agents.greedy_baseline`, `gae` with `learner.critic`",
        ),
        when(
            "algorithm.norm_adv_by_std_in_grpo",
            "learner.norm_std",
            rules.is_grpo,
            "the estimator is not grpo",
        ),
        when("algorithm.gamma", "learner.gamma", rules.discounts, "this estimator does not discount"),
        when(
            "algorithm.lam",
            "learner.lambd",
            rules.has_critic,
            "the estimator is not gae, which alone looks ahead by values",
        ),
        Derived(
            "algorithm.rollout_correction.rollout_is",
            ("learner.behaviour_correction", "learner.correction_level"),
            rules.correction,
            "`tis` of tokens or of rows",
        ),
        when(
            "algorithm.rollout_correction.rollout_is_threshold",
            "learner.tis_cap",
            rules.corrects,
            "rollout_is names no weights",
            float,
        ),
        Derived(
            "algorithm.use_kl_in_reward", ("learner.init_kl_coef",), rules.kl_in_reward, "KL in rewards"
        ),
        *(
            Derived(f"algorithm.{key}", (), nothing, "with `use_kl_in_reward`")
            for key in ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef", "kl_ctrl.target_kl")
        ),
        Derived("algorithm.kl_ctrl.horizon", (), nothing, "with `use_kl_in_reward`"),
        Derived(
            "algorithm.filter_groups.enable",
            ("learner.zero_variance_groups",),
            rules.redraw,
            "with estimators that compare the members of a group",
        ),
        when("critic.cliprange_value", "learner.critic.value_clip", rules.has_critic, _OF_CRITIC),
        *(
            when(f"critic.optim.{key}", f"{_CRITIC_ARGS}.{ours}", rules.has_critic, _OF_CRITIC)
            for key, ours in _OPTIMIZER
        ),
        when("critic.grad_clip", f"{_CRITIC_ARGS}.max_grad_norm", rules.has_critic, _OF_CRITIC),
        Derived(
            "critic.model.path", ("learner.critic.pretrain",), rules.critic_path, "if not the policy's"
        ),
        Derived(
            "reward_model.overlong_buffer.enable",
            ("learner.overlong_max_tokens", "learner.overlong_buffer_tokens"),
            rules.overlong,
            "with its length and `data.max_response_length`",
        ),
        Derived("reward_model.overlong_buffer.len", (), nothing, "with `enable`"),
        Refused("reward_model.overlong_buffer.penalty_factor", "the penalty rises to 1", (1.0,)),
        Derived(
            "reward_model.enable", ("reward.reward_pretrain",), rules.reward_model, "with its model"
        ),
        Derived("reward_model.model.path", (), nothing, "with `reward_model.enable`"),
        Refused("custom_reward_function", _FUNCTION),
    ),
)
