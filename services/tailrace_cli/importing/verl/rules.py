"""What settings of verl mean here where a name alone does not say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings.setting import Lookup, choice
from tailrace_cli.importing import words
from tailrace_cli.importing.rules import NoEffectError
from tailrace_learner.config_registry import ESTIMATORS

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

has_critic = words.estimates_values("algorithm.adv_estimator")
_ESTIMATORS = choice(
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo"
)
_DISCOUNTED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_LOSSES = choice("gspo", "clip_cov", "kl_cov", "cispo", "sapo", geo_mean="gmpo", gpg="vanilla_pg")
_WRITTEN_ANYWAY = ("console", "file")


def updates(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Rows of an update are prompts, as those of a step."""
    groups = lookup("data.train_batch_size")
    rows = words.whole(rows, 1)
    if not groups or groups % rows:
        raise ValueError(f"does not divide data.train_batch_size ({groups})")
    return {"learner.num_mini_batches": int(groups) // rows}


def row_budget(rows: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Rows of a pass, each as long as it may become."""
    if lookup(f"{ACTOR}.use_dynamic_bsz"):
        raise NoEffectError("use_dynamic_bsz packs passes by tokens")
    length = lookup("data.max_prompt_length", 0) + lookup("data.max_response_length", 0)
    if not length:
        raise ValueError("rows of unknown length: passes are packed by tokens here")
    tokens = rows * length
    return {
        "learner.max_tokens_per_micro_batch": tokens,
        "learner.min_tokens_per_micro_batch": min(tokens, 1024),
    }


def tensor_parallel(size: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Ranks that share layers; as many of them as one group needs."""
    if lookup("learner.strategy_args.strategy_name") != "megatron":
        raise NoEffectError(words.NO_CUT)
    strategy = "learner.strategy_args"
    if lookup(f"{strategy}.num_ranks", size) % size:
        raise ValueError("does not divide trainer.n_gpus_per_node, on each of which a rank computes")
    ranks = lookup(f"{strategy}.num_ranks", size)
    return {f"{strategy}.tensor_parallel_size": size, f"{strategy}.num_ranks": ranks}


def gpus(count: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """A rank and an engine on every GPU, since both roles share all of them."""
    count = words.whole(count, 0, 1024)
    ours: dict[str, Any] = {"cluster.num_gpus_per_node": count}
    if count < 2:
        return ours
    return ours | {
        "learner.strategy_args.num_ranks": count,
        "cluster.num_inference_servers": count,
        "cluster.learner_gpus": list(range(count)),
        "cluster.inference_gpus": list(range(count)),
    }


def longest(prompt: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Prompt and reply together."""
    both = prompt + lookup("data.max_response_length", 0)
    room = lookup(f"{ROLLOUT}.max_model_len", both)
    return {"agents.max_episode_tokens": both, "inference.max_model_len": room}


def estimator(name: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """With what it needs beside it."""
    ours: dict[str, Any] = {"learner.adv_estimator": _ESTIMATORS(name)}
    if name == "remax":
        ours["agents.greedy_baseline"] = True
    if name == "gae":
        ours["learner.critic"] = {}
    return ours


def correction(level: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Weights for tokens that another policy sampled."""
    weights = {"learner.behaviour_correction": "tis"}
    return weights | {"learner.correction_level": choice("token", "sequence")(level)}


def corrects(lookup: Lookup) -> bool:
    """Whether there are such weights."""
    return lookup("algorithm.rollout_correction.rollout_is") is not None


def is_grpo(lookup: Lookup) -> bool:
    """Whether the deviation can be left out."""
    return bool(lookup("algorithm.adv_estimator") == "grpo")


def discounts(lookup: Lookup) -> bool:
    """Whether the discount has a meaning, or is none."""
    is_none = bool(lookup("algorithm.gamma") == 1.0)
    return is_none or lookup("algorithm.adv_estimator") in _DISCOUNTED


def redraw(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Groups of equal returns, where they teach nothing."""
    name = lookup("algorithm.adv_estimator", "grpo")
    if used and not (name in ESTIMATORS and ESTIMATORS[name].compares_group):
        raise ValueError(f"{name} learns from groups of equal returns too: here they are never redrawn")
    return {"learner.zero_variance_groups": "redraw" if used else "skip"}


def loss(mode: Any, lookup: Lookup) -> Mapping[str, Any]:
    """By mode; `vanilla` by its clips."""
    if mode == "vanilla":
        return by_clips(lookup)
    return {"learner.loss": _LOSSES(mode)}


def by_clips(lookup: Lookup) -> Mapping[str, Any]:
    """`dapo` where the ratio is followed further above 1 than below."""
    low, high = _clips(lookup)
    if low == high:
        return {"learner.loss": "ppo_clip", "learner.pg_clip": low}
    return {"learner.loss": "dapo", "learner.pg_clip": low, "learner.pg_clip_high": high}


def _clips(lookup: Lookup) -> tuple[float, float]:
    both = lookup(f"{ACTOR}.clip_ratio", 0.2)
    return lookup(f"{ACTOR}.clip_ratio_low", both), lookup(f"{ACTOR}.clip_ratio_high", both)


def clip_both(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Overruled where both sides have a clip of their own."""
    if None not in (lookup(f"{ACTOR}.clip_ratio_low"), lookup(f"{ACTOR}.clip_ratio_high")):
        raise NoEffectError("clip_ratio_low and clip_ratio_high say it")
    return clip(value, lookup)


def clip(_value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clips of `vanilla`, and those of sequences."""
    mode = lookup(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode == "gspo":
        low, high = _clips(lookup)
        return {"learner.gspo_clip": low, "learner.gspo_clip_high": high}
    if mode != "vanilla":
        raise ValueError(f"the clips of {mode} have keys of their own under `learner`")
    return by_clips(lookup)


def kl_in_loss(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The divergence in the loss."""
    coefficient = lookup(f"{ACTOR}.kl_loss_coef", 0.001)
    return {"learner.init_kl_coef": coefficient, "learner.kl_in": "loss"} if used else {}


def kl_in_reward(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The divergence in rewards, with a fixed or adaptive weight."""
    if not used:
        return {}
    ours: dict[str, Any] = {
        "learner.init_kl_coef": lookup("algorithm.kl_ctrl.kl_coef", 0.001),
        "learner.kl_in": "reward",
        "learner.kl_estimator": words.kl_estimator(lookup("algorithm.kl_penalty", "kl")),
    }
    if lookup("algorithm.kl_ctrl.type") == "adaptive":
        ours["learner.target_kl"] = lookup("algorithm.kl_ctrl.target_kl", 0.1)
        ours["learner.kl_horizon"] = lookup("algorithm.kl_ctrl.horizon", 10_000)
    return ours


def is_vanilla(lookup: Lookup) -> bool:
    """Whether the loss has clips and a bound for negative advantages."""
    return bool(lookup(f"{ACTOR}.policy_loss.loss_mode", "vanilla") == "vanilla")


def trackers(names: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Some of several, or one by its name alone."""
    given = [names] if isinstance(names, str) else list(names)
    project = lookup("trainer.project_name", lookup("trainer.experiment_name"))
    return words.trackers(given, project, _WRITTEN_ANYWAY)


def uses_wandb(lookup: Lookup) -> bool:
    """Whether anything has a project."""
    return "wandb" in (lookup("trainer.logger") or ())


def penalizes(lookup: Lookup) -> bool:
    """Whether the divergence is subtracted from rewards."""
    return bool(lookup("algorithm.use_kl_in_reward"))


def adapts(lookup: Lookup) -> bool:
    """Whether its weight is steered."""
    return penalizes(lookup) and lookup("algorithm.kl_ctrl.type") == "adaptive"


def has_adapters(lookup: Lookup) -> bool:
    """Whether adapters are trained."""
    return bool(lookup(f"{MODEL}.lora_rank"))


def lora(rank: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Adapters."""
    if not rank:
        return {}
    layers = lookup(f"{MODEL}.target_modules", "all-linear")
    return {
        "learner.lora.r": rank,
        "learner.lora.alpha": float(lookup(f"{MODEL}.lora_alpha", 16)),
        "learner.lora.target_modules": [layers] if isinstance(layers, str) else list(layers),
    }


def loop(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The agent loop of all data sets."""
    names = [*lookup("scheduler.tags", ()), *lookup("scheduler.eval_tags", ())]
    return {f"agents.datasets.{name}.agent_name": "tool_agent" for name in names} if used else {}


def critic_path(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weights of its own."""
    is_copy = path == lookup(f"{MODEL}.path")
    return {} if is_copy or not has_critic(lookup) else {"learner.critic.pretrain": path}


def overlong(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """A penalty for the last tokens before the longest reply."""
    if not used:
        return {}
    longest, buffer = lookup("data.max_response_length"), lookup("reward_model.overlong_buffer.len")
    if not longest or not buffer:
        raise ValueError("needs data.max_response_length and the length of the buffer")
    return {"learner.overlong_max_tokens": longest, "learner.overlong_buffer_tokens": buffer}


def reward_model(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Its directory."""
    path = lookup("reward_model.model.path")
    if used and not path:
        raise ValueError("reward_model.model.path does not say which")
    return {"reward.reward_pretrain": path} if used else {}
