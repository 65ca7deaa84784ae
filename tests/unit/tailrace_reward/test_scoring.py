"""Scores are weighted sums, complete or absent."""

from __future__ import annotations

import asyncio

import pytest

from tailrace_protos.episode import EnvTask
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.reward import ScoreItem
from tailrace_reward.config import RewardConfig, RewardEntry
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.ports import FunctionFailedError


def item(number: int = 0, rewards: tuple[float, ...] = (0.1, 0.2, 1.0)) -> ScoreItem:
    return ScoreItem(f"g{number}.0", EnvTask("lake", number), (), rewards, {})


class Functions:
    """`m:half` gives 0.5, `m:bad` raises, `m:nan` gives no number, `m:slow` waits until released."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float]] = []
        self.release = asyncio.Event()

    async def call(self, function: str, item: ScoreItem, timeout_s: float) -> float:
        self.calls.append((function, item.episode_id, timeout_s))
        if function == "m:bad":
            raise FunctionFailedError(function, "raised ValueError: no")
        if function == "m:slow":
            await self.release.wait()
        return float("nan") if function == "m:nan" else 0.5


def entry(function: str, weight: float = 1.0) -> RewardEntry:
    return RewardEntry(name=function, kind="function", function=function, weight=weight, timeout_s=3.0)


async def test_the_environments_return_is_the_reward_by_default() -> None:
    (score,) = await Scorer(RewardConfig().rewards, Functions()).score([item()])
    assert score.reward == pytest.approx(1.3)
    assert score.components == {"env_return": pytest.approx(1.3)}
    assert score.error is None


async def test_components_are_weighted_and_kept_unweighted() -> None:
    entries = (RewardEntry(name="env", weight=2.0), entry("m:half", weight=-1.0))
    (score,) = await Scorer(entries, Functions()).score([item()])
    assert score.reward == pytest.approx(2 * 1.3 - 0.5)
    assert score.components == {"env": pytest.approx(1.3), "m:half": 0.5}


@pytest.mark.parametrize(
    ("function", "reason"), [("m:bad", "raised ValueError: no"), ("m:nan", "returned nan")]
)
async def test_a_failing_component_leaves_no_reward_at_all(function: str, reason: str) -> None:
    scorer = Scorer((RewardEntry(name="env"), entry(function)), Functions())
    (score,) = await scorer.score([item()])
    assert score.error is not None
    assert score.error.code is CallErrorCode.INTERNAL
    assert reason in score.error.reason
    assert score.reward == 0.0
    assert score.components == {}


async def test_scores_come_in_the_order_of_the_items() -> None:
    scores = await Scorer((entry("m:half"),), Functions()).score([item(n) for n in range(9)])
    assert [score.episode_id for score in scores] == [f"g{n}.0" for n in range(9)]


async def test_an_item_asked_for_again_meanwhile_or_later_is_computed_once() -> None:
    functions = Functions()
    scorer = Scorer((entry("m:slow"),), functions)
    first, again = (asyncio.create_task(scorer.score([item()])) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    functions.release.set()
    (score,) = await again
    assert await scorer.score([item()]) == (score,)
    assert len(functions.calls) == 1
    await scorer.score([item(rewards=(0.0,))])
    assert len(functions.calls) == 2


async def test_functions_get_the_timeout_of_their_entry() -> None:
    functions = Functions()
    await Scorer((entry("m:half"),), functions).score([item()])
    assert functions.calls == [("m:half", "g0.0", 3.0)]


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: RewardEntry(name="x", kind="function"), "module:name"),
        (lambda: RewardEntry(name="x", kind="function", function="my.module.f"), "module:name"),
        (lambda: RewardEntry(name="x", function="m:f"), "kind must be 'function'"),
        (lambda: RewardEntry(name="x", timeout_s=0), "timeout_s"),
        (lambda: RewardConfig(rewards=()), "at least one"),
        (lambda: RewardConfig(rewards=(RewardEntry(name="x"),) * 2), "different names"),
        (lambda: RewardConfig(num_processes=0), "num_processes"),
    ],
)
def test_an_impossible_configuration_says_what_to_write(make: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        make()  # type: ignore[operator]
