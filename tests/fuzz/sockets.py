"""Targets behind sockets: running services on a real nats-server, Valkey, ZMQ and HTTP.

Every input is answered, or skipped by the service; an internal error, silence or a service that does
not answer afterwards is a crash.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nats.errors
import pytest
import structlog
import zmq
import zmq.asyncio

from tailrace.bus import Bus
from tailrace.bus.calls import CODE_HEADER, REASON_HEADER
from tailrace.runtime import Args, Service
from tailrace.sdk.tool import tool
from tailrace.store import Journal, Outbox, OutsideEpisodes, SessionLogs, TrajectoryBuffer
from tailrace.tools import ToolClient, ToolWorker
from tailrace_gateway.adapters.episodes import EndBody, TrajectoryBody
from tailrace_gateway.adapters.sessions import ExportBody, OpenSessionBody, RewardBody
from tailrace_protos import subjects
from tailrace_protos.base import encode
from tailrace_protos.control import AgentActivity, LeaseReport, LeaseRequest, SchedulerBegan
from tailrace_protos.event import EventBody, RunFinished
from tailrace_protos.generation import RequestFrame
from tailrace_protos.journal import JournalRecord
from tailrace_protos.reward import ScoreReply, ScoreRequest
from tailrace_protos.session import (
    CloseSession,
    ExportSession,
    LedgerNode,
    OpenSession,
    OutsideOffer,
    OutsideResult,
    SessionClosed,
    SessionLimits,
)
from tailrace_protos.tool import CallTool, CancelTools, ProbeTools, ReleaseToolSession
from tailrace_protos.trajectory import Trajectory
from tailrace_protos.weights import (
    CurrentWeightsReply,
    CurrentWeightsRequest,
    OfferWeights,
    RouteRequest,
    WeightsApplied,
)
from tailrace_weight_sync.__main__ import build as build_weight_sync
from tests.fuzz.campaign import Tally, _noted, rss_mib
from tests.fuzz.decoders import _DIALECTS, _NODE, RefusedError, Target
from tests.integration.store.made import group, trajectory
from tests.world.gateway import ADMIN_KEY, GatewayWorld, gateway_world
from tests.world.servers import make_nats_server, make_redis_server

RUN = "fuzz"
ANSWER_S = 60.0
_AT_ONCE = 16
_WARM = 10  # share of the inputs, as a divisor, before memory is measured
Send = Callable[[bytes], Awaitable[None]]


class SocketTarget(NamedTuple):
    """A boundary with its way in."""

    inputs: Target
    send: Send


def _over(name: str, kind: Any, send: Send, **options: Any) -> SocketTarget:
    return SocketTarget(Target(f"socket/{name}", kind, lambda _: None, **options), send)


def _tool_targets(doors: Doors, worker: str) -> list[SocketTarget]:
    call = {"type": "call_tool", "call_id": "c", "name": "echo", "arguments": {"text": "1"}}
    to_worker = (CallTool, ProbeTools, CancelTools, ReleaseToolSession)
    return [
        _over("tool/call", CallTool, doors.call_tool, base=call),
        *(
            _over(f"tool_worker/{kind.__name__}", kind, partial(doors.tell, worker))
            for kind in to_worker
        ),
    ]


class InternalError(Exception):
    """A service answered that it failed, or did not answer."""


class Doors:
    """Ways into the running services of one run."""

    def __init__(self, world: GatewayWorld) -> None:
        self._world = world
        self._client = world.service.bus.connection.client
        self._context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
        self._number = 0

    async def ask(self, subject: str, data: bytes) -> None:
        """Sends a request over NATS; the service answers it."""
        try:
            answer = await self._client.request(subject, data, timeout=ANSWER_S)
        except nats.errors.TimeoutError as error:
            raise InternalError(f"{subject} does not answer") from error
        headers = answer.headers or {}
        code = headers.get(CODE_HEADER, "")
        if code == "500":
            raise InternalError(f"{subject}: {headers.get(REASON_HEADER)}")
        if code:
            raise RefusedError(headers.get(REASON_HEADER, ""))

    async def tell(self, subject: str, data: bytes) -> None:
        """Publishes over NATS; nobody answers."""
        await self._client.publish(subject, data)

    async def call_tool(self, data: bytes) -> None:
        """Calls a tool under an id of its own; a malformed call is refused, another one accepted."""
        self._number += 1
        await self.ask(subjects.tool("echo", RUN), data.replace(b"\xa1c", b"\xa8%08d" % self._number))

    async def frame(self, data: bytes) -> None:
        """Sends a frame to the generation socket as a client of its own."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 1000)
        dealer.connect(self._world.scheduler.addresses[0].zmq_endpoint)
        await dealer.send(data)
        dealer.close()

    async def post(self, http: Any, path: str, data: bytes) -> None:
        """Sends a body to a route of the gateway."""
        response = await http.post(path, content=data, timeout=ANSWER_S)
        if response.status_code >= 500:
            raise InternalError(f"{path}: {response.status_code} {response.text[:300]}")
        if response.status_code >= 400:
            raise RefusedError(response.text[:100])

    async def outbox(self, data: bytes) -> None:
        """Writes an event; the relay's reader goes on behind it."""
        key = f"{subjects.redis_prefix(RUN)}outbox"
        await self._world.redis.command("XADD", key, "*", "s", "learner", "b", data)
        outbox = Outbox(self._world.redis, RUN)
        while events := await outbox.read(100, 0):
            await outbox.ack([event.seq for event in events])

    async def journal(self, data: bytes) -> None:
        """Writes a record; the episode's next worker reads it."""
        self._number += 1
        episode_id = f"journal-{self._number}.0"
        key = f"{subjects.redis_prefix(RUN)}journal:{episode_id}"
        await self._world.redis.command("HSET", key, "0", data)
        try:
            await Journal(self._world.redis, RUN).load(episode_id)
        except ValueError as error:  # a record of another version
            raise RefusedError(str(error)) from error
        finally:
            await self._world.redis.command("DEL", key)

    async def buffer(self, data: bytes) -> None:
        """Replaces a settled trajectory; the learner takes the groups that can be read."""
        self._number += 1
        buffer, record = TrajectoryBuffer(self._world.redis, RUN), group(self._number)
        await buffer.record_group(record)
        for member in (0, 1):
            await buffer.put_trajectory(trajectory(record, member))
        key = f"{subjects.redis_prefix(RUN)}data:{record.group_id}"
        await self._world.redis.command("HSET", key, "1", data)
        taken = await buffer.next_groups(4, 0)
        await buffer.mark_dropped([ready.entry_id for ready in taken], "fuzz")

    async def session(self, data: bytes) -> None:
        """Writes an entry into the log of a session, which the gateway reads at its export."""
        self._number += 1
        session_id = f"s{self._number}.0"
        await self._world.open(session_id)
        key = f"{subjects.redis_prefix(RUN)}session_log:{session_id}"
        await self._world.redis.command("RPUSH", key, data)
        await self._export(session_id)

    async def record(self, data: bytes) -> None:
        """Replaces the record of a session that no gateway has in memory."""
        self._number += 1
        session_id, logs = f"r{self._number}.0", SessionLogs(self._world.redis, RUN)
        opening = OpenSession(session_id, SessionLimits(64, 64, 2e9))
        await logs.open(opening, "nonce", f"key-{session_id}", 60)
        key = f"{subjects.redis_prefix(RUN)}session:{session_id}"
        await self._world.redis.command("HSET", key, "record", data)
        await self._export(session_id)

    async def _export(self, session_id: str) -> None:
        try:
            await self.ask(subjects.gateway_export(RUN), encode(ExportSession(session_id)))
        finally:
            await self._world.close(session_id)

    async def offer(self, data: bytes) -> None:
        """Replaces an offer to outside agents; the agent gets it, or its episode fails."""
        episodes, episode_id = await self._offered()
        key = f"{subjects.redis_prefix(RUN)}outside:{episode_id}"
        await self._world.redis.command("HSET", key, "offer", data)
        leased = await episodes.lease(f"agent-{episode_id}")
        failed = (await episodes.progress([episode_id]))[episode_id].result
        await episodes.close(episode_id, "cancelled")
        if leased is None and failed is not None:
            raise RefusedError(failed.reason)

    async def result(self, data: bytes) -> None:
        """Replaces the result of an outside agent; the worker that offered the episode reads it."""
        episodes, episode_id = await self._offered()
        await episodes.settle(episode_id, OutsideResult())
        key = f"{subjects.redis_prefix(RUN)}outside:{episode_id}"
        await self._world.redis.command("HSET", key, "result", data)
        found = (await episodes.progress([episode_id]))[episode_id].result
        await episodes.close(episode_id, "ok")
        if found is None or "corrupted in Redis" in found.reason:
            raise RefusedError("corrupted")

    async def settle(self, http: Any, operation: str, data: bytes) -> None:
        """Ends an offered episode over HTTP."""
        episodes, episode_id = await self._offered()
        try:
            await self.post(http, f"episodes/{episode_id}/{operation}", data)
        finally:
            await episodes.close(episode_id, "ok")

    async def _offered(self) -> tuple[OutsideEpisodes, str]:
        self._number += 1
        episodes, episode_id = OutsideEpisodes(self._world.redis, RUN), f"o{self._number}.0"
        opening = OpenSession(episode_id, SessionLimits(64, 64, 2e9))
        group_id = episode_id.partition(".")[0]
        await episodes.offer(OutsideOffer(opening, group_id, 0, "train", "rows", {}, 60.0, 60.0))
        return episodes, episode_id


