"""The reader of a ZMQ socket in the event loop."""

from __future__ import annotations

import asyncio
import os

import zmq

from tailrace.channel.zmq_transport import SocketReader, make_socket


async def test_a_reader_closed_twice_leaves_the_next_owner_of_its_descriptor_alone() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = make_socket(context, zmq.DEALER)
    descriptor = int(socket.getsockopt(zmq.FD))
    reader = SocketReader(socket, lambda events: False)
    reader.close()
    socket.close()
    context.term()

    ours, theirs = os.pipe()
    os.dup2(ours, descriptor)  # as the system gives the number to the next connection
    is_readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, is_readable.set)
    reader.close()
    os.write(theirs, b"x")
    async with asyncio.timeout(60):
        assert await is_readable.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    for one in {ours, theirs, descriptor}:
        os.close(one)
