"""verl (volcengine/verl): the table of the PPO trainer's configuration, and its defaults."""

from collections.abc import Iterator

from tailrace.config.settings import Derived, Refused, Rule, values
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.rules import (
    NOT_CORRECTED,
    SYNCHRONOUS,
    Default,
    System,
    data_files,
    is_on,
    read_with,
    repeats,
    run_name,
    to,
    where,
)
from tailrace_cli.importing.verl import placement, rules
from tailrace_cli.importing.verl.actor import ACTOR_AND_REFERENCE, CRITIC, NO_CRITIC
from tailrace_cli.importing.verl.loss import ACTOR, CORRECTION
from tailrace_cli.importing.verl.rules import MODEL, ROLLOUT

_SAMPLING = "agents.generating_args"
_EVAL = "agents.eval_generating_args"
_FUNCTION = (
    "functions of rewards have other arguments here: write `def f(task, messages, metrics) -> float`, "
    "which finds the row in task.row, and name it under reward.rewards"
)
_RESUMES = ("auto", "disable", "resume_path")
_NO_DIVERGENCE = "use_kl_in_reward is off"

_TRAINER: tuple[Rule, ...] = (
    to("trainer.experiment_name", "exp_name", by=run_name),
    to("trainer.default_local_dir", "output_dir"),
    to("trainer.total_training_steps", "max_steps"),
    to("trainer.save_freq", "save_steps", by=names.not_negative),
    to("trainer.test_freq", "eval_steps", by=names.not_negative),
    Derived(
        "model_engine",
        ("learner.strategy_args.strategy_name",),
        rules.model_engine,
        "unless `actor_rollout_ref.actor.strategy` says it",
    ),
    Derived("trainer.n_gpus_per_node", placement.GPUS, placement.gpus, "a rank and an engine on each"),
    Derived("trainer.nnodes", ("cluster.num_nodes",), placement.nodes, "with those of engines apart"),
    Derived(
        "actor_rollout_ref.hybrid_engine",
        ("max_staleness",),
        placement.hybrid,
        "if false, engines have their own GPUs",
    ),
    *(
        read_with(f"{section}.{key}", "trainer.n_gpus_per_node")
        for section in ("rollout", ROLLOUT)
        for key in ("nnodes", "n_gpus_per_node")
    ),
    Derived("rollout.total_rollout_steps", ("max_steps",), placement.steps, "prompts of a run"),
    Derived(
        f"{placement.ASYNC}.staleness_threshold", ("max_staleness",), placement.staleness, "rounded up"
    ),
    *(
        read_with(f"{placement.ASYNC}.{key}", f"{ACTOR}.ppo_mini_batch_size")
        for key in ("require_batches", "trigger_parameter_sync_step")
    ),
    Refused(
        f"{placement.ASYNC}.partial_rollout", "episodes in progress go on with new weights", (True,)
    ),
    Refused("trainer.val_before_train", "every run is evaluated before its first step", (True,)),
    Derived(
        "trainer.logger", names.TRACKERS, rules.trackers, "`wandb`, `mlflow`, `trackio`, `tensorboard`"
    ),
    *where(
        rules.uses_project,
        "trainer.logger names no tracker with projects",
        read_with("trainer.project_name", "trainer.logger"),
    ),
    *where(
        lambda lookup: lookup("trainer.resume_mode", "auto") == "resume_path",
        "trainer.resume_mode is not resume_path",
        to("trainer.resume_from_path", "resume_from_checkpoint"),
    ),
    Refused("trainer.resume_mode", "give resume_from_checkpoint", _RESUMES),
    to("trainer.max_actor_ckpt_to_keep", "learner.save_total_limit"),
    *where(rules.has_critic, NO_CRITIC, to("trainer.critic_warmup", "learner.critic.critic_warmup")),
    *where(
        lambda lookup: not placement.sets_steps(lookup),
        "the number of steps is given",
        to("trainer.total_epochs", "num_epochs"),
    ),
)

