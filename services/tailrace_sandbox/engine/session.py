"""A session's side inside the sandbox: runs one piece of code after the other in the same names.

Invariant: whatever a handler of tool code raises, and whenever, is shown in the answer to a call; the
session goes on. Whoever reads what this process says must not believe it: the tool code that it ran may
speak here too.
"""

import marshal
import os
import struct
from typing import Any

from tailrace_sandbox.engine import files, program

HEADER = struct.Struct("<I")


def serve(channel: int) -> None:
    """Say that it is ready; answer requests until the channel closes or the code exits."""
    names = program.fresh_main()
    number = 0
    mask = program.hold_signals()
    _send(channel, b"")
    while request := _receive(channel):
        number += 1
        attempt, answer = _attempted(request, names, f"cell{number}.py", mask)
        mask = program.hold_signals()
        _send(channel, answer)
        if attempt.left:
            program.leave(attempt.exit_code)
    program.leave(0)


def _attempted(
    request: dict[str, Any], names: dict[str, Any], file_name: str, mask: set[int]
) -> tuple[program.Attempt, bytes]:
    """Do what a request says, and collect its files; signals reach tool code meanwhile."""
    around = program.Attempt()
    with around:
        attempt = program.act_on_signals(mask)
        if not attempt.left:
            attempt = _run(request, names, file_name)
        program.flush()
        exit_code = attempt.exit_code | files.LEFT if attempt.left else attempt.exit_code
        return attempt, files.collect(exit_code, request["patterns"], request["max_bytes"])
    program.flush()
    exit_code = around.exit_code | files.LEFT if around.left else around.exit_code
    return around, files.refused(exit_code, request["patterns"])


def _run(request: dict[str, Any], names: dict[str, Any], file_name: str) -> program.Attempt:
    try:
        files.put(request["files"])
    except ValueError as error:
        os.write(2, f"{error}\n".encode(errors="replace"))
        attempt = program.Attempt()
        attempt.exit_code = 1
        return attempt
    return program.run_cell(request["code"], names, file_name)


def _receive(channel: int) -> dict[str, Any] | None:
    header = _exactly(channel, HEADER.size)
    if len(header) < HEADER.size:
        return None
    content: dict[str, Any] = marshal.loads(_exactly(channel, HEADER.unpack(header)[0]))
    return content


def _exactly(channel: int, count: int) -> bytes:
    """`count` bytes, or fewer at the end of the channel."""
    data = bytearray()
    while len(data) < count and (piece := os.read(channel, count - len(data))):
        data += piece
    return bytes(data)


def _send(channel: int, data: bytes) -> None:
    left = memoryview(HEADER.pack(len(data)) + data)
    while left:
        left = left[os.write(channel, left) :]
