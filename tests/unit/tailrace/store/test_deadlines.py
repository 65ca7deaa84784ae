"""Answers that are waited for equally long."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.store.errors import StoreUnavailableError
from tailrace.store.pipeline import Deadlines


class LateError(Exception):
    """Error of a late answer."""


async def test_an_answer_that_does_not_come_in_time_fails_and_others_do_not() -> None:
    deadlines = Deadlines(0.01, LateError)
    loop = asyncio.get_running_loop()
    early, late, later = (loop.create_future() for _ in range(3))
    for answer in (early, late, later):
        deadlines.add(answer)
    early.set_result("in time")
    for answer in (late, later):
        with pytest.raises(LateError):
            await answer
    assert early.result() == "in time"


async def test_nothing_fails_after_closing() -> None:
    deadlines = Deadlines(0.0, LateError)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    deadlines.add(answer)
    deadlines.close()
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, done.set_result, None)
    await done
    assert not answer.done()


@pytest.mark.parametrize(("waited_s", "told"), [(0.25, "0.25 s"), (5.0, "5 s"), (300.012, "300 s")])
def test_the_error_says_how_long_it_waited(waited_s: float, told: str) -> None:
    assert f"did not answer for {told}" in str(StoreUnavailableError("redis://h", waited_s, "away"))
