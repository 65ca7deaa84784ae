"""Valid signatures, results and errors of workflows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tailrace.config import ConfigError
from tailrace.sdk.workflow import PolicyFailureError, WorkflowEnd, load_workflow, run_to_end
from tailrace_protos.base import decode, encode
from tailrace_protos.episode import Outcome

NO_NUMBER: Any = None
OFFERED = {"base_url": "http://h/v1", "api_key": "k", "http_client": object()}


class Answering:
    """Returns or raises what the row says."""

    async def run(self, data: dict[str, Any]) -> Any:
        if isinstance(data["answer"], BaseException):
            raise data["answer"]
        return data["answer"]


async def end_of(answer: object) -> WorkflowEnd:
    return await run_to_end(Answering(), {"answer": answer}, OFFERED)


@pytest.mark.parametrize("answer", [0.5, 1, True, np.float32(0.25), np.int64(3), np.bool_(True)])
async def test_a_number_is_the_reward_of_the_last_call(answer: Any) -> None:
    assert await end_of(answer) == WorkflowEnd(Outcome.OK, rewards={"": float(answer)})


async def test_a_dict_holds_rewards_by_completion_id() -> None:
    assert (await end_of({"c1": 1, "c2": -0.5})).rewards == {"c1": 1.0, "c2": -0.5}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "returned NoneType: return a number"),
        ("0.5", "returned str"),
        (float("nan"), "returned nan: rewards must be finite"),
        (10**400, "returned inf: rewards must be finite"),
        (-1e13, "returned -10000000000000.0: rewards must be finite, up to 1e+12"),
        ({"c1": float("inf")}, "returned inf"),
        ({}, "returned an empty dict"),
        ({"c1": "1"}, "returned a dict of str to str"),
        ({1: 1.0}, "returned a dict of int to float"),
        ([1.0], "returned list"),
    ],
)
async def test_anything_else_is_an_infrastructure_failure_that_says_what(
    answer: Any, reason: str
) -> None:
    end = await end_of(answer)
    assert end.outcome is Outcome.INFRA_FAILURE
    assert f"Answering.run {reason}" in end.reason


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (KeyError("answer"), Outcome.INFRA_FAILURE, "Answering.run raised KeyError: 'answer' (at "),
        (TimeoutError("slow"), Outcome.TIMEOUT, "raised TimeoutError: slow"),
        (SystemExit(3), Outcome.INFRA_FAILURE, "tried to end its process: SystemExit(3)"),
        (PolicyFailureError("gave up", 0.1), Outcome.POLICY_FAILURE, "gave up"),
        (PolicyFailureError("lost", float("nan")), Outcome.INFRA_FAILURE, "with a reward of nan"),
        (PolicyFailureError("lost", NO_NUMBER), Outcome.INFRA_FAILURE, "with a reward of NoneType"),
    ],
)
async def test_what_it_raises_becomes_a_typed_end(
    error: BaseException, outcome: Outcome, reason: str
) -> None:
    end = await end_of(error)
    assert end.outcome is outcome
    assert reason in end.reason
    assert bool(end.rewards) == end.outcome.is_valid


@pytest.mark.parametrize("reward", [np.float32(0.25), np.int64(-1), 1, True])
async def test_the_end_of_a_failed_policy_can_be_sent(reward: Any) -> None:
    end = await end_of(PolicyFailureError(ValueError("lost"), reward))  # type: ignore[arg-type]
    wanted = WorkflowEnd(Outcome.POLICY_FAILURE, "lost", {"": float(reward)})
    assert decode(encode(end), WorkflowEnd) == wanted


async def test_a_reason_with_half_a_character_can_be_sent() -> None:
    end = await end_of(PolicyFailureError("half \ud800"))
    assert decode(encode(end), WorkflowEnd).reason == "half ?"


async def test_the_reason_names_the_line_that_raised() -> None:
    end = await end_of(ValueError("x"))
    assert "test_workflow.py" in end.reason
    assert end.reason.endswith(" run)")


async def test_cancellation_passes_through() -> None:
    with pytest.raises(asyncio.CancelledError):
        await end_of(asyncio.CancelledError())


async def test_it_gets_only_the_arguments_that_its_signature_names() -> None:
    class Some:
        async def run(self, data: dict[str, Any], *, api_key: str) -> float:
            return float(api_key == "k")

    class Every:
        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            return float(extra_kwargs == OFFERED)

    assert (await run_to_end(Some(), {}, OFFERED)).rewards == {"": 1.0}
    assert (await run_to_end(Every(), {}, OFFERED)).rewards == {"": 1.0}


MODULE = """
import functools

class Agent:
    def __init__(self, style="plain"):
        if style == "bad":
            raise ValueError("no such style")
        self.style = style
    async def run(self, data, base_url):
        return 1.0

class Blocking:
    def run(self, data):
        return 1.0

class Silent:
    pass

def timed(run):
    @functools.wraps(run)
    def wrapped(self, data, **offered):
        return run(self, data, **offered)
    return wrapped

class Timed:
    @timed
    async def run(self, data, base_url):
        return 1.0

class Demanding:
    async def run(self, data, model):
        return 1.0

class NoRow:
    async def run(self):
        return 1.0
"""


@pytest.fixture
def module(user_module: Callable[[str, str], str]) -> str:
    return user_module("user_agents", MODULE)


@pytest.mark.parametrize("separator", [".", ":"])
def test_a_class_is_named_with_a_dot_or_a_colon_and_made_with_its_kwargs(
    module: str, separator: str
) -> None:
    made = load_workflow(f"{module}{separator}Agent", {"style": "formal"}, "agents.workflow.agent")
    assert made.style == "formal"  # type: ignore[attr-defined]


async def test_a_decorated_run_is_async_too(module: str) -> None:
    workflow = load_workflow(f"{module}.Timed", {}, "agents.workflow.agent")
    assert (await run_to_end(workflow, {}, OFFERED)).rewards == {"": 1.0}


@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        ("Missing", {}, "has no 'Missing'"),
        ("Blocking", {}, "has a run that is not async"),
        ("Silent", {}, "has no run: give it"),
        ("Demanding", {}, "missing a required argument: 'model'"),
        ("NoRow", {}, "too many positional arguments"),
        ("Agent", {"style": "bad"}, "no such style: correct agents.workflow.kwargs"),
        ("Agent", {"size": 3}, "unexpected keyword argument 'size'"),
    ],
)
def test_mistakes_are_named_with_their_key_and_remedy(
    module: str, name: str, kwargs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=r"agents\.workflow\.agent") as caught:
        load_workflow(f"{module}.{name}", kwargs, "agents.workflow.agent")
    assert reason in str(caught.value)
    assert name in str(caught.value)
