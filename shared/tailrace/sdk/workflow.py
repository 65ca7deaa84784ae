"""Workflows: agents that use an OpenAI (or Anthropic) endpoint and nothing else of Tailrace.

A workflow is any class with `async def run(self, data, **extra_kwargs)`. `data` is a row of the data
set; of `extra_kwargs` it gets those that its signature names: `base_url` (ends with `/v1`), `api_key`
and `http_client` (an httpx `AsyncClient`). It returns the episode's reward, or rewards by completion id
(the `id` of the answers it got). One object plays many episodes, inline even at the same time: keep the
state of an episode in local variables.

Invariants: a run ends in a `WorkflowEnd`, unless it kills its process; only finite numbers up to
`MAX_REWARD` are accepted as rewards.
"""

import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, encodable, foreign_code, place_of
from tailrace.import_path import load_object
from tailrace_protos.episode import Outcome
from tailrace_protos.trajectory import MAX_REWARD

REAL = (numbers.Real, np.bool_)
"""Types of rewards and metrics; numpy registers its other numbers itself."""


class Workflow(Protocol):
    """Interface of the class that `agents.workflow.agent` names."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """Plays one episode; returns the reward, or rewards by completion id."""


class PolicyFailureError(Exception):
    """Raised by a workflow whose model failed at the task: the episode counts, with `reward`.

    Any other exception counts as a failure of the workflow and excludes the episode from training,
    unless the gateway knows that the policy caused it: by a used-up limit, or by a reply that was cut,
    is unreadable, or breaks a constraint of its call.
    """

    def __init__(self, reason: str, reward: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.reward = reward


class WorkflowReturnError(TypeError):
    """`run` returned a value that is not a reward."""


class WorkflowEnd(msgspec.Struct, frozen=True):
    """End of a run as the code tells it. `rewards` by completion id; "" stands for the episode."""

    outcome: Outcome
    reason: str = ""
    rewards: dict[str, float] = {}


def load_workflow(dotted: str, kwargs: Mapping[str, Any], key: str) -> Workflow:
    """Makes the object that plays episodes; `ConfigError` names `key`, the problem and the remedy."""
    made = load_object(dotted, key)
    try:
        with foreign_code(f"{key}: making {dotted} with {dict(kwargs)}"):
            workflow = made(**kwargs)
    except ForeignCodeError as error:
        raise ConfigError(f"{error}: correct {key.rpartition('.')[0] or key}.kwargs") from error
    run = getattr(workflow, "run", None)
    if run is None or not inspect.iscoroutinefunction(inspect.unwrap(run)):  # decorators may wrap it
        found = "no run" if run is None else "a run that is not async"
        raise ConfigError(f"{key}: {dotted} has {found}: give it `async def run(self, data)`")
    try:
        inspect.signature(run).bind({}, **accepted(run, _ALL))
    except TypeError as error:
        raise ConfigError(
            f"{key}: {dotted}.run cannot be called with the row alone ({error}): it may take base_url, "
            "api_key and http_client besides"
        ) from error
    return workflow  # type: ignore[no-any-return]


_ALL: Mapping[str, Any] = dict.fromkeys(("base_url", "api_key", "http_client"))


def accepted(run: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the offered keyword arguments that `run` takes."""
    parameters = inspect.signature(run).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(offered)
    named = {one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY}
    return {name: value for name, value in offered.items() if name in named}


async def run_to_end(
    workflow: Workflow, data: dict[str, Any], offered: Mapping[str, Any]
) -> WorkflowEnd:
    """Runs one episode; every exception becomes a typed end. Cancellation passes through."""
    name = f"{type(workflow).__name__}.run"
    try:
        with foreign_code(name):
            returned = await workflow.run(data, **accepted(workflow.run, offered))
        return WorkflowEnd(Outcome.OK, rewards=rewards_of(returned, name))
    except WorkflowReturnError as error:
        return WorkflowEnd(Outcome.INFRA_FAILURE, str(error))
    except (SystemExit, KeyboardInterrupt) as error:
        return WorkflowEnd(Outcome.INFRA_FAILURE, f"{name} tried to end its process: {error!r}")
    except ForeignCodeError as failure:
        return _end_of(failure, name)


def rewards_of(returned: object, name: str) -> dict[str, float]:
    """Reads returned rewards by completion id; raises `WorkflowReturnError`."""
    if isinstance(returned, REAL):
        return {"": _finite(returned, name)}
    if not isinstance(returned, Mapping):
        raise WorkflowReturnError(
            f"{name} returned {type(returned).__name__}: return a number, or a dict of completion id "
            "to number"
        )
    if not returned:
        raise WorkflowReturnError(f"{name} returned an empty dict: return at least one reward")
    rewards = {}
    for completion_id, reward in returned.items():
        if not isinstance(completion_id, str) or not isinstance(reward, REAL):
            kinds = f"{type(completion_id).__name__} to {type(reward).__name__}"
            raise WorkflowReturnError(f"{name} returned a dict of {kinds}: completion id to number")
        rewards[completion_id] = _finite(reward, name)
    return rewards


def given_reward(reward: Any, name: str) -> float:
    """A reward that `name` was called with; raises `WorkflowReturnError`."""
    if not hasattr(reward, "__float__"):
        raise WorkflowReturnError(f"{name} got {type(reward).__name__}: give a number")
    return _finite(reward, name, "got")


def _finite(reward: Any, name: str, did: str = "returned") -> float:
    try:
        value = float(reward)
    except OverflowError:  # an integer
        value = math.inf
    if not abs(value) <= MAX_REWARD:  # True for NaN too
        raise WorkflowReturnError(f"{name} {did} {value}: rewards must be finite, up to {MAX_REWARD:g}")
    return value


def _end_of(failure: ForeignCodeError, name: str) -> WorkflowEnd:
    error = failure.error
    if isinstance(error, PolicyFailureError):
        return _failed_policy(error, name)
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.INFRA_FAILURE
    return WorkflowEnd(outcome, str(failure) + place_of(error))


def _failed_policy(error: PolicyFailureError, name: str) -> WorkflowEnd:
    did = f"raised PolicyFailureError({str(error.reason)!r}) with a reward of"
    try:
        if not isinstance(error.reward, REAL):
            raise WorkflowReturnError(f"{name} {did} {type(error.reward).__name__}: give a number")
        rewards = {"": _finite(error.reward, name, did)}
    except WorkflowReturnError as wrong:
        return WorkflowEnd(Outcome.INFRA_FAILURE, str(wrong))
    return WorkflowEnd(Outcome.POLICY_FAILURE, encodable(str(error.reason)), rewards)