_DATA: tuple[Rule, ...] = (
    data_files(
        "data.train_files", "train", "scheduler.tags", "data sets `train`; rows need a `prompt`"
    ),
    data_files("data.val_files", "validation", "scheduler.eval_tags", "data sets `validation`"),
    Refused("data.prompt_key", "a converter gives rows a `prompt`", ("prompt",)),
    Refused("data.shuffle", "rows are shuffled anew in every epoch", (True,)),
    to("data.seed", "seed"),
    Derived("data.train_batch_size", ("groups_per_step",), placement.groups, "groups of a step"),
    Refused(
        "data.val_batch_size",
        "rows that a loader gives at once; give scheduler.eval_groups, the rows of an evaluation",
    ),
    Refused("data.truncation", "prompts are never cut", ("error",)),
    Refused(
        "data.filter_overlong_prompts",
        "rows are not counted in tokens before they are played: leave long ones out by a converter",
        (False,),
    ),
    *(
        Derived(
            f"data.{key}_max_samples",
            (f"agents.datasets.{tag}.limit",),
            rules.rows(tag),
            "of one file; -1: all",
        )
        for key, tag in (("train", "train"), ("val", "validation"))
    ),
    to("data.apply_chat_template_kwargs.*", "chat.template_args.*"),
    Derived(
        "data.max_prompt_length",
        ("agents.max_episode_tokens", "inference.max_model_len"),
        rules.longest,
        "with `data.max_response_length`",
    ),
    to("data.max_response_length", f"{_SAMPLING}.max_new_tokens", f"{_EVAL}.max_new_tokens"),
)

_OF_ENGINE = "of `vllm` and `sglang`"
_ROLLOUT: tuple[Rule, ...] = (
    to(f"{ROLLOUT}.name", "inference.engine", by=names.engine),
    Derived(f"{ROLLOUT}.tensor_model_parallel_size", rules.PARALLEL[:1], rules.cut_engine, _OF_ENGINE),
    Derived(f"{ROLLOUT}.pipeline_model_parallel_size", rules.PARALLEL[1:], rules.stages, _OF_ENGINE),
    Refused(
        f"{ROLLOUT}.data_parallel_size",
        "give cluster.num_inference_servers: a server is one data-parallel group",
        (1,),
    ),
    Derived(f"{ROLLOUT}.n", ("group_size",), rules.members, "with `remax` the greedy episode too"),
    to(f"{ROLLOUT}.temperature", f"{_SAMPLING}.temperature", "learner.temperature", by=float),
    to(f"{ROLLOUT}.top_p", f"{_SAMPLING}.top_p", by=float),
    to(f"{ROLLOUT}.top_k", f"{_SAMPLING}.top_k", by=names.not_negative),
    to(f"{ROLLOUT}.dtype", "inference.dtype", by=values.engine_dtype),
    to(f"{ROLLOUT}.gpu_memory_utilization", "inference.gpu_memory_utilization"),
    to(f"{ROLLOUT}.max_num_seqs", "inference.max_running"),
    to(f"{ROLLOUT}.max_num_batched_tokens", "inference.max_batched_tokens"),
    read_with(f"{ROLLOUT}.max_model_len", "data.max_prompt_length"),
    to(f"{ROLLOUT}.val_kwargs.temperature", f"{_EVAL}.temperature", by=float),
    to(f"{ROLLOUT}.val_kwargs.top_p", f"{_EVAL}.top_p", by=float),
    to(f"{ROLLOUT}.val_kwargs.top_k", f"{_EVAL}.top_k", by=names.not_negative),
    to(f"{ROLLOUT}.val_kwargs.n", "scheduler.eval_group_size"),
    Refused(f"{ROLLOUT}.do_sample", "set the temperature to 0", (True,)),
    Derived(f"{ROLLOUT}.val_kwargs.do_sample", (), rules.eval_sampling, "as its temperature"),
    Derived(
        f"{ROLLOUT}.multi_turn.enable",
        ("agents.datasets.train.agent_name",),
        rules.loop,
        "rows are played by `tool_agent`",
    ),
    to(f"{ROLLOUT}.multi_turn.max_assistant_turns", "agents.loop_args.max_turns"),
    *where(
        is_on(f"{ROLLOUT}.multi_turn.enable"),
        "multi_turn.enable is off",
        to(f"{ROLLOUT}.multi_turn.format", "chat.tool_parser", by=rules.tool_parser),
    ),
    *where(
        is_on(f"{ROLLOUT}.multi_turn.enable"),
        "multi_turn.enable is off",
        to(f"{ROLLOUT}.multi_turn.max_tool_response_length", "agents.loop_args.max_tool_output_chars"),
        Refused(
            f"{ROLLOUT}.multi_turn.tool_response_truncate_side",
            "a long result is cut in its middle",
            ("middle",),
        ),
    ),
    Derived(
        f"{ROLLOUT}.agent.default_agent_loop",
        ("agents.datasets.train.agent_name",),
        rules.agent_loop,
        "of the data sets",
    ),
    Refused(
        f"{ROLLOUT}.multi_turn.tool_config_path",
        "tools are workers here: name them under cluster.tool_workers and in the rows",
    ),
    Refused(ROLLOUT, names.NO_ENGINE),
)

