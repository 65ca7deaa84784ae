"""Long texts are encoded in a thread, while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
from numpy.typing import NDArray

from tailrace.chat.long_texts import LONG_CHARS, encode_or_defer, with_long_texts
from tailrace.ledger import Ledger
from tailrace_protos.chat import ChatMessage
from tests.unit.tailrace.chat.families import QWEN, renderer

DEADLINE_S = 20.0


def test_the_loop_runs_while_a_long_text_is_encoded() -> None:
    """The encoder waits for the loop, which could not answer if the encoder held it."""
    from_loop = threading.Event()
    places: list[str] = []

    def encode(text: str) -> NDArray[np.int32]:
        assert from_loop.wait(DEADLINE_S)
        places.append(threading.current_thread().name)
        return np.full(len(text), 7, np.int32)

    def prepare() -> int:
        assert threading.current_thread() is threading.main_thread()
        first = encode_or_defer("a" * LONG_CHARS, encode)
        return len(first) + len(encode_or_defer("b" * LONG_CHARS * 2, encode))

    async def both() -> int:
        preparing = asyncio.create_task(with_long_texts(prepare))
        await asyncio.sleep(0)
        from_loop.set()
        return await preparing

    assert asyncio.run(both()) == 3 * LONG_CHARS
    assert len(places) == 2
    assert all(place.startswith("encode") for place in places)


def test_prompts_are_the_same_and_callers_do_not_mix_them() -> None:
    """Eight conversations at once get the ids that each gets alone."""
    conversations = [(ChatMessage("user", f"{number} go left\n" * 4_000),) for number in range(8)]

    async def together() -> list[NDArray[np.int32]]:
        ledgers = [Ledger(renderer(QWEN)) for _ in conversations]
        prompts = [
            with_long_texts(lambda ledger=ledger, said=said: ledger.prepare(said))
            for ledger, said in zip(ledgers, conversations, strict=True)
        ]
        return [prompt.prompt_ids for prompt in await asyncio.gather(*prompts)]

    for said, found in zip(conversations, asyncio.run(together()), strict=True):
        np.testing.assert_array_equal(found, renderer(QWEN).opening_ids(said))
