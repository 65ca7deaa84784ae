"""What settings of AReaL mean here where a name alone does not say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tailrace.config.settings.setting import Lookup, choice
from tailrace_cli.importing import words
from tailrace_cli.importing.rules import run_name

NO_CRITIC = "there is no critic, and gae alone looks ahead by values"
_CHOICES_OF_LOSS = {"learner.behaviour_correction": "none"}
_DISCOUNTED = ("gae", "reinforce", "reinforce_plus_plus")
_SIZES = r"(?:[dtpce]\d+)+"
_PLAN = re.compile(rf"(?:[a-z]+[:.])?({_SIZES})(?:\+(?:([a-z]+)[:.])?({_SIZES}))?")
_STRATEGY = "learner.strategy_args"

strategy = choice("megatron", fsdp="fsdp2")
_MODES = choice("online", "offline")
proximal = choice("recompute", loglinear="interpolate")


def name(experiment: Any, lookup: Lookup) -> Mapping[str, Any]:
    """One name of the experiment's and the trial's."""
    trial = lookup("trial_name")
    return {"exp_name": run_name(f"{experiment}_{trial}" if trial else experiment)}


def longest(prompt: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Prompt and reply together."""
    return {"agents.max_episode_tokens": prompt + lookup("gconfig.max_new_tokens", 0)}


def tracker(mode: Any, lookup: Lookup) -> Mapping[str, Any]:
    """W&B, whose project is the experiment's name unless it has one."""
    if mode == "disabled":
        return {}
    project = lookup("stats_logger.wandb.project", lookup("experiment_name"))
    return {"learner.wandb.project": str(project), "learner.wandb.mode": _MODES(mode)}


def allocation(plan: Any, lookup: Lookup) -> Mapping[str, Any]:
    """`sglang:d4t1p1+d2t1p1`: engines and ranks that share the work; others are refused.

    With `megatron` ranks may share layers too: `sglang:d4+megatron:d2t2`.
    """
    found = _PLAN.fullmatch(str(plan))
    if not found:
        raise ValueError("expected engines and ranks, like sglang:d4+d4")
    engines, backend, ranks = found.groups()
    cuts = "megatron" in (backend, lookup(f"{_STRATEGY}.strategy_name"))
    num_engines, _ = _sizes(engines, "d")
    num_groups, size = _sizes(ranks or "d1", "dt" if cuts else "d")
    ours = {
        "cluster.num_inference_servers": num_engines,
        f"{_STRATEGY}.num_ranks": num_groups * size,
    }
    if not cuts:
        return ours
    of_cut = {f"{_STRATEGY}.strategy_name": "megatron", f"{_STRATEGY}.tensor_parallel_size": size}
    return {**ours, **of_cut}


def _sizes(part: str, allowed: str) -> tuple[int, int]:
    """How many share the work, and how many of them share layers."""
    sizes = {kind: int(size) for kind, size in re.findall(r"([dtpce])(\d+)", part)}
    if any(size != 1 for kind, size in sizes.items() if kind not in allowed):
        raise ValueError(f"{part}: {words.PARALLEL}")
    return sizes.get("d", 1), sizes.get("t", 1)


def top_k(value: Any) -> int:
    """More than any vocabulary has is "from all"."""
    return 0 if value >= 1_000_000 else words.all_or(value)


