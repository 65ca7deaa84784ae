"""Rules of AReaL whose result depends on further settings."""

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.settings import Derived, Lookup, NoEffectError, value_names
from tailrace.config.settings.values import whole_number, whole_number_at
from tailrace_cli.importing import value_names as names
from tailrace_cli.importing.rules import run_name

_NORMS = ("reward_norm", "group_reward_norm")
_TOKEN_REWARDED = ("gae", "reinforce")
_MODES = value_names("online", "offline")
proximal = value_names("recompute", loglinear="interpolate")


def name(experiment: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Name of the run, from experiment and trial."""
    trial = lookup("trial_name")
    return {"exp_name": run_name(f"{experiment}_{trial}" if trial else experiment)}


def sampled(key: str, ours: tuple[str, ...], of_evaluation: str, by: Callable[[Any], Any]) -> Derived:
    """Sampling of training episodes, and of evaluations unless they have their own."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        keys = ours if lookup("eval_gconfig") is not None else (*ours, of_evaluation)
        return dict.fromkeys(keys, by(value))

    return Derived(f"gconfig.{key}", (*ours, of_evaluation), derive, "of evaluations by `eval_gconfig`")


def overlong(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Penalty for the last tokens before the longest reply."""
    if not used:
        return {}
    longest_reply = lookup("actor.max_new_tokens", lookup("gconfig.max_new_tokens"))
    tokens = lookup("actor.overlong_tokens")
    if not longest_reply or not tokens:
        raise ValueError("needs actor.overlong_tokens and gconfig.max_new_tokens")
    return {"learner.overlong_max_tokens": longest_reply, "learner.overlong_buffer_tokens": tokens}


def lora(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Adapters, with their scale and layers."""
    if not used:
        return {}
    return {
        "learner.lora.r": lookup("actor.lora_rank", 32),
        "learner.lora.alpha": float(lookup("actor.lora_alpha", 16)),
        "learner.lora.target_modules": names.layers(lookup("actor.target_modules") or "all-linear"),
    }


def longest(prompt: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Length of prompt and reply together."""
    return {"agents.max_episode_tokens": prompt + lookup("gconfig.max_new_tokens", 0)}


def tracker(mode: Any, lookup: Lookup) -> Mapping[str, Any]:
    """W&B, whose project is the experiment's name unless it has one."""
    if mode == "disabled":
        return {}
    project = lookup("stats_logger.wandb.project", lookup("experiment_name"))
    return {"learner.wandb.project": str(project), "learner.wandb.mode": _MODES(mode)}


def top_k(value: Any) -> int:
    """0, "from all", for a number above the size of any vocabulary."""
    return 0 if value >= 1_000_000 else names.not_negative(value)


def tokens_of_a_pass(tokens: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Bounds of a pass."""
    return names.pass_bounds(tokens)


def prompts_at_once(prompts: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Episodes at once: a group of episodes for each prompt."""
    return {
        "agents.max_concurrent_episodes": whole_number(prompts)
        * whole_number_at("gconfig.n_samples", lookup, 1)
    }


def kl(coefficient: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Divergence in the rewards of tokens, which only some estimators have."""
    if not coefficient:
        return {}
    estimator = _estimator(lookup)
    if estimator not in _TOKEN_REWARDED:
        raise ValueError(
            f"subtracted from the rewards of tokens, which {estimator or 'our estimator'} has not: "
            "learner.init_kl_coef with learner.kl_in loss holds the policy near in another way"
        )
    return {
        "learner.adv_estimator": estimator,
        "learner.init_kl_coef": coefficient,
        "learner.kl_in": "reward",
    }


def kl_estimator(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Estimator of the divergence."""
    _check_kl(lookup)
    return {"learner.kl_estimator": names.kl_estimator(name)}


def _check_kl(lookup: Lookup) -> None:
    if lookup("learner.init_kl_coef"):
        return
    if lookup("actor.kl_ctl"):
        raise ValueError("read with actor.kl_ctl, which is not mapped")
    raise NoEffectError(names.NO_KL)


def has_critic(lookup: Lookup) -> bool:
    """Holds if there is a critic."""
    return lookup("critic.path") is not None


def discount(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Discount per token; without values, `gae_lambda` is part of it."""
    if has_critic(lookup):
        return {"learner.gamma": float(value)}
    return _without_values(float(value) * float(lookup("actor.gae_lambda", 1.0)), lookup)


def gae_lambda(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weight of what follows the next value; without values, a discount."""
    if has_critic(lookup):
        return {"learner.lambd": float(value)}
    return _without_values(float(value) * float(lookup("actor.discount", 1.0)), lookup)


def _without_values(gamma: float, lookup: Lookup) -> Mapping[str, Any]:
    estimator = _estimator(lookup)
    if estimator == "reinforce":
        return {"learner.adv_estimator": estimator} | ({} if gamma == 1 else {"learner.gamma": gamma})
    if gamma != 1:
        raise ValueError("estimators that compare the members of a group do not discount")
    return {}


def _estimator(lookup: Lookup) -> str | None:
    """`reinforce` if nothing compares rewards; None if the comparison is not mapped."""
    found: str | None = lookup("learner.adv_estimator")
    if found is None and not any(lookup(f"actor.{norm}") for norm in _NORMS):
        return "reinforce"
    return found


def critic(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The critic; a copy of the policy if the paths are the same."""
    own = {} if path == lookup("actor.path") else {"learner.critic.pretrain": path}
    return {"learner.adv_estimator": "gae", "learner.critic": {}} | own


def reference(path: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Weights of the reference, if they are not those at the run's start."""
    if path == lookup("actor.path"):
        return {}
    _check_kl(lookup)
    return {"learner.reference.pretrain": path}


def reward_norm(norm: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The estimator, by the comparison of rewards, unless there is a critic."""
    mean, std = _levels(norm)
    if has_critic(lookup):
        if mean or std:
            raise ValueError("with a critic rewards are not compared with each other")
        return {}
    if not isinstance(norm, Mapping) or mean != "group" or std not in ("group", None):
        raise ValueError(
            "rewards are compared within their group: mean_level group, std_level group or none"
        )
    _check_group_size(norm.get("group_size"), lookup("gconfig.n_samples"))
    if norm.get("mean_leave1out"):
        return {"learner.adv_estimator": "rloo"}
    return {"learner.adv_estimator": "grpo", "learner.norm_std": std == "group"}


def _check_group_size(members: int | None, size: int | None) -> None:
    if members is not None and size is not None and members != size:
        raise ValueError(f"group_size differs from gconfig.n_samples ({size}): a group has one size")


def adv_norm(norm: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Whitening over the batch, or the estimator by a comparison within groups.

    In older versions `true` means whitening over the batch.
    """
    if isinstance(norm, bool):
        return {"learner.whiten_advantages": norm}
    mean, std = _levels(norm)
    if mean == "group" and lookup("actor.reward_norm") is None:
        return reward_norm(norm, lookup)
    if (mean, std) == ("batch", "batch"):
        return {"learner.whiten_advantages": True}
    if mean or std or not isinstance(norm, Mapping):
        raise ValueError("advantages are whitened over the batch by mean and deviation, or not at all")
    return {}


def group_norm(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The estimator by the older key for a comparison within groups."""
    return reward_norm({"mean_level": "group", "std_level": "group"}, lookup) if used else {}


def _levels(norm: Any) -> tuple[str | None, str | None]:
    def level_of(key: str) -> str | None:
        value = norm.get(key) if isinstance(norm, Mapping) else None
        return None if value in (None, "none", "null") else str(value)

    return level_of("mean_level"), level_of("std_level")
