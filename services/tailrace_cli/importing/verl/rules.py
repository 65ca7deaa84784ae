"""Rules of verl whose result depends on further settings."""

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.settings import Lookup, NoEffectError, value_names
from tailrace.config.settings.values import whole_number
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.rules import is_gae, is_on, listed
from tailrace_learner.config_registry import ESTIMATORS

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

PARALLEL = ("inference.tensor_parallel_size", "inference.pipeline_parallel_size")

has_critic = is_gae("algorithm.adv_estimator")
penalizes = is_on("algorithm.use_kl_in_reward")
_ESTIMATORS = value_names(
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo"
)
_DISCOUNTED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_LOSSES = value_names("gspo", "clip_cov", "kl_cov", "cispo", "sapo", geo_mean="gmpo", gpg="vanilla_pg")
tool_parser = value_names("hermes", "qwen3_coder", **{"gpt-oss": "gpt_oss"})
_WRITTEN_ANYWAY = ("console", "file")


def updates(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Number of updates of a step; verl counts the rows of both in prompts."""
    groups = lookup("data.train_batch_size")
    rows = whole_number(rows)
    if not groups or groups % rows:
        raise ValueError(f"does not divide data.train_batch_size ({groups})")
    return {"learner.num_mini_batches": int(groups) // rows}


def row_budget(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Tokens of a pass: its rows, each as long as a row may become."""
    if lookup(f"{ACTOR}.use_dynamic_bsz"):
        raise NoEffectError("use_dynamic_bsz packs passes by tokens")
    length = lookup("data.max_prompt_length", 0) + lookup("data.max_response_length", 0)
    if not length:
        raise ValueError("rows of unknown length: passes are packed by tokens here")
    return names.pass_bounds(rows * length)


def tensor_parallel(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Ranks that share layers; without a number of ranks, one group of them."""
    if lookup("learner.strategy_args.strategy_name") != "megatron":
        raise NoEffectError(names.NO_CUT)
    strategy = "learner.strategy_args"
    if lookup(f"{strategy}.num_ranks", size) % size:
        raise ValueError("does not divide trainer.n_gpus_per_node, on each of which a rank computes")
    ranks = lookup(f"{strategy}.num_ranks", size)
    return {f"{strategy}.tensor_parallel_size": size, f"{strategy}.num_ranks": ranks}


def cut_engine(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """GPUs that share the layers of an engine."""
    return _of_engine(PARALLEL[0], size, lookup)


def stages(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Stages of an engine."""
    return _of_engine(PARALLEL[1], size, lookup)


def _of_engine(key: str, size: Any, lookup: Lookup) -> Mapping[str, Any]:
    if lookup("inference.engine", "torch") == "torch":
        raise NoEffectError(f"the engine {lookup(f'{ROLLOUT}.name', 'hf')} is not cut")
    return {key: whole_number(size)}


def gpus(count: Any, lookup: Lookup) -> Mapping[str, Any]:
    """A rank on every GPU, and engines on all of them, which both roles share."""
    count = whole_number(count, 0, 1024)
    ours: dict[str, Any] = {"cluster.num_gpus_per_node": count}
    total = count * whole_number(lookup("trainer.nnodes", 1))
    if total < 2:
        return ours
    size = 1
    if lookup("inference.engine", "torch") != "torch":
        for name in ("tensor", "pipeline"):
            size *= whole_number(lookup(f"{ROLLOUT}.{name}_model_parallel_size", 1))
    if count % size:
        raise ValueError(f"is no multiple of the {size} GPUs of one engine")
    return ours | {
        "colocated": True,
        "learner.strategy_args.num_ranks": total,
        "cluster.num_inference_servers": total // size,
        "cluster.learner_gpus": list(range(total)),
        "cluster.inference_gpus": list(range(total)),
    }


def longest(prompt: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Length of prompt and reply together."""
    both = prompt + lookup("data.max_response_length", 0)
    room = lookup(f"{ROLLOUT}.max_model_len", both)
    return {"agents.max_episode_tokens": both, "inference.max_model_len": room}


def estimator(name: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """The estimator, with the keys that it needs."""
    ours: dict[str, Any] = {"learner.adv_estimator": _ESTIMATORS(name)}
    if name == "remax":
        ours["agents.greedy_baseline"] = True
    if name == "gae":
        ours["learner.critic"] = {}
    return ours


def correction(level: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Weights for tokens that another policy sampled, and their level."""
    weights = {"learner.behaviour_correction": "tis"}
    return weights | {"learner.correction_level": value_names("token", "sequence")(level)}


def corrects(lookup: Lookup) -> bool:
    """Holds if tokens have such weights."""
    return lookup("algorithm.rollout_correction.rollout_is") is not None


def is_grpo(lookup: Lookup) -> bool:
    """Holds for the estimator that can leave out the deviation."""
    return bool(lookup("algorithm.adv_estimator") == "grpo")


def discounts(lookup: Lookup) -> bool:
    """Holds if the estimator discounts, or the discount is 1."""
    is_none = bool(lookup("algorithm.gamma") == 1.0)
    return is_none or lookup("algorithm.adv_estimator") in _DISCOUNTED


def redraw(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Treatment of groups with equal returns, if they give no learning signal."""
    name = lookup("algorithm.adv_estimator", "grpo")
    if used and not (name in ESTIMATORS and ESTIMATORS[name].compares_group):
        raise ValueError(f"{name} learns from groups of equal returns too: here they are never redrawn")
    return {"learner.zero_variance_groups": "redraw" if used else "count"}


def loss(mode: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The loss by its mode; `vanilla` by its clips."""
    if mode == "vanilla":
        return by_clips(lookup)
    return {"learner.loss": _LOSSES(mode)}


def by_clips(lookup: Lookup) -> Mapping[str, Any]:
    """The loss `dapo` if the clip above 1 differs from the clip below, else `ppo_clip`."""
    low, high = _clips(lookup)
    if low == high:
        return {"learner.loss": "ppo_clip", "learner.pg_clip": low}
    return {"learner.loss": "dapo", "learner.pg_clip": low, "learner.pg_clip_high": high}


def _clips(lookup: Lookup) -> tuple[float, float]:
    both = lookup(f"{ACTOR}.clip_ratio", 0.2)
    return lookup(f"{ACTOR}.clip_ratio_low", both), lookup(f"{ACTOR}.clip_ratio_high", both)


def clip_both(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clip of both sides, unless each side has its own."""
    if None not in (lookup(f"{ACTOR}.clip_ratio_low"), lookup(f"{ACTOR}.clip_ratio_high")):
        raise NoEffectError("clip_ratio_low and clip_ratio_high replace it")
    return clip(value, lookup)


def clip(_value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clips of `vanilla` and of `gspo`."""
    mode = lookup(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode == "gspo":
        low, high = _clips(lookup)
        return {"learner.gspo_clip": low, "learner.gspo_clip_high": high}
    if mode != "vanilla":
        raise ValueError(f"the clips of {mode} have keys of their own under `learner`")
    return by_clips(lookup)


def kl_in_loss(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in the loss."""
    coefficient = lookup(f"{ACTOR}.kl_loss_coef", 0.001)
    return {"learner.init_kl_coef": coefficient, "learner.kl_in": "loss"} if used else {}


def kl_in_reward(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in rewards, with a fixed or adaptive weight."""
    if not used:
        return {}
    ours: dict[str, Any] = {
        "learner.init_kl_coef": lookup("algorithm.kl_ctrl.kl_coef", 0.001),
        "learner.kl_in": "reward",
        "learner.kl_estimator": names.kl_estimator(lookup("algorithm.kl_penalty", "kl")),
    }
    if lookup("algorithm.kl_ctrl.type") == "adaptive":
        ours["learner.target_kl"] = lookup("algorithm.kl_ctrl.target_kl", 0.1)
        ours["learner.kl_horizon"] = lookup("algorithm.kl_ctrl.horizon", 10_000)
    return ours


def has_reference(lookup: Lookup) -> bool:
    """Holds if a divergence is computed, in the loss or in rewards."""
    return bool(lookup(f"{ACTOR}.use_kl_loss")) or penalizes(lookup)


def is_vanilla(lookup: Lookup) -> bool:
    """Holds for the loss with clips and a bound for negative advantages."""
    return bool(lookup(f"{ACTOR}.policy_loss.loss_mode", "vanilla") == "vanilla")


def trackers(given: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Trackers: a list of names, or one name."""
    project = lookup("trainer.project_name", lookup("trainer.experiment_name"))
    return names.trackers(listed(given), project, _WRITTEN_ANYWAY)


def uses_project(lookup: Lookup) -> bool:
    """Holds if a tracker has projects."""
    given = listed(lookup("trainer.logger") or ())
    return any(name in given for name in ("wandb", "mlflow", "trackio"))


def adapts(lookup: Lookup) -> bool:
    """Holds if the weight of the divergence adapts."""
    return penalizes(lookup) and lookup("algorithm.kl_ctrl.type") == "adaptive"


def lora(rank: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Adapters, with their scale and layers."""
    if not rank:
        return {}
    layers = lookup(f"{MODEL}.target_modules", "all-linear")
    return {
        "learner.lora.r": rank,
        "learner.lora.alpha": float(lookup(f"{MODEL}.lora_alpha", 16)),
        "learner.lora.target_modules": listed(layers),
    }


def loop(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Agent loop of all data sets."""
    tags = [*lookup("scheduler.tags", ()), *lookup("scheduler.eval_tags", ())]
    return {f"agents.datasets.{tag}.agent_name": "tool_agent" for tag in tags} if used else {}


def eval_sampling(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Checks that evaluations without sampling have the temperature 0, which alone counts here."""
    if not used and lookup(f"{ROLLOUT}.val_kwargs.temperature"):
        raise ValueError(
            "val_kwargs.temperature is not 0, with which some versions sample all the same"
        )
    raise NoEffectError("the temperature alone counts")


def critic_path(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weights of the critic, if they are not the policy's."""
    is_copy = path == lookup(f"{MODEL}.path")
    return {} if is_copy or not has_critic(lookup) else {"learner.critic.pretrain": path}


Derive = Callable[[Any, Lookup], Mapping[str, Any]]


def overlong(section: str) -> Derive:
    """Penalty for the last tokens before the longest reply, by the buffer in `section`."""

    def derive(used: Any, lookup: Lookup) -> Mapping[str, Any]:
        if not used:
            return {}
        longest, buffer = lookup("data.max_response_length"), lookup(f"{section}.len")
        if not longest or not buffer:
            raise ValueError("needs data.max_response_length and the length of the buffer")
        return {"learner.overlong_max_tokens": longest, "learner.overlong_buffer_tokens": buffer}

    return derive


def reward_model(name: str) -> Derive:
    """Directory of the reward model, in the setting `name`."""

    def derive(used: Any, lookup: Lookup) -> Mapping[str, Any]:
        path = lookup(name)
        if used and not path:
            raise ValueError(f"{name} names no model")
        return {"reward.reward_pretrain": path} if used else {}

    return derive
