"""The child's end of the pipes.

Frames go over what were standard input and output; both are replaced, so that user code that prints
or reads meets standard error and an empty file instead. The process ends with its parent: at the end
of its input, or by the kernel's signal if the parent was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO, TypeVar

import msgspec

from tailrace.processes.frames import HEADER, frame

_PR_SET_PDEATHSIG = 1

M = TypeVar("M")


class ParentLink:
    """Takes messages of the parent and answers them."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source
        self._target = target

    @classmethod
    def open(cls) -> ParentLink:
        """Take standard input and output over; to be called before any user code is imported."""
        _die_with_parent()
        source = os.fdopen(os.dup(0), "rb")
        target = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(source, target)

    def receive(self, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
        """The next message; None at the end of the input."""
        header = self._source.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        return decoder.decode(self._source.read(HEADER.unpack(header)[0]))

    def send(self, message: object) -> None:
        """Answer; returns once the pipe has taken it all."""
        data = memoryview(frame(message))
        while data:
            data = data[self._target.write(data) or 0 :]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
