"""Scores are weighted sums, complete or absent."""

from __future__ import annotations

import asyncio

import pytest

from tailrace_protos.episode import EnvTask
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.reward import ScoreItem
from tailrace_reward.config import RewardConfig, RewardEntry
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.ports import ComponentFailedError


def item(number: int = 0, rewards: tuple[float, ...] = (0.1, 0.2, 1.0)) -> ScoreItem:
    return ScoreItem(f"g{number}.0", EnvTask("lake", number), (), rewards, {})


class Calls:
    """`m:half` gives 0.5, `m:bad` raises, `m:nan` gives no number, `m:slow` waits until released."""

    def __init__(self, name: str = "m:half") -> None:
        self.name = name
        self.episodes: list[str] = []
        self.release = asyncio.Event()

    async def score(self, item: ScoreItem) -> float:
        self.episodes.append(item.episode_id)
        if self.name == "m:bad":
            raise ComponentFailedError(self.name, "raised ValueError: no")
        if self.name == "m:slow":
            await self.release.wait()
        return float("nan") if self.name == "m:nan" else 0.5


def entry(function: str, weight: float = 1.0) -> RewardEntry:
    return RewardEntry(name=function, kind="function", function=function, weight=weight, timeout_s=3.0)


async def test_the_environments_return_is_the_reward_by_default() -> None:
    (score,) = await Scorer(RewardConfig().components).score([item()])
    assert score.reward == pytest.approx(1.3)
    assert score.components == {"env_return": pytest.approx(1.3)}
    assert score.error is None


async def test_components_are_weighted_and_kept_unweighted() -> None:
    entries = (RewardEntry(name="env", weight=2.0), entry("m:half", weight=-1.0))
    (score,) = await Scorer(entries, {"m:half": Calls()}).score([item()])
    assert score.reward == pytest.approx(2 * 1.3 - 0.5)
    assert score.components == {"env": pytest.approx(1.3), "m:half": 0.5}


@pytest.mark.parametrize(
    ("weight", "reason"), [(1.0, "not finite"), (1e10, "weighted sum")], ids=["turns", "components"]
)
async def test_rewards_whose_sum_is_infinite_are_an_error(weight: float, reason: str) -> None:
    scorer = Scorer((RewardEntry(name="env", weight=weight),))
    rewards = (1e308, 1e308) if weight == 1.0 else (1e308,)
    (score,) = await scorer.score([item(rewards=rewards)])
    assert score.error is not None
    assert reason in score.error.reason
    assert score.reward == 0.0


@pytest.mark.parametrize(
    ("function", "reason"), [("m:bad", "raised ValueError: no"), ("m:nan", "returned nan")]
)
async def test_a_failing_component_leaves_no_reward_at_all(function: str, reason: str) -> None:
    scorer = Scorer((RewardEntry(name="env"), entry(function)), {function: Calls(function)})
    (score,) = await scorer.score([item()])
    assert score.error is not None
    assert score.error.code is CallErrorCode.INTERNAL
    assert reason in score.error.reason
    assert score.reward == 0.0
    assert score.components == {}


async def test_an_error_that_nobody_expects_costs_its_own_item_alone() -> None:
    class Fragile(Calls):
        async def score(self, item: ScoreItem) -> float:
            return await super().score(item) / (item.episode_id != "g1.0")

    scores = await Scorer((entry("m:half"),), {"m:half": Fragile()}).score([item(n) for n in range(3)])
    assert [score.reward for score in scores] == [0.5, 0.0, 0.5]
    assert [score.error is None for score in scores] == [True, False, True]
    assert scores[1].error is not None
    assert "reward 'm:half' raised ZeroDivisionError" in scores[1].error.reason


async def test_scores_come_in_the_order_of_the_items() -> None:
    scores = await Scorer((entry("m:half"),), {"m:half": Calls()}).score([item(n) for n in range(9)])
    assert [score.episode_id for score in scores] == [f"g{n}.0" for n in range(9)]


async def test_an_item_asked_for_again_meanwhile_or_later_is_computed_once() -> None:
    functions = Calls("m:slow")
    scorer = Scorer((entry("m:slow"),), {"m:slow": functions})
    first, again = (asyncio.create_task(scorer.score([item()])) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    functions.release.set()
    (score,) = await again
    assert await scorer.score([item()]) == (score,)
    assert len(functions.episodes) == 1
    await scorer.score([item(rewards=(0.0,))])
    assert len(functions.episodes) == 2


async def test_a_failure_is_not_remembered() -> None:
    calls = Calls("m:bad")
    scorer = Scorer((entry("m:bad"),), {"m:bad": calls})
    (failed,) = await scorer.score([item()])
    calls.name = "m:half"
    (score,) = await scorer.score([item()])
    assert failed.error is not None
    assert score.reward == 0.5


def test_a_reward_model_alone_is_the_reward() -> None:
    (only,) = RewardConfig(reward_pretrain="owner/model").components
    assert (only.kind, only.pretrain, only.name) == ("model", "owner/model", "reward_model")
    both = (RewardEntry(name="a", kind="model"), RewardEntry(name="b", kind="model", pretrain="c"))
    config = RewardConfig(rewards=both, reward_pretrain="owner/model")
    assert [entry.pretrain for entry in config.components] == ["owner/model", "c"]


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: RewardEntry(name="x", kind="function"), "module:name"),
        (lambda: RewardEntry(name="x", kind="function", function="my.module.f"), "module:name"),
        (lambda: RewardEntry(name="x", function="m:f"), "kind must be 'function'"),
        (lambda: RewardEntry(name="x", timeout_s=0), "timeout_s"),
        (lambda: RewardEntry(name="x", kind="judge"), "base_url and prompt"),
        (lambda: RewardEntry(name="x", pretrain="a"), "kind must be 'model'"),
        (lambda: RewardConfig(rewards=(RewardEntry(name="x", kind="model"),)), "reward_pretrain"),
        (lambda: RewardConfig(rewards=(RewardEntry(name="x"),), reward_pretrain="a"), "there is none"),
        (lambda: RewardConfig(rewards=(RewardEntry(name="x"),) * 2), "different names"),
        (lambda: RewardConfig(num_processes=0), "num_processes"),
    ],
)
def test_an_impossible_configuration_says_what_to_write(make: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        make()  # type: ignore[operator]
