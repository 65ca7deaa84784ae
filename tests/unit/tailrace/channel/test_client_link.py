"""A client's link over a wire made of lists: what a lost, late or damaged frame does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from tailrace.channel import (
    Address,
    ChannelError,
    ClientChannelConfig,
    DuplicateCallError,
    GenerateCall,
)
from tailrace.channel.client import LinkedGenerateClient
from tailrace.channel.config import CLIENT_DEFAULTS
from tailrace.channel.frames import Credit, read_request_frame
from tailrace.channel.ports import LinkEvents, LinkLoss
from tailrace_protos.base import encode, pack_float32, pack_int32
from tailrace_protos.generation import (
    AbortRequest,
    ChunkFrame,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenSpan,
)
from tests.world.samples import sample

ADDRESS = Address("s1", "subject")


@dataclass
class ListWire:
    link: LinkEvents
    max_frame_bytes: int = 1 << 20
    frames: list[bytes] = field(default_factory=list)
    closed: bool = False

    def send(self, frame: bytearray) -> None:
        self.frames.append(bytes(frame))

    def close(self) -> None:
        self.closed = True

    @property
    def messages(self) -> list[object]:
        return [message for frame in self.frames for message in read_request_frame(frame).messages]


@dataclass
class ListTransport:
    wires: list[ListWire] = field(default_factory=list)

    async def start(self) -> None:
        """Nothing to do."""

    def open(self, address: Address, link: LinkEvents) -> ListWire:
        self.wires.append(ListWire(link))
        return self.wires[-1]

    async def close(self) -> None:
        """Nothing to do."""


class Fixture:
    def __init__(self, config: ClientChannelConfig = CLIENT_DEFAULTS) -> None:
        self.transport = ListTransport()
        self.client = LinkedGenerateClient(self.transport, config)

    def call(self, call_id: str) -> GenerateCall:
        return self.client.generate(ADDRESS, GenerateRequest(call_id, "e", pack_int32([1]), 4))

    @property
    def wire(self) -> ListWire:
        return self.transport.wires[-1]


def chunk(call_id: str, *ids: int, finish: FinishReason | None = None) -> TokenChunk:
    spans = (TokenSpan(1, "", len(ids)),) if ids else ()
    return TokenChunk(call_id, pack_int32(ids), pack_float32([-1.0] * len(ids)), spans, finish)


async def test_a_lost_chunk_frame_ends_every_call_with_the_tokens_before_it() -> None:
    made = Fixture()
    calls = [made.call("a"), made.call("b")]
    made.wire.link.on_frame(encode(ChunkFrame(0, 0, (chunk("a", 1, 2), chunk("b", 7)))))
    made.wire.link.on_frame(encode(ChunkFrame(2, 0, (chunk("a", 5, finish=FinishReason.STOP),))))
    for call, tokens in zip(calls, ([1, 2], [7]), strict=True):
        with pytest.raises(ChannelError, match="frame 2 came instead of 1") as raised:
            await call.collect()
        assert raised.value.partial.token_ids.tolist() == tokens
    assert made.wire.closed
    assert read_request_frame(made.wire.frames[-1]).closing


async def test_a_new_link_never_gets_frames_of_the_old_one() -> None:
    made = Fixture()
    made.call("a")
    old = made.wire
    old.link.on_frame(encode(ChunkFrame(9)))
    again = made.call("a")
    assert made.wire is not old
    old.link.on_frame(encode(ChunkFrame(0, 0, (chunk("a", 66, finish=FinishReason.STOP),))))
    made.wire.link.on_frame(encode(ChunkFrame(0, 0, (chunk("a", 5, finish=FinishReason.STOP),))))
    assert (await again.collect()).token_ids.tolist() == [5]


async def test_a_malformed_chunk_ends_only_its_call_and_stops_it_at_the_server() -> None:
    made = Fixture()
    bad, good = made.call("bad"), made.call("good")
    no_logprobs = TokenChunk("bad", pack_int32([3]), spans=(TokenSpan(1, "", 1),))
    last = chunk("good", 4, finish=FinishReason.STOP)
    made.wire.link.on_frame(encode(ChunkFrame(0, 0, (chunk("bad", 1), no_logprobs, last))))
    with pytest.raises(ChannelError, match="malformed chunk") as raised:
        await bad.collect()
    assert raised.value.partial.token_ids.tolist() == [1]
    assert (await good.collect()).token_ids.tolist() == [4]
    await asyncio.sleep(0)  # frames leave at the end of the tick
    assert AbortRequest(("bad",)) in made.wire.messages
    with pytest.raises(DuplicateCallError):
        made.call("bad")
    made.wire.link.on_frame(encode(ChunkFrame(1, 0, (chunk("bad", 2, finish=FinishReason.ABORT),))))
    made.call("bad")


async def test_a_chunk_that_cannot_be_attributed_ends_the_link() -> None:
    made = Fixture()
    call = made.call("a")
    made.wire.link.on_frame(encode(["chunk_frame", 0, 0, [{"type": "token_chunk", "call_id": 7}]]))
    with pytest.raises(ChannelError, match="malformed"):
        await call.collect()


async def test_calls_wait_while_the_server_has_not_confirmed_enough() -> None:
    made = Fixture(ClientChannelConfig(max_unconfirmed_bytes=1000))
    big = GenerateRequest("a", "e", pack_int32(range(300)), 4)
    made.client.generate(ADDRESS, big)
    await asyncio.sleep(0)
    waiting, aborted = made.call("b"), made.call("c")
    aborted.abort()
    assert (await aborted.collect()).finish_reason is FinishReason.ABORT
    await asyncio.sleep(0)
    assert [message.call_id for message in made.wire.messages] == ["a"]  # type: ignore[attr-defined]
    made.wire.link.on_frame(encode(ChunkFrame(0, 1)))
    await asyncio.sleep(0)
    assert [message.call_id for message in made.wire.messages] == ["a", "b"]  # type: ignore[attr-defined]
    made.wire.link.on_frame(encode(ChunkFrame(1, 2, (chunk("b", 1, finish=FinishReason.STOP),))))
    assert (await waiting.collect()).token_ids.tolist() == [1]


async def test_a_client_that_took_much_confirms_it_unasked() -> None:
    made = Fixture(ClientChannelConfig(max_unconfirmed_bytes=1000))
    made.call("a")
    await asyncio.sleep(0)
    made.wire.link.on_frame(encode(ChunkFrame(0, 1, (chunk("a", 1),))))
    assert len(made.wire.frames) == 1
    made.wire.link.on_frame(encode(ChunkFrame(1, 1, (chunk("a", *range(100)),))))
    assert read_request_frame(made.wire.frames[1]).received == 2


def test_credit_is_exhausted_from_its_limit_until_half_of_it_is_confirmed() -> None:
    credit = Credit(100)
    assert [credit.on_sent(40) for _ in range(4)] == [False, False, True, False]
    credit.on_received(10, 1)
    assert (credit.exhausted, credit.num_bytes) == (True, 120)
    credit.on_received(10, 3)
    assert (credit.exhausted, credit.num_bytes) == (False, 40)
    credit.on_received(5, 99)  # a peer that confirms what was never sent changes nothing
    assert (credit.exhausted, credit.num_bytes, credit.received) == (False, 0, 3)
    assert credit.owes_confirmation
    credit.on_sent(1)
    assert not credit.owes_confirmation


def num_ended() -> dict[str, float]:
    name = "tailrace_channel_ended_calls_total"
    return {
        outcome: sample(name, side="client", outcome=outcome)
        for outcome in ("finished", "failed", "lost")
    }


async def test_a_call_that_was_given_up_is_counted_once() -> None:
    before = num_ended()
    made = Fixture(ClientChannelConfig(silence_s=100.0, chunk_timeout_s=1.0))
    calls = [made.call("late"), made.call("silent")]
    for _ in range(2):
        made.client._links[ADDRESS].tick()
    assert all(call.ended for call in calls)
    calls += [made.call("garbled"), made.call("lost")]
    garbage = TokenChunk("garbled", memoryview(b"123"), memoryview(b""), (), FinishReason.STOP)
    answers = (chunk("late", finish=FinishReason.ABORT), garbage)
    made.wire.link.on_frame(encode(ChunkFrame(0, 0, answers)))
    made.wire.link.on_lost(LinkLoss.GAP, "test")
    assert all(call.ended for call in calls)
    assert {outcome: count - before[outcome] for outcome, count in num_ended().items()} == {
        "finished": 0,
        "failed": 0,
        "lost": 4,
    }
