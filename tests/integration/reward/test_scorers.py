"""Built-in scorers as a component of the service: by name, by data source, in their processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tailrace.config import ConfigError, decode_config
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_reward.adapters import process_pool, scorers
from tailrace_reward.adapters.components import open_components
from tailrace_reward.adapters.process_pool import ScoringPool
from tailrace_reward.config import RewardConfig
from tailrace_reward.ports import Component, ComponentFailedError

MODULE = """
def spins(task, messages, metrics):
    while True:
        pass

def share(task, messages, metrics, of=1.0):
    return 1 / of
"""


@asynccontextmanager
async def component(**entry: Any) -> AsyncIterator[Component]:
    section = {"rewards": [{"name": "answer", "kind": "scorer", **entry}], "num_processes": 1}
    components = await open_components(decode_config(section, RewardConfig, "reward"), "run.yaml")
    yield components.by_name["answer"]
    await components.close()


def item(reply: str, **row: Any) -> ScoreItem:
    messages = (ChatMessage("user", "?"), ChatMessage("assistant", reply))
    return ScoreItem("g0.0", EnvTask("set", 0, 0, row), messages, (), {})


async def test_each_row_is_scored_as_its_data_source_asks() -> None:
    rows = [
        (item(r"\boxed{72}", data_source="openai/gsm8k", answer="so\n#### 72"), 1.0),
        (item(r"\boxed{x+x}", data_source="MATH-500", answer="2x"), 1.0),
        (item("B", data_source="mine/quiz", answer="C", choices=["a", "b", "c"]), 0.0),
        (item("the cat", data_source="squad", answer={"text": ["Cat"]}), 1.0),
        (item('{"n": 1}', data_source="forms", json_schema={"required": ["n"]}), 1.0),
    ]
    async with component(sources={"mine/*": "mcq", "forms": "json_schema"}, timeout_s=60) as scorer:
        assert [await scorer.score(one) for one, _ in rows] == [wanted for _, wanted in rows]
        with pytest.raises(ComponentFailedError, match=r"data source 'poems'.*`sources`"):
            await scorer.score(item("?", data_source="poems", answer="x"))
        with pytest.raises(ComponentFailedError, match=r"no true answer \(keys data_source\)"):
            await scorer.score(item("?", data_source="gsm8k"))
        with pytest.raises(ComponentFailedError, match=r"'code' needs .*num_sandboxes"):
            await scorer.score(item("?", data_source="apps", tests=[]))


async def test_a_named_scorer_reads_its_arguments_and_no_data_source() -> None:
    async with component(scorer="math", args={"strict": True}, timeout_s=60) as scorer:
        assert await scorer.score(item(r"\boxed{0.5}", answer="1/2")) == 1.0
        assert await scorer.score(item("The answer is 0.5.", answer="1/2")) == 0.0


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"scorer": "maths"}, "no scorer 'maths': did you mean 'math'"),
        ({"sources": {"x": "judge"}}, "the scorer judge needs `judge`"),
        (
            {"scorer": "gsm8k", "args": {"partial": True}},
            "'gsm8k' has no argument 'partial'; it has strict",
        ),
        ({"args": {"code": {"tests": 1}}}, "'code' has no argument 'tests'; it has max_tests, partial"),
        (
            {"args": {"code": {"max_tests": 0}}},
            "max_tests of the scorer 'code' must be .* from 1, found 0",
        ),
        ({"scorer": "code", "args": {"max_tests": "all"}}, "whole number from 1, found 'all'"),
        ({"scorer": "code", "args": {"timeout_s": 0}}, "timeout_s of the scorer 'code' .* found 0"),
        ({"scorer": "math", "args": {"strict": "yes"}}, "strict of the scorer 'math' .* found 'yes'"),
        ({"args": {"code": {"partial": 1}}}, "partial of the scorer 'code' must be true or false"),
        (
            {"kind": "function", "function": "m:f", "scorer": "math"},
            "has a scorer, so kind must be 'scorer'",
        ),
    ],
)
async def test_mistakes_in_the_configuration_are_named(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with component(**entry):
            pass


@pytest.mark.parametrize("entry", [{"scorer": "math"}, {"sources": {"mine/*": "math"}}])
async def test_a_missing_package_of_a_named_scorer_shows_at_the_start(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs math-verify: pip install"):
        async with component(**entry):
            pass


async def test_a_scorer_that_only_computes_is_ended_and_gives_zero(
    user_module: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user_module("own_scorers", MODULE)
    monkeypatch.setattr(process_pool, "SCORE_ADDRESS", "own_scorers:spins")
    pool = ScoringPool(("own_scorers:spins", "own_scorers:share"), 1)
    await pool.start()
    monkeypatch.setattr(process_pool, "CPU_SHARE", 0.01)
    async with asyncio.timeout(60):
        assert await pool.call("own_scorers:spins", item(""), 50.0) == 0.0
        assert await pool.call("own_scorers:share", item(""), 20.0, {"of": 4.0}) == 0.25
    await pool.close()
