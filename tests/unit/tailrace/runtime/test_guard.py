"""The one place where unexpected exceptions are caught."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.config import ConfigError
from tailrace.runtime import Failure, HandBack, StopService
from tailrace.runtime.guard import Guard, Tasks


async def fails(error: BaseException) -> int:
    raise error


async def works() -> int:
    return 3


class Orders:
    """Orders of the guard to the service."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int]] = []
        self.guard = Guard(lambda reason, code: self.given.append((reason, code)))


async def test_results_pass_through() -> None:
    assert await Orders().guard.run("here", works()) == 3


async def test_an_unexpected_exception_becomes_a_typed_failure() -> None:
    orders = Orders()
    failure = await orders.guard.run("here", fails(ValueError("no")))
    assert failure == Failure("here", "ValueError", "no")
    assert orders.given == []


async def test_the_only_exception_of_a_task_group_is_told_as_itself() -> None:
    group = ExceptionGroup("unhandled errors", [ExceptionGroup("again", [ValueError("no")])])
    failure = await Orders().guard.run("here", fails(group))
    assert failure == Failure("here", "ValueError", "no")


async def test_an_exception_without_words_is_named_by_its_type() -> None:
    assert await Orders().guard.run("here", fails(KeyError())) == Failure(
        "here", "KeyError", "KeyError"
    )


async def test_expected_exceptions_and_cancellation_pass_through() -> None:
    guard = Orders().guard
    with pytest.raises(HandBack):
        await guard.run("here", fails(HandBack(1.0)), expected=(HandBack,))
    assert isinstance(await guard.run("here", fails(HandBack(1.0))), Failure)
    begun = asyncio.Event()

    async def waits() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(guard.run("here", waits()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_nobody_ordered_is_a_failure_and_its_loop_begins_again() -> None:
    guard = Orders().guard
    failure = Failure("here", "CancelledError", "CancelledError")
    assert await guard.run("here", fails(asyncio.CancelledError())) == failure
    tasks, num_runs, again = Tasks(guard), 0, asyncio.Event()

    async def awaits_a_cancelled_task() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 2:
            again.set()
        other = asyncio.create_task(works())
        other.cancel()
        await other

    tasks.loop("loop", awaits_a_cancelled_task)
    await asyncio.wait_for(again.wait(), 60)
    await tasks.end()


async def test_orders_to_stop_reach_the_service() -> None:
    orders = Orders()
    await orders.guard.run("here", fails(StopService(3, "enough")))
    await orders.guard.run("here", fails(ConfigError("wrong key")))
    assert orders.given == [("enough", 3), ("wrong key", 2)]
