"""Broadcasts of versions through torch.distributed: this process is rank 0, servers are the others.

A broadcast begins when all servers that asked for the version before wait for this one, or a short time
after the first one asked (the first broadcast of all knows of nobody before, and takes that time). It
goes to those that wait, and nobody waits for others: a server that asks later fetches in another way,
and is expected at the next broadcast. The process group stays as long as its members do; another set of
members gets a new group, as does everyone after a failure.
"""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tailrace.import_path import load_extra
from tailrace.log import get_logger
from tailrace.weights.broadcast import TORCH_PART
from tailrace.weights.chunks import reachable_host
from tailrace_protos.weights import BroadcastReply, BroadcastRequest
from tailrace_weight_sync import metrics

log = get_logger(__name__)

_GATHER_S = 2.0  # for servers that are expected, after the first one asked
_NO_PLACE = BroadcastReply()


class _Round:
    """Servers that get one version together."""

    def __init__(self, policy_version: int, data: memoryview) -> None:
        self.policy_version = policy_version
        self.data = data
        self.asked: dict[str, BroadcastRequest] = {}
        self.is_full = asyncio.Event()
        self.places: asyncio.Future[dict[str, BroadcastReply]] = (
            asyncio.get_running_loop().create_future()
        )


class Broadcaster:
    """One broadcast at a time."""

    def __init__(
        self,
        buffer: Callable[[int], memoryview | None],
        *,
        bind_host: str,
        advertise_host: str,
        timeout_s: float,
    ) -> None:
        """`buffer`: bytes of a held version; `timeout_s`: after which a member counts as dead."""
        self._buffer = buffer
        self._bind_host = "0.0.0.0" if bind_host == "*" else bind_host
        self._host = reachable_host(bind_host, advertise_host)
        self._timeout_s = timeout_s
        self._round: _Round | None = None
        self._task: asyncio.Task[None] | None = None
        self._version = -1  # newest that a server asked for
        self._askers: set[str] = set()  # all that asked for it, in time or not
        self._late: set[str] = set()  # those of them that got no place
        self._expected: set[str] = set()  # those that asked for the version before
        self._group: Any = None
        self._members: tuple[str, ...] = ()  # of the group, by rank from 1 on
        self._name = uuid.uuid4().hex[:8]  # a restarted process begins other groups
        self._num_groups = 0

    async def start(self) -> None:
        """Imports torch and opens the port at which members meet."""
        self._torch: Any = await asyncio.to_thread(load_extra, *TORCH_PART)
        self._gpu: str = self._torch.own_gpu()
        self._meeting = self._torch.MeetingPoint(self._bind_host)

    async def stop(self) -> None:
        """Closes the group; members that receive get an error."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._close_group()

    async def join(self, request: BroadcastRequest) -> BroadcastReply:
        """A place in the next broadcast of this version, or none."""
        self._note(request)
        if self._task is None:
            data = self._buffer(request.policy_version)
            if data is None:
                return _NO_PLACE
            self._round = _Round(request.policy_version, data)
            self._task = asyncio.create_task(self._run(self._round), name="broadcast")
        current = self._round
        if current is None or current.policy_version != request.policy_version:
            if request.policy_version == self._version:
                self._late.add(request.server_id)
            return _NO_PLACE
        current.asked[request.server_id] = request
        come = current.asked.keys() | self._late
        if current.policy_version < self._version or (self._expected and self._expected <= come):
            current.is_full.set()
        places = await asyncio.shield(current.places)
        return places.get(request.server_id, _NO_PLACE)

    def _note(self, request: BroadcastRequest) -> None:
        if request.policy_version > self._version:
            self._version = request.policy_version
            self._expected, self._askers, self._late = self._askers, set(), set()
        if request.policy_version == self._version:
            self._askers.add(request.server_id)

    async def _run(self, current: _Round) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await current.is_full.wait()
            self._round = None
            place = self._plan(current)
            log_ids = {"policy_version": current.policy_version, "num_servers": len(current.asked)}
            try:
                with metrics.BROADCAST_SECONDS.time():
                    await asyncio.to_thread(self._send, place, current.data)
            except self._torch.BroadcastFailedError as error:
                self._close_group()
                metrics.BROADCASTS.labels("failed").inc()
                log.warning("broadcast failed: servers fetch otherwise", error=str(error), **log_ids)
            else:
                metrics.BROADCASTS.labels("ok").inc()
                log.info("broadcast", group_id=place.group_id, **log_ids)
        finally:
            self._round = self._task = None
            if not current.places.done():
                current.places.set_result({})

    def _plan(self, current: _Round) -> BroadcastReply:
        """Gives the places out; returns that of rank 0."""
        members = tuple(sorted(current.asked))
        held = {request.group_id for request in current.asked.values()}
        group_id = "" if self._group is None else self._group.group_id
        if self._group is None or members != self._members or held != {group_id}:
            self._close_group()
            self._num_groups += 1
            group_id = f"{self._name}-{self._num_groups}"
        self._members = members
        gpus = [self._gpu, *(request.gpu for request in current.asked.values())]
        is_nccl = all(gpus) and len(set(gpus)) == len(gpus)  # it wants a GPU for each rank
        places = [
            BroadcastReply(
                group_id, rank, len(members) + 1, "nccl" if is_nccl else "gloo",
                self._host, self._meeting.port, self._timeout_s,
            )
            for rank in range(len(members) + 1)
        ]  # fmt: skip
        current.places.set_result(dict(zip(members, places[1:], strict=True)))
        return places[0]

    def _send(self, place: BroadcastReply, data: memoryview) -> None:
        if self._group is None:
            self._group = self._torch.BroadcastGroup(place, self._host, self._meeting.store)
        self._group.send(data)

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
