"""verl (volcengine/verl): the PPO trainer's configuration."""

from __future__ import annotations

from tailrace.config.settings import Derived, Refused, values
from tailrace_cli.importing import words
from tailrace_cli.importing.rules import (
    System,
    beside,
    nothing,
    only,
    repeats,
    run_name,
    to,
    when,
)
from tailrace_cli.importing.verl import rules
from tailrace_cli.importing.verl.actor import ACTOR_AND_REFERENCE
from tailrace_cli.importing.verl.defaults import ALWAYS, DEFAULTS
from tailrace_cli.importing.verl.optimizer import optimizer
from tailrace_cli.importing.verl.rules import ACTOR, MODEL, ROLLOUT

_CRITIC_ARGS = "learner.critic.training_args"
_SAMPLING = "agents.generating_args"
_EVAL = "agents.eval_generating_args"
_OF_CRITIC = "there is no critic: algorithm.adv_estimator is not gae"
_FUNCTION = (
    "functions of rewards have other arguments here: write `def f(task, messages, metrics) -> float`, "
    "which finds the row in task.row, and name it under reward.rewards"
)
_RESUMES = ("auto", "disable", "resume_path")
_NO_DIVERGENCE = "use_kl_in_reward is off"
_ONE_LOOP = "policy and critic are trained in the same passes"
_OF_ACTOR = (
    ("strategy", "fsdp"),
    ("ppo_epochs", 1),
    ("ppo_mini_batch_size", 256),
    ("use_dynamic_bsz", False),
    ("shuffle", False),
    ("loss_agg_mode", "token-mean"),
    ("ulysses_sequence_parallel_size", 1),
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
        Derived(
            "trainer.n_gpus_per_node",
            (
                "cluster.num_gpus_per_node",
                "learner.strategy_args.num_ranks",
                "cluster.num_inference_servers",
                "cluster.learner_gpus",
                "cluster.inference_gpus",
            ),
            rules.gpus,
            "a rank and an engine on each",
        ),
        Refused("trainer.nnodes", "a local cluster is one machine", (1,)),
        Refused("trainer.val_before_train", "every run is evaluated before its first step", (True,)),
        Derived("trainer.logger", words.TRACKERS, rules.trackers, "`wandb` and `tensorboard`"),
        beside(
            "trainer.project_name",
            rules.uses_wandb,
            "trainer.logger does not name wandb",
            "with `trainer.logger`, for `wandb`",
        ),
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
        *ACTOR_AND_REFERENCE,
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
            beside(f"algorithm.{key}", rules.penalizes, _NO_DIVERGENCE, "with `use_kl_in_reward`")
            for key in ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef")
        ),
        *(
            beside(
                f"algorithm.kl_ctrl.{key}",
                rules.adapts,
                f"kl_ctrl.type is not adaptive, or {_NO_DIVERGENCE}",
                "with `kl_ctrl.type: adaptive`",
            )
            for key in ("target_kl", "horizon")
        ),
        Derived(
            "algorithm.filter_groups.enable",
            ("learner.zero_variance_groups",),
            rules.redraw,
            "with estimators that compare the members of a group",
        ),
        when("critic.cliprange_value", "learner.critic.value_clip", rules.has_critic, _OF_CRITIC),
        *(only(rules.has_critic, _OF_CRITIC, line) for line in optimizer("critic", _CRITIC_ARGS)),
        *(
            only(rules.has_critic, _OF_CRITIC, line)
            for line in (
                *(
                    repeats(f"critic.{key}", f"{ACTOR}.{key}", _ONE_LOOP, value)
                    for key, value in _OF_ACTOR
                ),
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
            )
        ),
        Derived(
            "critic.model.path", ("learner.critic.pretrain",), rules.critic_path, "if not the policy's"
        ),
        Derived(
            "reward_model.overlong_buffer.enable",
            ("learner.overlong_max_tokens", "learner.overlong_buffer_tokens"),
            rules.overlong,
            "with its length and `data.max_response_length`",
        ),
        beside(
            "reward_model.overlong_buffer.len",
            lambda lookup: bool(lookup("reward_model.overlong_buffer.enable")),
            "overlong_buffer.enable is off",
            "with `enable`",
        ),
        Refused("reward_model.overlong_buffer.penalty_factor", "the penalty rises to 1", (1.0,)),
        Derived(
            "reward_model.enable", ("reward.reward_pretrain",), rules.reward_model, "with its model"
        ),
        beside(
            "reward_model.model.path",
            lambda lookup: bool(lookup("reward_model.enable")),
            "reward_model.enable is off",
            "with `reward_model.enable`",
        ),
        Refused("custom_reward_function", _FUNCTION),
    ),
    DEFAULTS,
    ALWAYS,
)
