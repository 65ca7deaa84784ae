"""Workflows in the event loop and in real processes: what they return, print, how they hang and die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.sdk.workflow import WorkflowEnd, load_workflow
from tailrace_agents.adapters.workflow_inline import InlineRunner
from tailrace_agents.adapters.workflow_pool import SubprocRunner
from tailrace_agents.config import WorkflowArgs
from tailrace_protos.episode import Outcome
from tailrace_protos.session import SessionOpened
from tests.world.processes import is_alive

MODULE = '''
import asyncio, ctypes, os, subprocess, sys, time

class Agent:
    """Does what its row says."""
    def __init__(self, greeting="hello"):
        self.greeting = greeting
        self.left_behind = None

    async def run(self, data, base_url, api_key, http_client):
        return await getattr(self, data["do"])(data, base_url, api_key, http_client)

    async def returns(self, data, *_):
        data["value"].append(1)
        return sum(data["value"])

    async def pid(self, data, *_):
        await asyncio.sleep(0.02)
        return float(os.getpid())

    async def environment(self, data, base_url, api_key, http_client):
        found = (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"],
                 os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"])
        return float(found == (base_url, api_key, base_url.removesuffix("/v1"), api_key))

    async def num_secrets(self, data, *_):
        return float(sum("secret" in value for value in os.environ.values()))

    async def chats(self, data, *_):
        print("out"); sys.stdout.write("more"); sys.stdout.flush(); os.write(1, b"raw")
        try:
            input()
        except EOFError:
            return float(len(self.greeting))

    async def has_httpx2(self, data, base_url, api_key, http_client):
        kinds = type(http_client).__mro__
        return float(any(kind.__module__.partition(".")[0] == "httpx2" for kind in kinds))

    async def raises(self, data, *_):
        raise LookupError("nothing there")

    async def leaves(self, data, *_):
        sys.exit(3)

    async def cancels(self, data, *_):
        raise asyncio.CancelledError

    async def spins(self, data, *_):
        try:
            while True:
                pass
        except Exception:
            return 0.0

    async def waits(self, data, *_):
        await asyncio.sleep(3600)

    async def exits(self, data, *_):
        os._exit(7)

    async def crashes(self, data, *_):
        ctypes.string_at(0)

    async def spawns(self, data, *_):
        child = subprocess.Popen(["sleep", "3600"])
        with open(data["path"], "w") as file:
            file.write(str(child.pid))
        while True:
            pass

    async def leaves_a_task(self, data, *_):
        self.left_behind = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        return 1.0

    async def looks_at_the_task(self, data, *_):
        return float(self.left_behind.cancelled())

class Broken:
    def __init__(self):
        raise ValueError("no licence")

class Dying:
    def __init__(self):
        os._exit(9)
'''
ACCESS = SessionOpened("g0.0", "http://127.0.0.1:1/v1", "key-of-g0.0")


@pytest.fixture(autouse=True)
def module(user_module: Callable[[str, str], str]) -> None:
    user_module("row_agents", MODULE)


def args(**changes: Any) -> WorkflowArgs:
    return WorkflowArgs(agent="row_agents.Agent", **changes)


@asynccontextmanager
async def inline(**changes: Any) -> AsyncIterator[InlineRunner]:
    made = InlineRunner(load_workflow("row_agents.Agent", {}, "agents.workflow.agent"), args(**changes))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def subproc(num_workers: int = 1, **changes: Any) -> AsyncIterator[SubprocRunner]:
    made = SubprocRunner(args(subproc_max_workers=num_workers, **changes))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def play(
    runner: InlineRunner | SubprocRunner, do: str, timeout_s: float = 30.0, **data: Any
) -> WorkflowEnd:
    async with runner.seat() as seat:
        return await seat.run({"do": do, **data}, ACCESS, timeout_s)


@pytest.fixture(params=[inline, subproc])
async def runner(request: pytest.FixtureRequest) -> AsyncIterator[InlineRunner | SubprocRunner]:
    async with request.param() as made:
        yield made


async def test_a_row_becomes_a_reward_and_stays_as_it_was(runner: Any) -> None:
    values = [0.25, 0.5]
    assert (await play(runner, "returns", value=values)).rewards == {"": 1.75}
    assert values == [0.25, 0.5]


@pytest.mark.parametrize(
    ("do", "outcome", "reason"),
    [
        ("raises", Outcome.INFRA_FAILURE, "LookupError: nothing there"),
        ("leaves", Outcome.INFRA_FAILURE, "tried to end its process"),
        ("cancels", Outcome.INFRA_FAILURE, "cancelled itself"),
    ],
)
async def test_a_bad_end_is_that_episodes_alone(
    runner: Any, do: str, outcome: Outcome, reason: str
) -> None:
    end = await play(runner, do)
    assert end.outcome is outcome
    assert reason in end.reason
    assert (await play(runner, "returns", value=[1])).outcome is Outcome.OK


async def test_a_run_that_waits_too_long_is_a_timeout(runner: Any) -> None:
    end = await play(runner, "waits", timeout_s=0.2)
    assert (end.outcome, end.reason) == (Outcome.TIMEOUT, "the workflow took more than 0.2 s")
    assert (await play(runner, "returns", value=[1])).outcome is Outcome.OK


async def test_cancelling_an_inline_episode_ends_its_run() -> None:
    async with inline() as runner:
        before = len(asyncio.all_tasks())
        playing = asyncio.create_task(play(runner, "waits"))
        await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert len(asyncio.all_tasks()) == before


async def test_an_inline_run_that_computes_for_ever_is_interrupted_and_the_others_go_on() -> None:
    async with inline(max_blocked_s=2.0) as runner:
        other = asyncio.create_task(play(runner, "pid"))
        end = await asyncio.wait_for(play(runner, "spins"), 60)
        assert end.outcome is Outcome.TIMEOUT
        assert "held the event loop" in end.reason
        assert "subproc" in end.reason
        assert (await other).outcome is Outcome.OK


async def test_processes_have_their_own_environment_and_keep_nothing_of_the_run_before() -> None:
    async with subproc(kwargs={"greeting": "hi"}, http_library="httpx") as runner:
        assert (await play(runner, "environment")).rewards == {"": 1.0}
        assert (await play(runner, "has_httpx2")).rewards == {"": 0.0}, "agents.workflow.http_library"
        assert (await play(runner, "chats")).rewards == {"": 2.0}, "printing and reading"
        await play(runner, "leaves_a_task")
        assert (await play(runner, "looks_at_the_task")).rewards == {"": 1.0}


async def test_processes_get_no_credentials_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NATS_URL", "NATS_PASSWORD", "REDIS_URL", "REDIS_PASSWORD", "GATEWAY_ADMIN_KEY"):
        monkeypatch.setenv(f"TAILRACE_{name}", "secret")
    monkeypatch.setenv("MY_KEY", "a secret of the user's own")
    async with subproc() as runner:
        assert (await play(runner, "num_secrets")).rewards == {"": 1.0}


async def test_a_process_plays_one_episode_at_a_time_and_lives_on() -> None:
    async with subproc(num_workers=2) as runner:
        ends = await asyncio.gather(*(play(runner, "pid") for _ in range(6)))
        assert len({end.rewards[""] for end in ends}) == 2


async def test_a_run_that_computes_for_ever_is_killed_at_its_timeout_and_replaced() -> None:
    async with subproc() as runner:
        first = (await play(runner, "pid")).rewards[""]
        end = await play(runner, "spins", timeout_s=0.5)
        assert (end.outcome, end.reason) == (Outcome.TIMEOUT, "the workflow took more than 0.5 s")
        assert (await play(runner, "pid")).rewards[""] != first


@pytest.mark.parametrize(("do", "reason"), [("exits", "exit code 7"), ("crashes", "signal SIGSEGV")])
async def test_a_run_that_kills_its_process_is_an_infrastructure_failure(do: str, reason: str) -> None:
    async with subproc() as runner:
        end = await play(runner, do)
        assert end.outcome is Outcome.INFRA_FAILURE
        assert reason in end.reason
        assert (await play(runner, "returns", value=[1])).outcome is Outcome.OK


async def test_a_process_that_ends_between_two_runs_costs_no_run() -> None:
    async with subproc() as runner:
        pid = int((await play(runner, "pid")).rewards[""])
        (process,) = runner._pool._all
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not process.has_ended:
                await asyncio.sleep(0.01)
        assert (await play(runner, "returns", value=[1])).rewards == {"": 2.0}


async def test_what_a_run_started_ends_with_it(tmp_path: Path) -> None:
    async with subproc() as runner:
        path = tmp_path / "pid"
        assert (await play(runner, "spawns", 5.0, path=str(path))).outcome is Outcome.TIMEOUT
        async with asyncio.timeout(60):
            while is_alive(int(path.read_text())):
                await asyncio.sleep(0.01)


async def test_an_abandoned_run_does_not_answer_the_next_one() -> None:
    async with subproc() as runner:
        abandoned = asyncio.create_task(play(runner, "waits"))
        await asyncio.sleep(0.1)
        abandoned.cancel()
        assert (await play(runner, "returns", value=[1])).rewards == {"": 2.0}


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("row_agents.Broken", "ValueError: no licence"),
        ("row_agents.Dying", "exit code 9"),
        ("row_agents.Nobody", "has no 'Nobody'"),
        ("no_such_agents.Agent", "no_such_agents"),
    ],
)
async def test_a_workflow_that_cannot_be_made_ends_the_start(agent: str, reason: str) -> None:
    runner = SubprocRunner(WorkflowArgs(agent=agent))
    with pytest.raises(ConfigError, match=r"agents\.workflow\.agent") as caught:
        await runner.start()
    await runner.close()
    assert reason in str(caught.value)


async def test_an_interpreter_that_is_not_there_ends_the_start() -> None:
    runner = SubprocRunner(args(mode="subproc", python="/no/such/python"))
    told = r"agents\.workflow\.python: cannot start /no/such/python: .* make that environment"
    with pytest.raises(ConfigError, match=told):
        await runner.start()