_ALGORITHM: tuple[Rule, ...] = (
    Derived(
        "algorithm.adv_estimator",
        ("learner.adv_estimator",),
        rules.estimator,
        "`remax` with `agents.greedy_baseline`, `gae` with `learner.critic`",
    ),
    *where(
        rules.is_grpo,
        "the estimator is not grpo",
        to("algorithm.norm_adv_by_std_in_grpo", "learner.norm_std"),
    ),
    *where(rules.discounts, "this estimator does not discount", to("algorithm.gamma", "learner.gamma")),
    *where(rules.has_critic, names.NO_LAMBDA, to("algorithm.lam", "learner.lambd")),
    Derived(
        f"{CORRECTION}.rollout_is",
        ("learner.behaviour_correction", "learner.correction_level", "learner.loss"),
        rules.correction,
        "`tis` of tokens or of rows; with `bypass_mode` and `loss_type: reinforce` the loss `tis_pg`",
    ),
    *where(
        rules.corrects,
        "rollout_is names no weights",
        to(f"{CORRECTION}.rollout_is_threshold", "learner.tis_cap", by=float),
        Refused(f"{CORRECTION}.rollout_is_batch_normalize", "weights are not normalized", (False,)),
    ),
    Derived(f"{CORRECTION}.bypass_mode", (), rules.bypass, "with `loss_type` and `rollout_is`"),
    *where(
        is_on(f"{CORRECTION}.bypass_mode"),
        "bypass_mode is off",
        read_with(f"{CORRECTION}.loss_type", "bypass_mode"),
    ),
    Derived(
        f"{CORRECTION}.rollout_rs",
        ("learner.geometric_mask",),
        rules.rejected_rows,
        "`seq_mean_k1` alone, with bounds like `0.99_1.01`",
    ),
    read_with(f"{CORRECTION}.rollout_rs_threshold", "rollout_rs"),
    Derived(
        "algorithm.use_kl_in_reward", ("learner.init_kl_coef",), rules.kl_in_reward, "KL in rewards"
    ),
    *where(
        rules.penalizes,
        _NO_DIVERGENCE,
        *(
            read_with(f"algorithm.{key}", "use_kl_in_reward")
            for key in ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef")
        ),
    ),
    *where(
        rules.adapts,
        f"kl_ctrl.type is not adaptive, or {_NO_DIVERGENCE}",
        *(
            read_with(f"algorithm.kl_ctrl.{key}", "kl_ctrl.type: adaptive")
            for key in ("target_kl", "horizon")
        ),
    ),
    Derived(
        "algorithm.filter_groups.enable",
        ("learner.zero_variance_groups",),
        rules.redraw,
        "with estimators that compare the members of a group",
    ),
)

_ARGUMENTS = ("reward_model.reward_kwargs", "reward.reward_kwargs")  # of older and newer versions
_BUFFERS = ("reward_model.overlong_buffer", *(f"{each}.overlong_buffer_cfg" for each in _ARGUMENTS))


def _overlong(buffer: str) -> Iterator[Rule]:
    yield Derived(
        f"{buffer}.enable",
        ("learner.overlong_max_tokens", "learner.overlong_buffer_tokens"),
        rules.overlong(buffer),
        "with its length and `data.max_response_length`",
    )
    yield from where(
        is_on(f"{buffer}.enable"),
        f"{buffer.rpartition('.')[2]}.enable is off",
        read_with(f"{buffer}.len", "enable"),
    )
    yield Refused(f"{buffer}.penalty_factor", "the penalty rises to 1", (1.0,))


def _reward_model(section: str, path: str) -> Iterator[Rule]:
    yield Derived(
        f"{section}.enable", ("reward.reward_pretrain",), rules.reward_model(path), "with its model"
    )
    yield from where(
        is_on(f"{section}.enable"), f"{section}.enable is off", read_with(path, f"{section}.enable")
    )


_REWARD: tuple[Rule, ...] = (
    *(rule for buffer in _BUFFERS for rule in _overlong(buffer)),
    *(
        repeats(f"{each}.max_resp_len", "data.max_response_length", "replies have one bound")
        for each in _ARGUMENTS
    ),
    *_reward_model("reward_model", "reward_model.model.path"),
    *_reward_model("reward.reward_model", "reward.reward_model.model_path"),
    *(
        Refused(name, "say what scores replies under reward.rewards", ("naive", "dapo"))
        for name in ("reward_model.reward_manager", "reward.reward_manager.name")
    ),
    Refused("custom_reward_function", _FUNCTION),
    Refused("reward.custom_reward_function", _FUNCTION),
)

