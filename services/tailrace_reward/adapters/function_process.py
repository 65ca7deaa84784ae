"""A process that calls reward functions, one after another; `process_pool` starts it.

Frames go over the original standard output; what user code prints goes to standard error. It ends
with its parent: at the end of its input, or by the kernel's signal if the parent was killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_reward.adapters.frames import HEADER, Call, Loaded, Returned, frame

_PR_SET_PDEATHSIG = 1

Function = Callable[..., Any]


def main(addresses: list[str]) -> int:
    """Load the functions at `addresses`, then answer calls until the input ends."""
    _die_with_parent()
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    functions, errors = _load(addresses)
    output.write(frame(Loaded(errors)))
    decoder = msgspec.msgpack.Decoder(Call)
    with asyncio.Runner() as runner:
        while data := _read_frame(sys.stdin.buffer):
            call = decoder.decode(data)
            output.write(frame(_answer(functions[call.function], call, runner)))
    return 0


def _load(addresses: list[str]) -> tuple[dict[str, Function], dict[str, str]]:
    functions: dict[str, Function] = {}
    errors: dict[str, str] = {}
    for address in addresses:
        module_name, _, name = address.partition(":")
        try:
            with foreign_code(f"importing {module_name}"):
                function = getattr(importlib.import_module(module_name), name, None)
        except ForeignCodeError as error:
            errors[address] = str(error)
            continue
        if callable(function):
            functions[address] = function
        else:
            errors[address] = f"module {module_name} has no function {name}"
    return functions, errors


def _answer(function: Function, call: Call, runner: asyncio.Runner) -> Returned:
    item = call.item
    try:
        with foreign_code("the function"):
            value = function(item.task, item.messages, item.metrics)
            if inspect.isawaitable(value):
                value = runner.run(_await(value))
            return Returned(float(value))
    except ForeignCodeError as error:
        return Returned(error=f"raised {type(error.error).__name__}: {error.error}")


async def _await(value: Any) -> Any:
    return await value


def _read_frame(pipe: BinaryIO) -> bytes:
    """The next frame, or nothing at the end of the input."""
    header = pipe.read(HEADER.size)
    return pipe.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
