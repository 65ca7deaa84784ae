"""Sessions that nobody can decode: set aside, told to the agent, and opened again."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.store import StoreConnection
from tailrace_protos.base import encode
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import FinishReason
from tailrace_protos.session import LedgerNode, RewardSet
from tests.integration.gateway.replicas import two_replicas
from tests.world.gateway import GatewayWorld

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
SPLIT = LedgerNode(
    "c", "", (), b"\1\0\0\0\2\0\0", b"", b"", (), FinishReason.STOP, ChatMessage("assistant", "")
)
GARBAGE = [
    b"",
    b"\xc1",
    encode(RewardSet("", 1.0))[:-3],
    b"\xff" * 1000,
    b"\x91" * 5000,
    encode(SPLIT),  # its ids are no whole numbers
    encode(msgspec.structs.replace(SPLIT, parent_id="unknown", inserted_ids=b"")),
]


async def kept(redis: StoreConnection, run: str, session_id: str) -> list[bytes]:
    """The bytes that were set aside."""
    data = await redis.command("GET", f"{{{run}}}:quarantine:session:{session_id}")
    assert isinstance(data, bytes)
    return msgspec.msgpack.decode(data, type=tuple[str, list[bytes]])[1]


async def test_a_session_goes_on_while_its_log_is_sound(world: GatewayWorld) -> None:
    for client in await two_replicas(world, await world.open()):
        assert (await client.post("chat/completions", json=BODY)).status_code == 200
    assert (await world.export()).metrics["num_calls"] == 2


@pytest.mark.parametrize("place", ["log", "record"])
@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_corrupted_session_is_over_and_may_be_opened_again(
    place: str, garbage: bytes, world: GatewayWorld, redis: StoreConnection
) -> None:
    opened = await world.open()
    first, other = await two_replicas(world, opened)
    assert (await first.post("chat/completions", json=BODY)).status_code == 200
    prefix, session_id = f"{{{world.run}}}:", opened.session_id
    if place == "log":
        await redis.command("RPUSH", f"{prefix}session_log:{session_id}", garbage)
    else:
        await redis.command("HSET", f"{prefix}session:{session_id}", "record", garbage)
    refused = await other.post("chat/completions", json=BODY)
    assert refused.status_code == 410, refused.text
    assert refused.json()["error"]["code"] == "session_corrupted"
    assert garbage in await kept(redis, world.run, session_id)
    await first.post("chat/completions", json=BODY)  # its append tells this replica
    assert (await first.post("chat/completions", json=BODY)).status_code in (401, 410)
    again = await world.open()
    assert again.api_key != opened.api_key
    assert (await world.http(again).post("chat/completions", json=BODY)).status_code == 200
    assert (await world.export()).metrics["num_calls"] == 1


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_an_export_of_a_corrupted_session_is_refused_by_name(
    garbage: bytes, world: GatewayWorld, redis: StoreConnection
) -> None:
    opened = await world.open()
    client = world.http(opened)
    assert (await client.post("chat/completions", json=BODY)).status_code == 200
    await redis.command("RPUSH", f"{{{world.run}}}:session_log:{opened.session_id}", garbage)
    refused = await client.post("sessions/current/export", json={})
    assert refused.status_code == 410, refused.text
    assert refused.json()["error"]["code"] == "session_corrupted"


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_retry_that_finds_a_corrupted_answer_is_told_so(
    garbage: bytes, world: GatewayWorld, redis: StoreConnection
) -> None:
    opened = await world.open()
    client = world.http(opened)
    first = {"x-stainless-retry-count": "0"}
    assert (await client.post("chat/completions", json=BODY, headers=first)).status_code == 200
    key = f"{{{world.run}}}:session:{opened.session_id}"
    fields = await redis.command("HGETALL", key)
    assert isinstance(fields, list)
    (answer,) = (name for name in fields[::2] if name.startswith(b"a:"))
    await redis.command("HSET", key, answer, garbage or b"\x00")  # empty: no answer
    again = {"x-stainless-retry-count": "1"}
    refused = await client.post("chat/completions", json=BODY, headers=again)
    assert refused.status_code == 410, refused.text
    assert refused.json()["error"]["code"] == "session_corrupted"
    assert (garbage or b"\x00") in await kept(redis, world.run, opened.session_id)
    assert (await world.http(await world.open()).post("chat/completions", json=BODY)).status_code == 200
