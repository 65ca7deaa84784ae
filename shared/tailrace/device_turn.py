"""Turns of the learner and of inference servers on devices that they share (`colocated: true`).

Two locks on files in the run's folder, which the kernel releases when a process dies. The device lock
is held by the learner alone, or by any number of servers. A learner that waits for it holds the other
lock, and servers look at that one: they go to sleep, and ask for the device again behind the learner.
"""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Literal

from tailrace.log import get_logger

log = get_logger(__name__)

_POLL_S = 0.01
_TELL_AFTER_S = 30.0


class DeviceTurn:
    """Place of one process in the order."""

    def __init__(self, folder: Path, host_id: str, role: Literal["learner", "server"]) -> None:
        """`folder`: the same for all processes of the run on this host."""
        folder.mkdir(parents=True, exist_ok=True)
        self._role = role
        self._mode = fcntl.LOCK_EX if role == "learner" else fcntl.LOCK_SH
        self._device = _open(folder / f"device-{host_id}.lock")
        self._wanted = _open(folder / f"device-{host_id}.wanted.lock")
        self.is_held = False

    async def take(self) -> None:
        """Waits for the device, and logs a long wait; does nothing if it is held."""
        if self.is_held:
            return
        await self._lock(self._wanted, "the learner's turn")
        try:
            await self._lock(self._device, "others to leave the device")
        finally:
            fcntl.flock(self._wanted, fcntl.LOCK_UN)
        self.is_held = True

    def give(self) -> None:
        """Lets others have the device."""
        fcntl.flock(self._device, fcntl.LOCK_UN)
        self.is_held = False

    async def wanted(self) -> None:
        """Waits until the learner waits for the device, which a server holds."""
        while _try_lock(self._wanted, fcntl.LOCK_SH):
            fcntl.flock(self._wanted, fcntl.LOCK_UN)
            await asyncio.sleep(_POLL_S)

    async def aclose(self) -> None:
        """Leaves the order."""
        self.is_held = False
        os.close(self._device)
        os.close(self._wanted)

    async def _lock(self, fd: int, for_what: str) -> None:
        waited_s = 0.0
        while not _try_lock(fd, self._mode):
            await asyncio.sleep(_POLL_S)
            before_s, waited_s = waited_s, waited_s + _POLL_S
            if before_s % _TELL_AFTER_S > waited_s % _TELL_AFTER_S:
                log.warning(f"waits for {for_what}", waited_s=round(waited_s), role=self._role)


def _open(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _try_lock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
