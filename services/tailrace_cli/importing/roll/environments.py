"""Rules for ROLL's environments: the turns that the policy sees, and the tokens that it may sample.

In ROLL `max_new_tokens` limits one reply, as `max_tokens_per_step` of the environment does; here it
limits all replies of an episode together.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tailrace.config.settings import Lookup, NoEffectError
from tailrace.config.settings.values import whole_number
from tailrace_envs import env_config_kind

ENVS = "custom_envs"
REPLY = "actor_infer.generating_args.max_new_tokens"
TRAINED_REPLY = "train_env_manager.generating_args.max_new_tokens"  # without actor_infer's
EVALUATED_REPLY = "val_env_manager.generating_args.max_new_tokens"
BUDGETS = ("agents.generating_args.max_new_tokens", "agents.eval_generating_args.max_new_tokens")
HISTORY_TURNS = "agents.custom_envs.*.history_turns"
_MANAGER = "custom_envs.*.env_manager_cls"
_UNITS = {"StepEnvManager": "step", "TrajEnvManager": "trajectory"}


def manager(name: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The unit of a row, by the end of the class's name; without a history, only the newest turn."""
    unit = _unit(name)
    if unit == "step" and lookup("custom_envs.*.history_length") is None:
        return {"granularity": unit, HISTORY_TURNS: 0}
    return {"granularity": unit}


def history(length: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Turns before the newest: ROLL counts the newest too (`history[-length:-1]`), and 0 is all."""
    if _unit(lookup(_MANAGER, "TrajEnvManager")) != "step":
        raise NoEffectError("the manager of this environment shows all turns")
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise ValueError("expected a whole number of observations, the newest among them")
    if lookup("granularity") != "step":
        raise ValueError("history_turns needs granularity: step, which another setting forbids")
    return {HISTORY_TURNS: length - 1} if length else {}


def _unit(name: Any) -> str:
    for suffix, unit in _UNITS.items():
        if isinstance(name, str) and name.endswith(suffix):
            return unit
    raise ValueError(
        "granularity is step or trajectory, and this class does not say which: name a "
        f"{' or a '.join(_UNITS)}, or set granularity"
    )


def tokens_per_step(tokens: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The smaller of both limits of a reply, and the budget of an episode of such replies."""
    step = _smaller(tokens, _reply(lookup))
    return {"agents.custom_envs.*.max_tokens_per_step": step, **_budgets(lookup)}


def reply_tokens(tokens: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Limit of a reply without environments; with environments see `tokens_per_step`."""
    envs = dict(_environments(lookup))
    if not envs:
        return {BUDGETS[0]: tokens}
    bounds = [env.get("max_tokens_per_step") for env in envs.values()]
    if all(bound is not None and _smaller(bound, tokens) == bound for bound in bounds):
        raise NoEffectError("max_tokens_per_step of every environment is no larger")
    unbounded = [name for name, env in envs.items() if env.get("max_tokens_per_step") is None]
    steps = {f"agents.custom_envs.{name}.max_tokens_per_step": tokens for name in unbounded}
    return {**steps, **_budgets(lookup)}


def trained_reply(tokens: Any, lookup: Lookup) -> Mapping[str, Any]:
    """The same limit by the manager of training, unless `actor_infer` gives it."""
    given = lookup(REPLY)
    if given is None:
        return reply_tokens(tokens, lookup)
    if given != tokens:
        raise ValueError(f"differs from {REPLY} ({given}): training episodes have one sampling")
    return {}


def evaluated_reply(tokens: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Limit of a reply of evaluations; their turns are as long as those of training at most."""
    if not dict(_environments(lookup)):
        return {BUDGETS[1]: tokens}
    steps = [
        _smaller(env.get("max_tokens_per_step"), _reply(lookup)) for _, env in _environments(lookup)
    ]
    if any(step is not None and whole_number(tokens) < step for step in steps):
        raise ValueError("a turn of an evaluation may be as long as in training (max_tokens_per_step)")
    return _budgets(lookup)


def _reply(lookup: Lookup) -> Any:
    return lookup(REPLY, lookup(TRAINED_REPLY))


def _budgets(lookup: Lookup) -> Mapping[str, int]:
    """Budget of the longest episode: the limit of a reply, for each of its turns."""
    found = [_budget(name, env, lookup) for name, env in _environments(lookup)]
    known = [budget for budget in found if budget is not None]
    return dict.fromkeys(BUDGETS, max(known)) if known else {}


def _budget(name: str, env: Mapping[str, Any], lookup: Lookup) -> int | None:
    step = _smaller(env.get("max_tokens_per_step"), _reply(lookup))
    turns = lookup(f"agents.custom_envs.{name}.env_config.max_turns") or _usual_turns(env)
    if step is None or turns is None:
        length = lookup("sequence_length")
        return None if length is None else whole_number(length)
    return whole_number(turns) * whole_number(step)


def _usual_turns(env: Mapping[str, Any]) -> Any:
    """Default `max_turns` of the environment's type, if that has such a key."""
    kind = env_config_kind(str(env.get("env_type")))
    fields = msgspec.structs.fields(kind) if kind else ()
    return next((field.default for field in fields if field.name == "max_turns"), None)


def _environments(lookup: Lookup) -> Iterator[tuple[str, Mapping[str, Any]]]:
    entries = lookup(ENVS, {})
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping):
            yield str(name), entry


def _smaller(first: Any, second: Any) -> int | None:
    given = [whole_number(each) for each in (first, second) if each is not None]
    return min(given, default=None)