def _targets(doors: Doors, http: Any, admin: Any) -> list[SocketTarget]:
    over = _over
    asked = {
        subjects.gateway_open(RUN): OpenSession,
        subjects.gateway_export(RUN): ExportSession,
        subjects.gateway_close(RUN): CloseSession,
        subjects.score(RUN): ScoreRequest,
        subjects.lease(RUN): LeaseRequest,
        subjects.offer_weights(RUN): OfferWeights,
        subjects.current_weights(RUN): CurrentWeightsRequest,
        subjects.weights_applied(RUN): WeightsApplied,
        subjects.weight_route(RUN): RouteRequest,
    }
    told = {
        subjects.gateway_closed(RUN): SessionClosed,
        subjects.scheduler_began(RUN): SchedulerBegan,
        subjects.lease_report(RUN): LeaseReport,
        subjects.activity(RUN): AgentActivity,
    }
    ended = {"reward": 1.0}
    brought = ended | {"rows": [{"token_ids": [1, 2], "loss_mask": [0, 1]}]}
    of_sessions: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("sessions", OpenSessionBody, {"timeout_s": 60.0}),
        ("sessions/http.0/reward", RewardBody, ended),
        ("sessions/export.0/export", ExportBody, {"rewards": {}}),
    )
    routes = {"chat": "chat/completions", "count_tokens": "messages/count_tokens"}
    return [
        *(over(name, kind, partial(doors.ask, name)) for name, kind in asked.items()),
        *(over(name, kind, partial(doors.tell, name)) for name, kind in told.items()),
        over("generation", RequestFrame, doors.frame),
        *(
            over(
                f"http/{name}",
                kind,
                partial(doors.post, http, routes.get(name, name)),
                is_json=True,
                base=base,
            )
            for name, kind, base, _ in _DIALECTS
        ),
        over("outbox", EventBody, doors.outbox),
        over("journal", JournalRecord, doors.journal),
        over("buffer", Trajectory, doors.buffer),
        over("session", LedgerNode, doors.session, base=_NODE),
        over("session_record", OpenSession, doors.record),
        over("outside_offer", OutsideOffer, doors.offer),
        over("outside_result", OutsideResult, doors.result),
        *(
            over(f"http/{path}", kind, partial(doors.post, admin, path), is_json=True, base=base)
            for path, kind, base in of_sessions
        ),
        *(
            over(
                f"http/episodes/{name}",
                kind,
                partial(doors.settle, admin, name),
                is_json=True,
                base=base,
            )
            for name, kind, base in (
                ("reward", EndBody, ended),
                ("trajectory", TrajectoryBody, brought),
            )
        ),
    ]


