"""Rules for verl's policy losses: each mode, the clips that it reads, and its mean over a step.

The clips `clip_ratio_low` and `clip_ratio_high` mean something else in every mode. Modes of whole rows
take the mean of rows, whatever `loss_agg_mode` says.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.settings import Lookup, NoEffectError, value_names
from tailrace.config.settings.values import whole_number
from tailrace_cli.importing import value_names as names

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
MODE = f"{ACTOR}.policy_loss.loss_mode"
CLIPS = (
    "learner.loss",
    "learner.pg_clip",
    "learner.pg_clip_high",
    "learner.gspo_clip",
    "learner.gspo_clip_high",
    "learner.gmpo_clip",
    "learner.cispo_clip",
    "learner.cispo_clip_high",
    "learner.dppo_delta",
)
AGGREGATION = ("learner.loss_aggregation", "learner.loss_norm_tokens")
_LOSSES = value_names(
    "gspo",
    "clip_cov",
    "kl_cov",
    "cispo",
    "sapo",
    "dppo_tv",
    geo_mean="gmpo",
    gpg="vanilla_pg",
    reinforce="tis_pg",
)
_CLIP_NAMES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_OF_ROWS = ("gspo", "sapo", "geo_mean")
_SUM_NORM = "seq-mean-token-sum-norm"


def loss(mode: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The loss by its mode, with the usual clips; modes of rows with the mean that they always take."""
    ours = {"learner.loss": _LOSSES(mode)} if mode != "vanilla" else {}
    if mode in _OF_ROWS:
        ours["learner.loss_aggregation"] = "seq_mean_token_mean"
    if mode in _CLIPPED and not any(lookup(f"{ACTOR}.{name}") is not None for name in _CLIP_NAMES):
        ours |= _CLIPPED[mode](*_clips(lookup))
    return ours


def clip_both(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clip of both sides, unless each side has its own."""
    if None not in (lookup(f"{ACTOR}.clip_ratio_low"), lookup(f"{ACTOR}.clip_ratio_high")):
        raise NoEffectError("clip_ratio_low and clip_ratio_high replace it")
    return clip(value, lookup)


def clip(_value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clips of the loss; `NoEffectError` for a loss without."""
    mode = _mode(lookup)
    if mode in _CLIPPED:
        return _CLIPPED[mode](*_clips(lookup))
    _LOSSES(mode)
    raise NoEffectError(f"the loss {mode} clips no ratios")


def upper_bound(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Bound of the ratio: for negative advantages, or of the weights of `dppo_tv`."""
    keys = {"vanilla": "learner.dual_clip", "dppo_tv": "learner.dppo_cap"}
    if _mode(lookup) not in keys:
        raise NoEffectError(f"the loss {_mode(lookup)} has no such bound")
    return {keys[_mode(lookup)]: value}


def aggregation(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Mean of the step's tokens; with a norm, the divisor of a row's sum."""
    if _mode(lookup) in _OF_ROWS:
        raise NoEffectError(f"the loss {_mode(lookup)} always takes the mean of rows")
    ours: dict[str, Any] = {AGGREGATION[0]: names.aggregation(name)}
    if name == _SUM_NORM:
        tokens = lookup(f"{ACTOR}.loss_scale_factor", lookup("data.max_response_length"))
        ours |= {} if tokens is None else {AGGREGATION[1]: whole_number(tokens)}
    return ours


def has_norm(lookup: Lookup) -> bool:
    """Holds if the sum of a row is divided by a fixed number of tokens."""
    return bool(lookup(f"{ACTOR}.loss_agg_mode") == _SUM_NORM)


def has_mode(mode: str) -> Callable[[Lookup], bool]:
    """Holds for one loss."""
    return lambda lookup: bool(_mode(lookup) == mode)


def weighs_current_policy(lookup: Lookup) -> bool:
    """Holds for a policy gradient whose tokens have weights of the current policy: `tis_pg`."""
    is_gradient = lookup(f"{CORRECTION}.loss_type", "ppo_clip") == "reinforce"
    is_bypassed = bool(lookup(f"{CORRECTION}.bypass_mode"))
    return is_bypassed and is_gradient and bool(lookup(f"{CORRECTION}.rollout_is") == "token")


def _mode(lookup: Lookup) -> str:
    return "reinforce" if weighs_current_policy(lookup) else str(lookup(MODE, "vanilla"))


def _clips(lookup: Lookup) -> tuple[float, float]:
    both = lookup(f"{ACTOR}.clip_ratio", 0.2)
    return lookup(f"{ACTOR}.clip_ratio_low", both), lookup(f"{ACTOR}.clip_ratio_high", both)


def _vanilla(low: float, high: float) -> Mapping[str, Any]:
    if low == high:
        return {"learner.loss": "ppo_clip", "learner.pg_clip": low}
    return {"learner.loss": "dapo", "learner.pg_clip": low, "learner.pg_clip_high": high}


def _same(low: float, high: float) -> float:
    if low != high:
        raise ValueError(f"{low} and {high}: this loss has one bound for both sides here")
    return low


_CLIPPED: Mapping[str, Callable[[float, float], Mapping[str, Any]]] = {
    "vanilla": _vanilla,
    "gspo": lambda low, high: {"learner.gspo_clip": low, "learner.gspo_clip_high": high},
    "clip_cov": lambda low, high: {"learner.pg_clip": low, "learner.pg_clip_high": high},
    "geo_mean": lambda low, high: {"learner.gmpo_clip": _same(low, high)},
    "cispo": lambda low, high: {
        "learner.cispo_clip": min(low, 1.0),  # a ratio is never below 0
        "learner.cispo_clip_high": high,
    },
    "dppo_tv": lambda low, high: {"learner.dppo_delta": _same(low, high)},
}