def tokens_of_a_pass(tokens: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Bounds of a pass."""
    return {
        "learner.max_tokens_per_micro_batch": tokens,
        "learner.min_tokens_per_micro_batch": min(tokens, 1024),
    }


def _repeats(key: str, what: str) -> Any:
    def check(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        if lookup(key, value) != value:
            raise ValueError(f"differs from {key}: {what}")
        return {}

    return check


same_model = _repeats("actor.path", "a run has one policy, with its own tokenizer")
same_group = _repeats("gconfig.n_samples", "a group has one size")
same_temperature = _repeats("gconfig.temperature", "log-probabilities are taken at the temperature")
same_dtype = _repeats("actor.dtype", "it computes as the policy does")


def decoupled(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """The loss that weighs tokens by the policy that sampled them."""
    return {"learner.loss": "decoupled_ppo", **_CHOICES_OF_LOSS} if used else {}


def level(value: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Ratios of tokens or of whole rows."""
    return choice(token={}, sequence={"learner.loss": "gspo"})(value)  # type: ignore[no-any-return]


def sapo(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Gates instead of clips."""
    return {"learner.loss": "sapo"} if used else {}


def m2po(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Tokens are left out by the second moment of their log-ratios."""
    return {"learner.loss": "m2po", **_CHOICES_OF_LOSS} if used else {}


def clip(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """How far below 1, and alone above it too."""
    if lookup("learner.loss") == "gspo":
        high = lookup("actor.eps_clip_higher", value)
        return {"learner.gspo_clip": value, "learner.gspo_clip_high": high}
    return {"learner.pg_clip": value}


def clip_higher(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """How far above 1, which only some losses let differ."""
    loss = lookup("learner.loss")
    if loss == "gspo":
        return {}
    if loss is not None:
        raise ValueError(f"loss {loss} follows ratios as far above 1 as below")
    return {"learner.loss": "dapo", "learner.pg_clip_high": value}


def recomputes(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """False is possible with interpolated log-probabilities only."""
    if not used and lookup("actor.prox_logp_method") != "loglinear":
        raise ValueError(
            "losses compare with the policy at a step's start: recompute or interpolate it"
        )
    return {}


def kl(coefficient: Any, lookup: Lookup) -> Mapping[str, Any]:
    """In the reward, for estimators that know rewards of tokens."""
    if not coefficient:
        return {}
    where = "reward" if has_critic(lookup) else "loss"
    return {"learner.init_kl_coef": coefficient, "learner.kl_in": where}


def has_critic(lookup: Lookup) -> bool:
    """Whether there is a critic."""
    return lookup("critic.path") is not None


def discount(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Read where an estimator discounts; 1 is no discount."""
    if value != 1 and not has_critic(lookup):
        raise ValueError("estimators that compare the members of a group do not discount")
    return {"learner.gamma": float(value)} if has_critic(lookup) else {}


def critic(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """A critic of its own; a copy of the policy where the paths are the same."""
    own = {} if path == lookup("actor.path") else {"learner.critic.pretrain": path}
    return {"learner.adv_estimator": "gae", "learner.critic": {}} | own


def reference(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weights other than those at the run's start."""
    if path == lookup("actor.path"):
        return {}
    if not lookup("actor.kl_ctl"):
        raise ValueError(words.NO_KL)
    return {"learner.reference.pretrain": path}


def reward_norm(norm: Any, lookup: Lookup) -> Mapping[str, Any]:
    """How rewards are compared is the estimator, unless there is a critic."""
    mean, std = _levels(norm)
    if has_critic(lookup):
        if mean or std:
            raise ValueError("with a critic rewards are not compared with each other")
        return {}
    if norm.get("mean_leave1out"):
        return {"learner.adv_estimator": "rloo"}
    if mean != "group" or std not in ("group", None):
        raise ValueError(
            "rewards are compared within their group: mean_level group, std_level group or none"
        )
    return {"learner.adv_estimator": "grpo", "learner.norm_std": std == "group"}


def adv_norm(norm: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Over the batch it is whitening; within groups it is how rewards are compared."""
    mean, std = _levels(norm)
    if mean == "group" and lookup("actor.reward_norm") is None:
        return reward_norm(norm, lookup)
    if (mean, std) == ("batch", "batch"):
        return {"learner.whiten_advantages": True}
    if mean or std:
        raise ValueError("advantages are whitened over the batch by mean and deviation, or not at all")
    return {}


def group_norm(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The older key for the same."""
    return reward_norm({"mean_level": "group", "std_level": "group"}, lookup) if used else {}


def _levels(norm: Any) -> tuple[str | None, str | None]:
    def level_of(key: str) -> str | None:
        value = norm.get(key) if isinstance(norm, Mapping) else None
        return None if value in (None, "none", "null") else str(value)

    return level_of("mean_level"), level_of("std_level")