# Source: `_generated_ppo_trainer.yaml` and `OptimizerConfig` of verl; only where our default differs.
_DEFAULTS = (
    Default("data.train_batch_size", 1024),
    Default("data.max_prompt_length", 512),
    Default("data.max_response_length", 512),
    Default(f"{MODEL}.enable_gradient_checkpointing", True),
    Default(f"{ACTOR}.ppo_mini_batch_size", 256),
    Default(f"{ACTOR}.clip_ratio_c", 3.0),
    Default(f"{ACTOR}.policy_loss.kl_cov_ratio", 2e-4),
    Default(f"{ACTOR}.policy_loss.ppo_kl_coef", 0.1),
    Default(f"{ACTOR}.optim.weight_decay", 0.01),
    Default(f"{ACTOR}.optim.betas", [0.9, 0.999]),
    Default(f"{ROLLOUT}.n", 1),
    Default(f"{ROLLOUT}.dtype", "bfloat16"),
    Default(f"{ROLLOUT}.gpu_memory_utilization", 0.5),
    Default(f"{ROLLOUT}.max_num_batched_tokens", 8192),
    Default(f"{ROLLOUT}.val_kwargs.temperature", 0.0),
    Default("algorithm.adv_estimator", "gae"),
    Default("algorithm.lam", 1.0),
    Default("critic.cliprange_value", 0.5),
    Default("critic.optim.lr", 1e-5),
    Default("critic.optim.weight_decay", 0.01),
    Default("critic.optim.betas", [0.9, 0.999]),
    Default(
        "trainer.total_epochs",
        30,
        unless=("trainer.total_training_steps", "rollout.total_rollout_steps"),
    ),
    Default(f"{placement.ASYNC}.staleness_threshold", 0.1, within=placement.ASYNC),
    Default("trainer.project_name", "verl_examples"),
    Default("trainer.save_freq", -1),
    Default("trainer.test_freq", -1),
)

VERL = System(
    "verl",
    "verl",
    (*_TRAINER, *_DATA, *ACTOR_AND_REFERENCE, *_ROLLOUT, *_ALGORITHM, *CRITIC, *_REWARD),
    _DEFAULTS,
    NOT_CORRECTED | SYNCHRONOUS,
    (  # how work is cut, where memory lies, and what is printed
        "hydra",
        "*.log_prob_micro_batch_size*",
        "*.log_prob_use_dynamic_bsz",
        "*.log_prob_max_token_len_per_gpu",
        "*.use_torch_compile",
        "*.entropy_from_logits_with_chunking",
        "*.checkpoint_engine.*",
        "actor_rollout_ref.nccl_timeout",
        "*.micro_batch_size_per_gpu",
        "critic.*micro_batch_size*",
        "critic.*max_token_len_per_gpu",
        "critic.model.fsdp_config.*",
        "critic.fsdp.*",
        f"{ACTOR}.fsdp_config.*",
        f"{ACTOR}.megatron.*_offload",
        f"{MODEL}.use_fused_kernels",
        f"{MODEL}.use_shm",
        f"{MODEL}.enable_activation_offload",
        f"{MODEL}.lora.merge",
        "actor_rollout_ref.ref.megatron.*",
        "actor_rollout_ref.ref.fsdp_config.*",
        f"{ROLLOUT}.calculate_log_probs",  # engines always report them
        f"{ROLLOUT}.disable_log_stats",
        f"{ROLLOUT}.enable_chunked_prefill",
        f"{ROLLOUT}.enable_prefix_caching",
        f"{ROLLOUT}.enforce_eager",
        f"{ROLLOUT}.free_cache_engine",
        f"{ROLLOUT}.layered_summon",
        f"{ROLLOUT}.load_format",
        f"{ROLLOUT}.mode",
        "data.gen_batch_size",
        "data.return_raw_chat",
        "data.*_workers",
        "ray_kwargs.ray_init.runtime_env.*",
        "*.overlong_buffer*.log",
        "reward.num_workers",
        "trainer.balance_batch",
        "trainer.log_val_generations",
        "trainer.device",
        "trainer.max_critic_ckpt_to_keep",
    ),
    differs={
        f"{placement.ASYNC}.trigger_parameter_sync_step": "there each local update is a step of the "
        "learning rate's schedule and compares with the weights at its own start; here the updates "
        "between two publications are mini-batches of one step",
    },
)
