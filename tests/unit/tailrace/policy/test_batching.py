"""Questions of one moment share a message; each caller gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tailrace.policy.batching import Batcher


class Sender:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def send(self, items: Sequence[int]) -> list[str]:
        self.batches.append(list(items))
        await asyncio.sleep(0)
        if 13 in items:
            raise LookupError("unlucky")
        return [str(item) for item in items]


async def test_items_of_one_tick_go_out_together_and_come_back_apart() -> None:
    sender = Sender()
    batcher = Batcher(sender.send)
    assert await asyncio.gather(*(batcher.submit(i) for i in range(5))) == list("01234")
    await batcher.submit(5)
    assert sender.batches == [[0, 1, 2, 3, 4], [5]]


async def test_items_within_the_delay_go_out_together() -> None:
    sender = Sender()
    batcher = Batcher(sender.send, delay_s=0.02)
    first = batcher.submit(1)
    await asyncio.sleep(0)
    assert await asyncio.gather(first, batcher.submit(2)) == ["1", "2"]
    assert sender.batches == [[1, 2]]


async def test_a_full_batch_goes_out_at_once() -> None:
    sender = Sender()
    batcher = Batcher(sender.send, delay_s=60, max_items=3)
    assert await asyncio.gather(*(batcher.submit(i) for i in range(6))) == list("012345")
    assert sender.batches == [[0, 1, 2], [3, 4, 5]]


async def test_a_batch_stays_below_its_size_but_one_item_may_exceed_it() -> None:
    sender = Sender()
    batcher = Batcher(sender.send, size_of=lambda item: item, max_size=10)
    await asyncio.gather(*(batcher.submit(i) for i in (4, 5, 3, 99, 1)))
    assert sender.batches == [[4, 5], [3], [99], [1]]


async def test_a_failed_send_fails_its_own_items_only() -> None:
    batcher = Batcher(Sender().send, max_items=2)
    answers = [batcher.submit(i) for i in (12, 13, 14, 15)]
    results = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(result) for result in results] == [LookupError, LookupError, str, str]


async def test_who_stopped_waiting_is_not_asked_for() -> None:
    sender = Sender()
    batcher = Batcher(sender.send)
    given_up, wanted = batcher.submit(1), batcher.submit(2)
    given_up.cancel()
    assert await wanted == "2"
    assert sender.batches == [[2]]


async def test_a_sender_that_answers_too_little_is_an_error_and_no_silence() -> None:
    async def send(items: Sequence[int]) -> list[str]:
        return ["only one"]

    batcher = Batcher(send)
    first, second = batcher.submit(1), batcher.submit(2)
    for answer in (first, second):
        with pytest.raises(RuntimeError, match="1 answers to 2 items"):
            await answer
