"""AReaL's policy loss: clips, weights for tokens that an older policy sampled, other losses.

`use_decoupled_loss` weighs tokens by the policy at the step's start over the one that sampled
them; that is our `behaviour_correction`, beside any loss that clips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tailrace.config.settings.setting import Lookup, choice
from tailrace_cli.importing.rules import NoEffectError

NOT_DECOUPLED = "use_decoupled_loss is off"
SPELLINGS = ("behave", "behav")  # of two of its versions
_CORRECTION, _CAP = "learner.behaviour_correction", "learner.tis_cap"
WEIGHTS = (_CORRECTION, _CAP)
_MODES = choice("disabled", token_mask="mis", token_truncate="tis")
_ACTIONS = choice(mask="mis", clamp="tis")
_BY_SEQUENCES = "weighs rows by the geometric mean of their tokens, which no correction here does"


def is_decoupled(lookup: Lookup) -> bool:
    """Whether tokens are weighed by the policy that sampled them."""
    return bool(lookup("actor.use_decoupled_loss"))


def decoupled(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Without those of ratios above a bound, or truncated there; on equal terms where it is off."""
    if not used:
        return {_CORRECTION: "none"}
    if lookup(_CORRECTION) is not None or lookup("actor.rejection_sampling") is not None:
        return {}  # by another line
    mode = _spelt("mode", lookup) or "token_mask"
    bound = _spelt("cap", lookup)
    if mode == "disabled":
        return {_CORRECTION: "none"}
    ours = "tis" if bound is None else _MODES(mode)
    return {_CORRECTION: ours, _CAP: math.inf if bound is None else float(bound)}


def mode(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """What becomes of tokens beyond the bound; read beside `use_decoupled_loss`."""
    if str(value).startswith("sequence"):
        raise ValueError(_BY_SEQUENCES)
    _MODES(value)
    if not is_decoupled(lookup):
        raise NoEffectError(NOT_DECOUPLED)
    return {}


def cap(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The bound; read beside `use_decoupled_loss`."""
    if not is_decoupled(lookup):
        raise NoEffectError(NOT_DECOUPLED)
    if not float(value) > 1:
        raise ValueError("expected a ratio above 1")
    return {}


def rejection(sampling: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Its newest name: `{level: token, action: mask, metric: ratio, upper: 5.0}`."""
    if not is_decoupled(lookup):
        raise NoEffectError(NOT_DECOUPLED)
    if not isinstance(sampling, Mapping):
        raise ValueError("expected level, action, metric and upper")
    if sampling.get("level", "token") != "token":
        raise ValueError(_BY_SEQUENCES)
    if sampling.get("metric", "ratio") != "ratio" or sampling.get("lower") is not None:
        raise ValueError("tokens are left out or truncated above a ratio (metric ratio, upper alone)")
    return {
        _CORRECTION: _ACTIONS(sampling.get("action", "mask")),
        _CAP: float(sampling.get("upper", 5.0)),
    }


def level(value: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Ratios of tokens or of whole rows."""
    return choice(token={}, sequence={"learner.loss": "gspo"})(value)  # type: ignore[no-any-return]


def sapo(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Gates instead of clips."""
    return {"learner.loss": "sapo"} if used else {}


def m2po(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Tokens are left out by the second moment of their log-ratios."""
    return {"learner.loss": "m2po", _CORRECTION: "none"} if used else {}


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
    """Off, ratios are of the policy that sampled; not read by the decoupled loss."""
    if is_decoupled(lookup):
        raise NoEffectError("use_decoupled_loss recomputes them anyway")
    if not used and lookup("actor.prox_logp_method") != "loglinear":
        raise ValueError(
            "losses compare with the policy at a step's start: recompute or interpolate it"
        )
    return {}


def _spelt(what: str, lookup: Lookup) -> Any:
    found = (lookup(f"actor.{word}_imp_weight_{what}") for word in SPELLINGS)
    return next((value for value in found if value is not None), None)
