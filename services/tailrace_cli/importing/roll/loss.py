"""Rules for ROLL's policy losses and divergences.

`importance_sampling: seq` (prompts) and `ratio_type: segment` (environments) clip one ratio of a row or
of a turn. The divergence in the loss is always k3 there; `kl_penalty` is that of rewards.
"""

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import Lookup, NoEffectError, value_names
from tailrace_cli.importing.rules import is_on

SETS = (
    "learner.loss",
    "learner.pg_clip",
    "learner.pg_clip_high",
    "learner.gspo_clip",
    "learner.gspo_clip_high",
)
VARIANT = (
    *("learner.loss", "learner.behaviour_correction", "learner.tis_cap"),
    *("learner.cispo_clip", "learner.cispo_clip_high"),
)
NOT_IN_REWARD = "add_token_level_kl is off, or init_kl_coef is 0; in the loss it is always k3"
_LOSSES = value_names("topr", "cispo", "kimi15", ppo="ppo_clip", vanilla="vanilla_pg", tis="tis_pg")
_OF_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "topr": {"learner.behaviour_correction": "none"},
    "tis": {"learner.behaviour_correction": "none", "learner.tis_cap": 1.0},
    "cispo": {"learner.cispo_clip": 0.1, "learner.cispo_clip_high": 0.1},
}
_RATIOS = {"token": "", "seq": "gspo", "segment": "segment"}
_clips_apart = is_on("use_pg_clip_range")


def loss(variant: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The loss by its variant, with the numbers that it has there."""
    ours = _LOSSES(variant)
    if variant == "ppo":
        return ratio(None, lookup) or {"learner.loss": ours}
    return {"learner.loss": ours, **_OF_VARIANTS.get(variant, {})}


def ratio(_value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The loss by the unit of its ratio, and its clips."""
    if (variant := _variant(lookup)) != "ppo":
        raise NoEffectError(f"the loss of pg_variant {variant} clips no ratios")
    unit = lookup("importance_sampling", "token")
    if unit == "token":
        unit = lookup("ratio_type", "token")
    low, high = (lookup(f"pg_clip_{side}", 0.2) for side in ("low", "high"))
    if not _clips_apart(lookup):
        low = high = lookup("pg_clip", 0.2)
    name = value_names(**_RATIOS)(unit)
    if name == "gspo":
        return {"learner.loss": name, "learner.gspo_clip": low, "learner.gspo_clip_high": high}
    if name or _clips_apart(lookup):
        return {
            "learner.loss": name or "dapo",
            "learner.pg_clip": low,
            "learner.pg_clip_high": high,
        }
    return {} if lookup("pg_clip") is None else {"learner.pg_clip": low}


def clip(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clip of both sides, unless each side has its own."""
    if _clips_apart(lookup):
        raise NoEffectError("use_pg_clip_range: pg_clip_low and pg_clip_high replace it")
    return ratio(value, lookup)


def side(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clip of one side."""
    if not _clips_apart(lookup):
        raise NoEffectError("use_pg_clip_range is off")
    return ratio(value, lookup)


def dual_clip(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Bound for negative advantages, of losses that clip."""
    if not used:
        return {}
    if (variant := _variant(lookup)) != "ppo":
        raise NoEffectError(f"the loss of pg_variant {variant} has no such bound")
    name = lookup("learner.loss", "ppo_clip")
    if name not in ("ppo_clip", "dapo"):
        raise ValueError(f"the loss {name} has no such bound here")
    return {"learner.dual_clip": 1.0 + 2.0 * lookup("pg_clip", 0.2)}


def in_reward(lookup: Lookup) -> bool:
    """Holds if a divergence is subtracted from rewards."""
    return bool(lookup("add_token_level_kl") and lookup("init_kl_coef"))


def _variant(lookup: Lookup) -> str:
    return str(lookup("actor_train.pg_variant", lookup("pg_variant", "ppo")))
