"""Peers of a ZMQ server that do not read what it sends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq

from tailrace.channel import ZmqGenerateServer
from tailrace_protos.base import encode
from tailrace_protos.generation import RequestFrame
from tests.contract.channel.harness import QUICK_SERVER, HeldEngine, chunk, request
from tests.world.serving import eventually


async def test_frames_for_a_client_that_hangs_are_given_up_after_its_link(tmp_path: Path) -> None:
    server, engine = ZmqGenerateServer(f"ipc://{tmp_path}/s.sock", QUICK_SERVER), HeldEngine()
    await server.start(engine)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hung = context.socket(zmq.DEALER)
    hung.rcvhwm = 1
    hung.connect(server.endpoint)
    try:
        hung.send(encode(RequestFrame(0, 0, (request("c1"),))))
        await engine.got("c1")
        for part in range(64):
            engine.sinks["c1"].send(chunk("c1", 8192 * part, 8192))
            await asyncio.sleep(0)
        await eventually(lambda: bool(server._zmq._blocked))  # buffers are full: it tries again
        await eventually(lambda: not server._links)
        await eventually(lambda: not server._zmq._blocked, timeout_s=60)
        assert server._links == {}
    finally:
        context.destroy(0)
        await server.stop()
