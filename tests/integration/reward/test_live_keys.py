"""Keys of the section `reward`: changing one changes what a real reward service does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from tailrace.bus import Bus, CallFailedError
from tailrace.config import RunConfig
from tailrace.runtime import Args
from tailrace_protos import subjects
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.reward import ScoreReply, ScoreRequest
from tailrace_reward.__main__ import build
from tests.integration.reward.test_judge import Endpoint, endpoint, item, says, scorer
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of, eventually, serving

CONCURRENCY = 64  # handlers of one endpoint at once; the mailbox is beyond them
PID = """
import os, time

def pid(task, messages, metrics):
    time.sleep(0.2)
    return float(os.getpid())
"""


class Held(Endpoint):
    """Answers nobody until it is told to."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.free = asyncio.Event()

    async def complete(self, request: web.Request) -> web.Response:
        self.num_at_most += 1
        await self.free.wait()
        return self.answer(0, {})


def args(nats: ServerProcess, run: str, **reward: Any) -> Args:
    experiment = {"exp_name": run, "reward": reward}
    return Args("run.yaml", "r0", experiment, RunConfig(exp_name=run), endpoints_of(nats.url))


def ask(bus: Bus, run: str, *answers: str) -> list[asyncio.Task[ScoreReply | CallErrorCode]]:
    """Requests of one item each, all at once."""

    async def score(answer: str) -> ScoreReply | CallErrorCode:
        request = ScoreRequest((item(answer),))
        try:
            return await bus.request(subjects.score(run), request, ScoreReply, timeout_s=60)
        except CallFailedError as error:
            return error.code

    return [asyncio.create_task(score(answer)) for answer in answers]


async def test_mailbox(bus: Bus, nats_server: ServerProcess, run_name: str) -> None:
    """So many requests wait for those that run; the others are refused at once."""
    async with endpoint(lambda *_: says("Score: 3"), Held) as model:
        assert isinstance(model, Held)
        judge = {"base_url": model.url, "model": "m", "prompt": "?", "max_concurrency": CONCURRENCY}
        entry = {"name": "q", "kind": "judge", "judge": judge, "timeout_s": 60.0}
        async with serving(await build(args(nats_server, run_name, mailbox=2, rewards=[entry]))):
            running = ask(bus, run_name, *map(str, range(CONCURRENCY)))
            await eventually(lambda: model.num_at_most == CONCURRENCY)
            more = ask(bus, run_name, "a", "b", "c", "d", "e")
            await eventually(lambda: sum(task.done() for task in more) == 3)
            model.free.set()
            ends = await asyncio.gather(*more)
            assert sorted(map(str, ends)).count(str(CallErrorCode.OVERLOADED)) == 3
            assert all(isinstance(end, ScoreReply) for end in await asyncio.gather(*running))


@pytest.mark.parametrize("drain_s", [0.1, 20.0])
async def test_drain_s(bus: Bus, nats_server: ServerProcess, run_name: str, drain_s: float) -> None:
    """A request that ends within this time after SIGTERM is answered."""
    async with endpoint(lambda *_: says("Score: 3"), Held) as model:
        assert isinstance(model, Held)
        judge = {"base_url": model.url, "model": "m", "prompt": "?"}
        entry = {"name": "q", "kind": "judge", "judge": judge, "timeout_s": 60.0}
        service = await build(args(nats_server, run_name, drain_s=drain_s, rewards=[entry]))
        async with serving(service) as served:
            (asked,) = ask(bus, run_name, "a")
            await eventually(lambda: model.num_at_most == 1)
            service.stop("end of test")
            if drain_s < 1:
                await eventually(served.done)
            else:
                await asyncio.sleep(0.5)
                assert not served.done()
            model.free.set()
            if drain_s > 1:
                assert isinstance(await asked, ScoreReply)
        asked.cancel()


async def test_num_processes(
    bus: Bus, nats_server: ServerProcess, run_name: str, user_module: Callable[[str, str], str]
) -> None:
    """One process plays all calls; by default there are two."""
    user_module("pid_rewards", PID)
    entry = {"name": "pid", "kind": "function", "function": "pid_rewards:pid", "timeout_s": 60.0}
    async with serving(await build(args(nats_server, run_name, num_processes=1, rewards=[entry]))):
        replies = await asyncio.gather(*ask(bus, run_name, "a", "b"))
    assert all(isinstance(reply, ScoreReply) for reply in replies)
    pids = {score.reward for reply in replies for score in reply.scores}  # type: ignore[union-attr]
    assert len(pids) == 1
    assert pids != {0.0}


@pytest.mark.parametrize(("min_score", "expected"), [(0.0, 1.0), (2.0, 5.0)])
async def test_judge_min_score(min_score: float, expected: float) -> None:
    """A number below it is no score: the judge is asked again."""
    async with (
        endpoint(lambda count, _: says("Score: 1" if count == 1 else "Score: 5")) as model,
        scorer(model.url, min_score=min_score) as made,
    ):
        (score,) = await made.score([item()])
    assert score.reward == expected