async def play_sockets(seed: int, num_inputs: int, folder: Path) -> list[Tally]:
    """Gives each socket its inputs; asserts that every service answers afterwards."""
    with (
        _quiet(),
        tempfile.TemporaryDirectory() as name,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("TAILRACE_GATEWAY_ADMIN_KEY", ADMIN_KEY)
        place = Path(name)
        nats, redis = make_nats_server(place), make_redis_server(place)
        nats.start()
        redis.start()
        try:
            async with gateway_world(nats, redis, RUN, place) as world:
                await world.start_gateway()
                config = world.experiment_file("weight_sync", {})
                await world.start_service(_weight_sync, config, "weight_sync-0")
                async with _tool_worker(world) as worker:
                    return await _campaign(world, worker, seed, num_inputs, folder)
        finally:
            nats.kill()
            redis.kill()


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out lines below critical: every malformed input has one."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@tool
async def echo(text: str, times: int = 1) -> str:
    """Repeat a text."""
    return text * max(0, min(times, 10))


@asynccontextmanager
async def _tool_worker(world: GatewayWorld) -> AsyncIterator[ToolWorker]:
    """A worker with a connection of its own, as tools outside of the services have."""
    bus = await Bus.connect(world.endpoints, name="worker")
    worker = ToolWorker([echo], bus, run=RUN)
    await worker.start()
    yield worker
    await worker.close()
    await bus.close()


async def _weight_sync(args: Args) -> Service:
    return build_weight_sync(args)


async def _campaign(
    world: GatewayWorld, worker: ToolWorker, seed: int, num_inputs: int, folder: Path
) -> list[Tally]:
    opened = await world.open("http.0", max_episode_tokens=10_000_000, timeout_s=3600.0)
    await world.open("export.0", timeout_s=3600.0)
    doors = Doors(world)
    targets = _targets(doors, world.http(opened), world.http(opened, ADMIN_KEY))
    targets += _tool_targets(doors, subjects.tool_worker(worker.worker_id))
    num_each = -(-num_inputs // len(targets))
    tallies = []
    for target in targets:
        await _play(target, seed - 1, num_each // _WARM, folder)
    for target in targets:
        tallies.append(await _play(target, seed, num_each, folder))
        tally = tallies[-1]
        sys.stdout.write(f"{tally.target}: {tally.num_inputs} in {tally.seconds:.1f} s\n")
        sys.stdout.flush()
    await _check_all(world)
    return tallies


async def _play(target: SocketTarget, seed: int, num_inputs: int, folder: Path) -> Tally:
    tally = Tally(target.inputs.name)
    began_s, before = time.monotonic(), rss_mib()

    async def one(index: int) -> None:
        data = target.inputs.input_of(seed, index)
        tally.num_inputs += 1
        with _noted(tally, data, f"{seed}-{index}", folder):
            await target.send(data)

    for start in range(0, num_inputs, _AT_ONCE):
        await asyncio.gather(*map(one, range(start, min(start + _AT_ONCE, num_inputs))))
    tally.seconds, tally.grown_mib = time.monotonic() - began_s, rss_mib() - before
    return tally


async def _check_all(world: GatewayWorld) -> None:
    """Asserts that gateway, rewards, scheduler, weight_sync, the engine's socket and Redis answer."""
    opened = await world.open("after.0")
    response = await world.http(opened).post("chat/completions", json=_DIALECTS[0][2])
    assert response.status_code == 200, response.text  # over lease, socket and session log
    bus = world.service.bus
    scored = await bus.request(subjects.score(RUN), ScoreRequest(()), ScoreReply, timeout_s=ANSWER_S)
    assert scored.scores == ()
    weights = CurrentWeightsRequest("after")
    await bus.request(subjects.current_weights(RUN), weights, CurrentWeightsReply, timeout_s=ANSWER_S)
    client = ToolClient(bus, RUN)
    told = await client.run_call(CallTool("after", "echo", {"text": "after"}, run=RUN))
    assert told.content == "after", told
    await client.close()
    outbox = Outbox(world.redis, RUN)
    await outbox.emit("fuzz", RunFinished(1, "after"))
    last = None
    while events := await outbox.read(1000, 0):
        last = events[-1].body
        await outbox.ack([event.seq for event in events])
    assert last == RunFinished(1, "after"), last
