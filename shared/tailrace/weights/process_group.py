"""Process groups of torch.distributed that carry one buffer after another from rank 0 to all others.

They are made and dropped beside each other, without the default group of the process, which an engine
may use itself. Invariants: no call waits longer than its deadline for members that do nothing, also
where torch itself has none; a call of torch that never returns keeps no process from ending; after a
call that failed, the group is closed, and all members notice, at the latest by their deadline.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_protos.weights import BroadcastReply

_DIST: Any = torch.distributed  # groups beside the default one have no types there
_CHUNK_BYTES = 4 << 20
_MAX_IN_FLIGHT = 8  # chunks
_DEVICE_EVENT: Any = torch.cuda.Event
_POLL_S = 0.0005
_GRACE_S = 1.0  # beyond the group's timeout: torch may find the reason itself
_NCCL_MEETING_S = 30.0  # its communicators take seconds to form, and show no progress

# NCCL groups read these when they are made. By default their watchdog ends the process after an error
# or timeout of one operation, and their monitor does so when the watchdog is stuck in NCCL or a dump:
# one dead member would end weight_sync and all servers. Here each operation has a deadline instead.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


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
    """Group of one set of members, which meet with their first buffer.

    `send` and `receive` block; they run in a thread. `close` does not.
    """

    def __init__(self, place: BroadcastReply, own_host: str, store: Any = None) -> None:
        """`own_host`: address of this host at which the others reach it; `store`: that of rank 0."""
        self.group_id = place.group_id
        self._place, self._own_host, self._store = place, own_host, store
        self._device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        self._group: Any = None
        self._closed: futures.Future[None] = futures.Future()
        self._limit_s = self._deadline_s = 0.0

    def send(self, data: memoryview) -> None:
        """Sends a buffer to all members; raises `BroadcastFailedError`."""
        self._carry(data, is_sender=True)

    def receive(self, into: memoryview) -> None:
        """Receives a buffer of this size; raises `BroadcastFailedError`."""
        self._carry(into, is_sender=False)

    def close(self) -> None:
        """Leaves the group; members that wait for this one get an error."""
        with suppress(futures.InvalidStateError):  # closed before
            self._closed.set_result(None)
        group, self._group = self._group, None
        if group is not None:  # NCCL's `abort` waits for the device, perhaps for ever
            _in_daemon(group.abort)

    def _carry(self, data: memoryview, *, is_sender: bool) -> None:
        """Lets a thread work until it is done, or nothing moves before the deadline."""
        if self._closed.done():
            raise BroadcastFailedError("the group is closed")
        self._allow(self._place.timeout_s)
        whole = torch.frombuffer(data, dtype=torch.uint8)
        done = _in_daemon(partial(self._work, whole, is_sender=is_sender))
        ends = {done, self._closed}
        while (left_s := self._deadline_s - time.monotonic()) > 0:
            if futures.wait(ends, left_s, futures.FIRST_COMPLETED).done:
                break
        if not done.done():
            reason = "the group is closed" if self._closed.done() else "no member moved"
            self.close()
            raise BroadcastFailedError(f"{reason} (deadline: {self._limit_s:g} s)")
        if (error := done.exception()) is not None:
            self.close()
            raise error

    def _allow(self, limit_s: float) -> None:
        """Notes that the group moves, and the seconds until it must have moved again."""
        self._limit_s = limit_s + _GRACE_S
        self._deadline_s = time.monotonic() + self._limit_s

    def _work(self, whole: torch.Tensor, *, is_sender: bool) -> None:
        """Carries a buffer. Any call of torch in it may never return."""
        if self._group is None:
            self._meet()
        group = self._group
        if group is None:
            raise RuntimeError("the group is closed")
        for part in _parts(whole):
            self._allow(self._place.timeout_s)
            chunks = [chunk.to(self._device) for chunk in part]
            self._broadcast(group, chunks, self._place.timeout_s)
            if self._device.type == "cuda" and not is_sender:
                for chunk, received in zip(part, chunks, strict=True):
                    chunk.copy_(received)

    def _meet(self) -> None:
        place, is_nccl = self._place, self._device.type == "cuda"
        timeout = timedelta(seconds=place.timeout_s)
        store = self._store
        if store is None:
            store = _DIST.TCPStore(place.store_host, place.store_port, is_master=False, timeout=timeout)
        limit_s = max(place.timeout_s, _NCCL_MEETING_S) if is_nccl else place.timeout_s
        self._allow(limit_s)
        meeting = _DIST.PrefixStore(place.group_id, store)
        meeting.set_timeout(timedelta(seconds=limit_s))
        self._group = group = _make_group(meeting, place, timeout, self._own_host)
        if self._closed.done():
            self.close()
        elif is_nccl:  # a group of NCCL meets nobody before its first operation
            self._broadcast(group, [torch.zeros(1, dtype=torch.uint8, device=self._device)], limit_s)

    def _broadcast(self, group: Any, chunks: list[torch.Tensor], limit_s: float) -> None:
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timeout = timedelta(seconds=limit_s)
        works = [group.broadcast([chunk], options) for chunk in chunks]
        for work in works:
            work.wait(timeout)
        if self._device.type == "cuda":
            _wait_for_device(limit_s)


def own_gpu() -> str:
    """Id of this process's first GPU; empty without one."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""


def _wait_for_device(limit_s: float) -> None:
    """NCCL's `wait` only orders streams: a dead member would block the device for ever."""
    done: Any = _DEVICE_EVENT()
    done.record()
    ends_s = time.monotonic() + limit_s
    while not done.query():
        if time.monotonic() > ends_s:
            raise RuntimeError(f"no progress on the GPU for {limit_s:g} s")
        time.sleep(_POLL_S)


def _make_group(meeting: Any, place: BroadcastReply, timeout: timedelta, own_host: str) -> Any:
    if place.backend == "nccl":
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(_NCCL_ENVIRONMENT):
            return _DIST.ProcessGroupNCCL(meeting, place.rank, place.size, options)
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own_host)]
    return _DIST.ProcessGroupGloo(meeting, place.rank, place.size, options)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a moment: other groups of the process keep their own."""
    before = {name: os.environ.pop(name, None) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _in_daemon(work: Callable[[], None]) -> "futures.Future[None]":
    """Runs torch's part in a thread that the end of the process does not wait for."""
    done: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            with foreign_code("torch.distributed"):
                work()
        except ForeignCodeError as error:
            done.set_exception(_without_frames(error.error))
        else:
            done.set_result(None)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return done


def _parts(whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The buffer as chunks, so many at a time as are in flight."""
    chunks = torch.split(whole, _CHUNK_BYTES)
    for at in range(0, len(chunks), _MAX_IN_FLIGHT):
        yield chunks[at : at + _MAX_IN_FLIGHT]


def _without_frames(error: Exception) -> Exception:
    """An error of torch anew: the frames of its traceback would keep the group and its connections."""
    if not isinstance(error, RuntimeError):
        return error
    return BroadcastFailedError(str(error).split("\n", 1)[0])
