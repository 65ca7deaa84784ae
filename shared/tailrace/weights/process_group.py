"""Process groups of torch.distributed that carry one buffer after another from rank 0 to all others.

They are made and dropped beside each other, without the default group of the process, which an engine
may use itself. Invariant: no call waits longer than the timeout of the group for a member that does
nothing; after a call that failed, the group is closed, and all members notice.
"""

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from tailrace_protos.weights import BroadcastReply

_DIST: Any = torch.distributed  # groups beside the default one have no types there
_CHUNK_BYTES = 4 << 20
_MAX_IN_FLIGHT = 8  # chunks
_DEVICE_EVENT: Any = torch.cuda.Event
_POLL_S = 0.0005


class BroadcastFailedError(Exception):
    """A member died or did nothing for too long: the buffer is incomplete, the group is closed."""


class MeetingPoint:
    """Store at rank 0 through which the members of new groups find each other."""

    def __init__(self, bind_host: str) -> None:
        self._listener = socket.create_server((bind_host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.store: Any = _DIST.TCPStore(
            bind_host, self.port, is_master=True, wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )  # fmt: skip


class BroadcastGroup:
    """Group of one set of members. All methods block; they run in a thread."""

    def __init__(self, place: BroadcastReply, own_host: str, store: Any = None) -> None:
        """Meets the other members; raises `BroadcastFailedError`.

        `own_host`: address of this host at which the others reach it; `store`: that of rank 0.
        """
        self.group_id = place.group_id
        self._timeout = timedelta(seconds=place.timeout_s)
        self._timeout_s = place.timeout_s
        self._device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        try:
            if store is None:
                store = _DIST.TCPStore(
                    place.store_host, place.store_port, is_master=False, timeout=self._timeout
                )
            meeting = _DIST.PrefixStore(place.group_id, store)
            meeting.set_timeout(self._timeout)
            self._group = _make_group(meeting, place, self._timeout, own_host)
        except RuntimeError as error:
            raise BroadcastFailedError(_first_line(error)) from error

    def send(self, data: memoryview) -> None:
        """Sends a buffer to all members; raises `BroadcastFailedError`."""
        self._carry(data, is_sender=True)

    def receive(self, into: memoryview) -> None:
        """Receives a buffer of this size; raises `BroadcastFailedError`."""
        self._carry(into, is_sender=False)

    def close(self) -> None:
        """Leaves the group; members that wait for this one get an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _carry(self, data: memoryview, *, is_sender: bool) -> None:
        group, whole = self._group, torch.frombuffer(data, dtype=torch.uint8)
        if group is None:
            raise BroadcastFailedError("the group is closed")
        try:
            for part in _parts(whole):
                chunks = [chunk.to(self._device) for chunk in part]
                works = [self._broadcast(group, chunk) for chunk in chunks]
                for work in works:
                    work.wait(self._timeout)
                if self._device.type == "cuda":
                    self._wait_for_device()
                    if not is_sender:
                        for chunk, received in zip(part, chunks, strict=True):
                            chunk.copy_(received)
        except RuntimeError as error:
            self.close()
            raise BroadcastFailedError(_first_line(error)) from error

    def _broadcast(self, group: Any, chunk: torch.Tensor) -> Any:
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout
        return group.broadcast([chunk], options)

    def _wait_for_device(self) -> None:
        """NCCL's `wait` only orders streams: a dead member would block the device for ever."""
        done: Any = _DEVICE_EVENT()
        done.record()
        ends_s = time.monotonic() + self._timeout_s
        while not done.query():
            if time.monotonic() > ends_s:
                raise RuntimeError(f"no progress on the GPU for {self._timeout_s:g} s")
            time.sleep(_POLL_S)


def own_gpu() -> str:
    """Id of this process's first GPU; empty without one."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""


def _make_group(meeting: Any, place: BroadcastReply, timeout: timedelta, own_host: str) -> Any:
    if place.backend == "nccl":
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _DIST.ProcessGroupNCCL(meeting, place.rank, place.size, options)
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own_host)]
    return _DIST.ProcessGroupGloo(meeting, place.rank, place.size, options)


def _parts(whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The buffer as chunks, so many at a time as are in flight."""
    chunks = torch.split(whole, _CHUNK_BYTES)
    for at in range(0, len(chunks), _MAX_IN_FLIGHT):
        yield chunks[at : at + _MAX_IN_FLIGHT]


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
