"""Reward functions in real processes: what they raise, how they hang, how they die."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_reward.adapters.process_pool import FunctionLoadError, ScoringPool
from tailrace_reward.ports import ComponentFailedError

MODULE = """
import asyncio, os, sys, time
import numpy as np

print("printed while importing")

def count_words(task, messages, metrics):
    print("printed by a reward")
    return sum(len(m.content.split()) for m in messages if m.role == "assistant") + task.seed

async def awaited(task, messages, metrics):
    await asyncio.sleep(0)
    return metrics["success"]

def raises(task, messages, metrics):
    raise LookupError("nothing there")

async def raises_later(task, messages, metrics):
    await asyncio.sleep(0)
    raises(task, messages, metrics)

def raises_half_a_character(task, messages, metrics):
    raise LookupError("half \\ud800")

class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")

def raises_without_words(task, messages, metrics):
    raise Unspeakable

def raises_a_book(task, messages, metrics):
    raise LookupError("long " * 1_000_000)

def returns_text(task, messages, metrics):
    return "many"

VALUES = [np.float32(1), np.bool_(True), np.array([1.0, 2.0]), None, {}, [1.0], 10**400, "1"]

def returns_value(task, messages, metrics):
    return VALUES[task.seed]

def spins(task, messages, metrics):
    while True:
        pass

def sleeps(task, messages, metrics):
    time.sleep(task.seed / 1000)
    return os.getpid()

def exits(task, messages, metrics):
    os._exit(7)

def leaves(task, messages, metrics):
    sys.exit(3)

def num_secrets(task, messages, metrics):
    return sum("secret" in value for value in os.environ.values())

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def module(user_module: Callable[[str, str], str]) -> None:
    user_module("user_rewards", MODULE)
    user_module("broken_rewards", "import nowhere_to_be_found")


def item(seed: int = 0) -> ScoreItem:
    messages = (ChatMessage("user", "a b c"), ChatMessage("assistant", "go left"))
    return ScoreItem("g0.0", EnvTask("lake", seed), messages, (), {"success": 1.0})


@asynccontextmanager
async def pool(*names: str, num_processes: int = 1) -> AsyncIterator[ScoringPool]:
    made = ScoringPool([f"user_rewards:{name}" for name in names], num_processes)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_plain_and_async_functions_give_their_numbers_whatever_they_print() -> None:
    async with pool("count_words", "awaited") as made:
        assert await made.call("user_rewards:count_words", item(5), 60) == 7.0
        assert await made.call("user_rewards:awaited", item(), 60) == 1.0


async def test_functions_get_no_credentials_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NATS_URL", "NATS_PASSWORD", "REDIS_URL", "REDIS_PASSWORD", "GATEWAY_ADMIN_KEY"):
        monkeypatch.setenv(f"TAILRACE_{name}", "secret")
    monkeypatch.setenv("MY_KEY", "a secret of the user's own")
    async with pool("num_secrets") as made:
        assert await made.call("user_rewards:num_secrets", item(), 60) == 1.0


async def test_exceptions_and_nonsense_are_failures_of_the_call_and_the_process_goes_on() -> None:
    names = ("raises", "raises_later", "returns_text", "sleeps")
    at = r"at (user_rewards\.py:\d+ raises_later > )?user_rewards\.py:\d+ raises"
    async with pool(*names) as made:
        pid = await made.call("user_rewards:sleeps", item(), 60)
        for name in names[:2]:
            with pytest.raises(ComponentFailedError, match=rf"LookupError: nothing there \({at}\)"):
                await made.call(f"user_rewards:{name}", item(), 60)
        with pytest.raises(ComponentFailedError, match="returned str: let it return one number"):
            await made.call("user_rewards:returns_text", item(), 60)
        assert await made.call("user_rewards:sleeps", item(), 60) == pid


async def test_a_value_that_is_no_number_is_told_by_its_type() -> None:
    wrong = {2: "ndarray", 3: "NoneType", 4: "dict", 5: "list", 6: "int", 7: "str"}
    async with pool("returns_value") as made:
        for number in (0, 1):
            assert await made.call("user_rewards:returns_value", item(number), 60) == 1.0
        for number, kind in wrong.items():
            with pytest.raises(ComponentFailedError, match=f"returned {kind}"):
                await made.call("user_rewards:returns_value", item(number), 60)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises_half_a_character", r"LookupError: half \?"),
        ("raises_without_words", r"Unspeakable: \(its text cannot be computed\)"),
        ("raises_a_book", r"LookupError: (long )+\.\.\. \(5000000 characters\)"),
    ],
)
async def test_an_error_is_told_whatever_its_text_is(name: str, reason: str) -> None:
    async with pool(name, "sleeps") as made:
        pid = await made.call("user_rewards:sleeps", item(), 60)
        with pytest.raises(ComponentFailedError, match=reason) as caught:
            await made.call(f"user_rewards:{name}", item(), 60)
        assert len(str(caught.value)) < 30_000
        assert await made.call("user_rewards:sleeps", item(), 60) == pid


async def test_a_function_stuck_in_computation_is_killed_and_others_are_not_held_up() -> None:
    async with pool("spins", "sleeps", num_processes=2) as made:
        started_s = time.monotonic()
        stuck = asyncio.create_task(made.call("user_rewards:spins", item(), 1.0))
        await made.call("user_rewards:sleeps", item(1), 60)
        with pytest.raises(ComponentFailedError, match="took more than 1 s"):
            await stuck
        assert time.monotonic() - started_s < 60
        pids = await asyncio.gather(*(made.call("user_rewards:sleeps", item(50), 60) for _ in range(4)))
        assert len(set(pids)) == 2
        assert all(os.path.exists(f"/proc/{int(pid)}") for pid in pids)


async def test_calls_one_after_another_need_one_process() -> None:
    async with pool("sleeps", num_processes=3) as made:
        pids = {await made.call("user_rewards:sleeps", item(), 60) for _ in range(3)}
    assert len(pids) == 1


@pytest.mark.parametrize(("name", "code"), [("exits", "7"), ("leaves", "3")])
async def test_a_function_that_ends_its_process_fails_alone(name: str, code: str) -> None:
    async with pool(name, "count_words") as made:
        with pytest.raises(ComponentFailedError, match=f"exit code {code}"):
            await made.call(f"user_rewards:{name}", item(), 60)
        assert await made.call("user_rewards:count_words", item(), 60) == 2.0


async def test_an_abandoned_call_does_not_answer_the_next_one() -> None:
    async with pool("sleeps", "count_words") as made:
        abandoned = asyncio.create_task(made.call("user_rewards:sleeps", item(60_000), 100))
        await asyncio.sleep(0.05)
        abandoned.cancel()
        assert await made.call("user_rewards:count_words", item(), 60) == 2.0


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("user_rewards:missing", "has no function missing"),
        ("user_rewards:not_a_function", "has no function not_a_function"),
        ("broken_rewards:f", "nowhere_to_be_found"),
        ("no_such_module_at_all:f", "no_such_module_at_all"),
    ],
)
async def test_functions_that_cannot_be_loaded_show_at_the_start(address: str, reason: str) -> None:
    with pytest.raises(FunctionLoadError, match=reason) as caught:
        await ScoringPool([address], 1).start()
    assert set(caught.value.errors) == {address}


async def test_closing_leaves_no_process() -> None:
    async with pool("sleeps") as made:
        pid = int(await made.call("user_rewards:sleeps", item(), 60))
    assert not os.path.exists(f"/proc/{pid}")
