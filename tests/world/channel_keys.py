"""Effects of each key of a `channel` section, measured in the process of the service that has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import zmq

from tailrace.channel import Address, ClientChannelConfig
from tests.world.run import RunWorld
from tests.world.samples import sample

NUM_CALLS = 16
# Nothing happens by itself within a test.
QUIET: dict[str, Any] = {"keepalive_s": 5.0, "silence_s": 60.0}
OFTEN: dict[str, Any] = {"keepalive_s": 0.05, "silence_s": 60.0}


class KeyCase(NamedTuple):
    """With `value` the measure reaches `least`, with the default (or `usual`) it does not."""

    key: str
    value: float
    peer: Literal["holding", "answering", "mute"]
    metric: str
    labels: Mapping[str, str]
    least: int = 1
    beside: Mapping[str, Any] = QUIET
    usual: float | None = None

    def section(self, is_changed: bool) -> dict[str, Any]:
        """The `channel` section with the key, or without it."""
        if is_changed:
            return {**self.beside, self.key: self.value}
        return {**self.beside, **({self.key: self.usual} if self.usual is not None else {})}

    def measured(self) -> float:
        """The metric now."""
        return sample(self.metric, **self.labels)


CLIENT = {"side": "client"}
OUT = {"side": "client", "direction": "out"}
FRAMES = "tailrace_channel_frames_total"
WAITING = "tailrace_channel_waiting_calls"
LOST = "tailrace_channel_lost_links_total"

CASES = [
    KeyCase("frame_bytes", 1, "holding", FRAMES, OUT, NUM_CALLS),
    KeyCase("max_unconfirmed_bytes", 1, "mute", WAITING, {}, 1, {**OFTEN, "frame_bytes": 1}),
    KeyCase("keepalive_s", 0.02, "holding", FRAMES, OUT, 2 * NUM_CALLS, usual=5.0),
    KeyCase("silence_s", 0.2, "mute", LOST, {**CLIENT, "cause": "silent"}, 1, OFTEN, 60.0),
    KeyCase("max_outstanding_calls", 2, "holding", WAITING, {}),
    KeyCase(
        "max_waiting_calls",
        1,
        "holding",
        "tailrace_channel_refused_calls_total",
        {**CLIENT, "reason": "full"},
        1,
        {**QUIET, "max_outstanding_calls": 1},
    ),
    KeyCase(
        "chunk_timeout_s",
        0.2,
        "holding",
        "tailrace_channel_ended_calls_total",
        {**CLIENT, "outcome": "lost"},
        1,
        OFTEN,
    ),
    KeyCase("idle_link_s", 0.1, "answering", LOST, {**CLIENT, "cause": "closed"}, 1, OFTEN),
]
assert {case.key for case in CASES} == set(ClientChannelConfig.__struct_fields__)


@asynccontextmanager
async def mute_server(world: RunWorld) -> AsyncIterator[Address]:
    """An address where a socket takes frames and nobody answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        endpoint = f"ipc://{world.folder}/mute.ipc"
        socket.bind(endpoint)
        yield Address("mute", "", endpoint)


async def check_key(case: KeyCase, is_changed: bool, begin: Callable[[], Awaitable[object]]) -> None:
    """Begin `NUM_CALLS` calls and see what the key changes."""
    before, begun = case.measured(), num_begun()
    await begin()
    if is_changed:
        async with asyncio.timeout(120):
            while case.measured() - before < case.least:
                await asyncio.sleep(0.01)
        return
    async with asyncio.timeout(60):
        while num_begun() - begun < NUM_CALLS:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert case.measured() - before < case.least


def num_begun() -> float:
    """Calls that were sent or wait for a place."""
    return sample("tailrace_channel_calls_total", **CLIENT) + sample(WAITING)
