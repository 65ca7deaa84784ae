"""Rules for AReaL's policy loss: clips, weights for tokens of an older policy, other losses.

`use_decoupled_loss` weighs tokens by the probability under the policy at the step's start over that
under the policy that sampled them: our `behaviour_correction`, beside any loss with clips.
"""

import math
from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import Lookup, NoEffectError, value_names
from tailrace_cli.importing.rules import is_on

NOT_DECOUPLED = "use_decoupled_loss is off"
SPELLINGS = ("behave", "behav")  # of two of its versions
is_decoupled = is_on("actor.use_decoupled_loss")
_CORRECTION, _CAP = "learner.behaviour_correction", "learner.tis_cap"
WEIGHTS = (_CORRECTION, _CAP)
M2PO = ("learner.m2_threshold", "learner.loss", _CORRECTION)
LEVEL = ("learner.loss", "learner.gspo_clip", "learner.gspo_clip_high")
_MODES = value_names("disabled", token_mask="mis", token_truncate="tis")
_ACTIONS = value_names(mask="mis", clamp="tis")
_BY_SEQUENCES = "weighs rows by the geometric mean of their tokens, which no correction here does"


def decoupled(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Correction that leaves out or truncates ratios above a bound; none if it is off."""
    if not used:
        return {_CORRECTION: "none"}
    if lookup(_CORRECTION) is not None or lookup("actor.rejection_sampling") is not None:
        return {}  # another rule sets it
    mode = _spelt("mode", lookup) or "token_mask"
    bound = _spelt("cap", lookup)
    if mode == "disabled":
        return {_CORRECTION: "none"}
    ours = "tis" if bound is None else _MODES(mode)
    return {_CORRECTION: ours, _CAP: math.inf if bound is None else float(bound)}


def mode(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Checks the treatment of tokens beyond the bound; `decoupled` reads it."""
    if str(value).startswith("sequence"):
        raise ValueError(_BY_SEQUENCES)
    _MODES(value)
    if not is_decoupled(lookup):
        raise NoEffectError(NOT_DECOUPLED)
    return {}


def cap(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Checks the bound; `decoupled` reads it."""
    if not is_decoupled(lookup):
        raise NoEffectError(NOT_DECOUPLED)
    if not float(value) > 1:
        raise ValueError("expected a ratio above 1")
    return {}


def rejection(sampling: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Correction by its newest name: `{level: token, action: mask, metric: ratio, upper: 5.0}`."""
    if not is_decoupled(lookup):
        raise NoEffectError(NOT_DECOUPLED)
    if lookup("learner.loss") == "m2po":
        raise ValueError("m2po leaves tokens out itself, and takes no other correction")
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


def level(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Ratios of tokens, or `gspo` for ratios of rows, with the clip of all losses there."""
    unit = value_names("token", "sequence")(value)
    if unit == "token":
        return {}
    if lookup("actor.eps_clip") is not None:
        return {LEVEL[0]: "gspo"}
    return {LEVEL[0]: "gspo", LEVEL[1]: 0.2, LEVEL[2]: lookup("actor.eps_clip_higher", 0.2)}


def sapo(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Loss with gates instead of clips."""
    return {"learner.loss": "sapo"} if used else {}


def threshold(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The bound of that loss, which newer versions switch on by giving the bound alone."""
    if lookup("actor.use_m2po_loss") is False:
        raise NoEffectError("use_m2po_loss is off")
    return {"learner.m2_threshold": float(value), **m2po(True, lookup)}


def m2po(used: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Loss that leaves out tokens by the second moment of their log-ratios."""
    return {"learner.loss": "m2po", _CORRECTION: "none"} if used else {}


def clip(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clip below 1; without `eps_clip_higher` above 1 too."""
    if lookup("learner.loss") == "gspo":
        high = lookup("actor.eps_clip_higher", value)
        return {"learner.gspo_clip": value, "learner.gspo_clip_high": high}
    if lookup("learner.loss") == "m2po":
        raise NoEffectError("m2po bounds the second moment of log-ratios, not each ratio")
    return {"learner.pg_clip": value}


def clip_higher(value: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Clip above 1, which only some losses have of their own."""
    loss = lookup("learner.loss")
    if loss == "gspo":
        return {}
    if loss is not None:
        raise ValueError(f"loss {loss} follows ratios as far above 1 as below")
    return {"learner.loss": "dapo", "learner.pg_clip_high": value}


def recomputes(used: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Checks that log-probabilities at the step's start are known, unless the loss is decoupled."""
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
