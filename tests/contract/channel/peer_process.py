"""One end of the channel in a process of its own, so that tests can kill or stop it.

`server`: sends three tokens of every call and then keeps it open, but ends calls named `quick*`. At
SIGUSR1 it ends the open calls with one more token and leaves in order.
`client`: makes a call named `orphan` and waits. Both print `ready` when they are up.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from tailrace.channel import ChunkSink
from tailrace_protos.generation import FinishReason, GenerateRequest
from tests.contract.channel.harness import Ends, chunk, request


class StallingEngine:
    """Three tokens, then nothing until `finish`."""

    def __init__(self) -> None:
        self._open: dict[str, ChunkSink] = {}

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        finish = FinishReason.STOP if request.call_id.startswith("quick") else None
        sink.send(chunk(request.call_id, 0, 3, finish))
        if finish is None:
            self._open[request.call_id] = sink

    def finish(self) -> None:
        """One more token for every open call, the last."""
        for call_id, sink in self._open.items():
            sink.send(chunk(call_id, 3, 1, FinishReason.STOP))

    def abort(self, call_id: str) -> None:
        """This process is here to be killed."""

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """No context is kept."""


def say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def run(role: str, ends: Ends) -> None:
    if role == "server":
        server, engine, leaving = await ends.server(), StallingEngine(), asyncio.Event()
        await server.start(engine)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, leaving.set)
        say_ready()
        await leaving.wait()
        engine.finish()
        await server.stop()
        await ends.close()
        return
    client = await ends.client()
    call = client.generate(ends.address(), request("orphan"))
    say_ready()
    await call.collect()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("transport")
    parser.add_argument("nats_url")
    parser.add_argument("run")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    asyncio.run(run(args.role, Ends(args.transport, args.nats_url, args.run, args.directory)))


if __name__ == "__main__":
    main()
