"""A session's side inside the sandbox: runs one piece of code after the other in the same names.

Whoever reads what this process says must not believe it: the tool code that it ran may speak here too.
"""

import marshal
import os
import struct
from typing import Any

from tailrace_sandbox.engine import files, program

HEADER = struct.Struct("<I")


def serve(channel: int) -> None:
    """Answer requests until the channel closes or the code exits."""
    names = program.fresh_main()
    number = 0
    while request := _receive(channel):
        number += 1
        attempt = program.Attempt()
        try:
            files.put(request["files"])
        except ValueError as error:
            os.write(2, f"{error}\n".encode(errors="replace"))
            attempt.exit_code = 1
        else:
            attempt = program.run_cell(request["code"], names, f"cell{number}.py")
        program.flush()
        exit_code = attempt.exit_code | files.LEFT if attempt.left else attempt.exit_code
        _send(channel, files.collect(exit_code, request["patterns"], request["max_bytes"]))
        if attempt.left:
            program.leave(attempt.exit_code)
    program.leave(0)


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
