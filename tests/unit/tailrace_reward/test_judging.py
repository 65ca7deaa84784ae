"""Prompts of judges, their replies, and batches of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_reward.config import JudgeArgs, RewardModelArgs
from tailrace_reward.core.batching import Batches, TokenIds
from tailrace_reward.core.judging import NoScoreError, read_score, template_names


def judge(**settings: object) -> JudgeArgs:
    return JudgeArgs(base_url="http://here", model="m", prompt="p", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Score: 7", 7.0), ("score=2.5, on reflection SCORE 3", 3.0), ("**Score:** 10/10", 10.0)],
)
def test_the_last_number_that_the_pattern_finds_counts(reply: str, score: float) -> None:
    assert read_score(reply, judge()) == score


@pytest.mark.parametrize(
    ("reply", "settings", "reason"),
    [
        ("seven", {}, "no match"),
        ("Score: 11", {}, "outside 0 to 10"),
        ("Score: -1", {}, "outside 0 to 10"),
        ("it is good", {"score_pattern": "(good|bad)"}, "'good' is no number"),
    ],
)
def test_a_reply_without_a_possible_score_says_why(
    reply: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(NoScoreError, match=reason):
        read_score(reply, judge(**settings))


def test_templates_see_the_conversation_its_ends_and_the_row() -> None:
    call = ToolCall("c", "add", '{"a": 1}')
    said = (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "1 + 1?"),
        ChatMessage("assistant", tool_calls=(call,)),
        ChatMessage("tool", "2"),
        ChatMessage("assistant", "two"),
    )
    item = ScoreItem("e", EnvTask("sums", 0, row={"answer": 2}), said, (), {"length": 3.0})
    names = template_names(item)
    assert (names["question"], names["answer"], names["row"]["answer"]) == ("1 + 1?", "two", 2)
    assert names["conversation"].endswith('[assistant]\nadd({"a": 1})\n\n[tool]\n2\n\n[assistant]\ntwo')
    assert names["metrics"] == {"length": 3.0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"score_pattern": "("}, "judge.score_pattern"),
        ({"score_pattern": "score"}, "one group"),
        ({"min_score": 5.0, "max_score": 5.0}, "min_score must be below"),
        ({"max_attempts": 0}, "judge.max_attempts"),
        ({"attempt_timeout_s": 0.0}, "judge.attempt_timeout_s"),
    ],
)
def test_impossible_judges_name_the_key(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        judge(**settings)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: JudgeArgs(base_url="ftp://x", model="m", prompt="p"), "judge.base_url"),
        (lambda: JudgeArgs(base_url="http://x", model="", prompt="p"), "judge.model"),
        (lambda: RewardModelArgs(max_batch_tokens=0), "max_batch_tokens"),
        (lambda: RewardModelArgs(max_length=-1), "max_length"),
    ],
)
def test_impossible_models_name_the_key(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


class Lengths:
    """Scores conversations by their length and keeps the batches; the first waits for `release`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.release = asyncio.Event()

    async def __call__(self, batch: Sequence[TokenIds]) -> Sequence[float]:
        self.batches.append([len(row) for row in batch])
        await self.release.wait()
        if any(len(row) == 13 for row in batch):
            raise RuntimeError("unlucky")
        return [float(len(row)) for row in batch]


async def test_those_that_wait_go_together_with_others_of_their_length() -> None:
    run = Lengths()
    batches = Batches(run, max_batch_tokens=20)
    first = asyncio.create_task(batches.score([0] * 3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.create_task(batches.score([0] * size)) for size in (4, 9, 30, 5, 10)]
    await asyncio.sleep(0)
    run.release.set()
    assert await asyncio.gather(first, *others) == [3.0, 4.0, 9.0, 30.0, 5.0, 10.0]
    assert run.batches == [[3], [4, 5], [9, 10], [30]]


async def test_a_batch_that_fails_and_a_caller_that_leaves_trouble_nobody_else() -> None:
    run = Lengths()
    batches = Batches(run, max_batch_tokens=13)
    tasks = [asyncio.create_task(batches.score([0] * size)) for size in (2, 13, 7, 8)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[2].cancel()
    run.release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] == 2.0
    assert isinstance(results[1], RuntimeError)
    assert results[3] == 8.0
    assert [7] not in run.batches
