"""Child's end of the pipes, and the frames on them: length, then msgpack.

Frames use the original standard input and output. Both are replaced for user code: it prints to
standard error and reads an empty file. The process ends with its parent: at the end of its input, or by
the kernel's signal when the parent is killed.
"""

import ctypes
import os
import signal
import struct
import sys
from typing import BinaryIO, TypeVar

import msgspec

HEADER = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1

M = TypeVar("M")


def frame(message: object) -> bytes:
    """Encodes a message as a frame."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data


class ParentLink:
    """Pipes to the parent: receives its messages and answers them."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source
        self._target = target

    @classmethod
    def open(cls) -> "ParentLink":
        """Takes over standard input and output; call it before the import of user code."""
        _die_with_parent()
        source = os.fdopen(os.dup(0), "rb")
        target = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(source, target)

    def receive(self, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
        """Returns the next message; None at the end of the input."""
        header = self._source.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        return decoder.decode(self._source.read(HEADER.unpack(header)[0]))

    def send(self, message: object) -> None:
        """Sends an answer; returns once the pipe has accepted all bytes."""
        data = memoryview(frame(message))
        while data:
            data = data[self._target.write(data) or 0 :]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
