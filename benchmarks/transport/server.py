"""A server with an engine that computes nothing, inside the runtime of services.

`python -m benchmarks.transport.server nats|zmq <run> <endpoint>`; prints `ready` and ends on SIGTERM.
The engine answers each call the moment it arrives, in chunks of 32 tokens, as an engine streams them;
since these chunks are sent in one loop tick, the channel merges them into one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys

import uvloop

from benchmarks.transport.payload import GENERATED, LOGPROBS, NUM_GENERATED
from tailrace import log
from tailrace.channel import ChunkSink, GenerateServer, NatsGenerateServer, ZmqGenerateServer
from tailrace.config import Endpoints, RunConfig
from tailrace.runtime import Service
from tailrace.tracing import span
from tailrace_protos import subjects
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan

CHUNK_TOKENS = 32
SERVER_ID = "bench"


class ZeroComputeHandler:
    """Every call gets the same tokens, within a span that continues the caller's trace."""

    def __init__(self) -> None:
        ids, logprobs = pack_int32(GENERATED), pack_float32(LOGPROBS)
        self._chunks = [
            (
                ids[4 * start : 4 * (start + CHUNK_TOKENS)],
                logprobs[4 * start : 4 * (start + CHUNK_TOKENS)],
            )
            for start in range(0, NUM_GENERATED, CHUNK_TOKENS)
        ]

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        """Answer at once."""
        with span("generate", traceparent=request.traceparent, call_id=request.call_id):
            last = len(self._chunks) - 1
            for index, (ids, logprobs) in enumerate(self._chunks):
                spans = (TokenSpan(1, "", len(ids) >> 2),)
                finish = FinishReason.LENGTH if index == last else None
                sink.send(TokenChunk(request.call_id, ids, logprobs, spans, finish))

    def abort(self, call_id: str) -> None:
        """Calls are over before they could be aborted."""

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """Nothing is kept."""


def make_server(transport: str, service: Service, endpoint: str) -> GenerateServer:
    """The channel's server of this transport."""
    if transport == "zmq":
        return ZmqGenerateServer(endpoint)
    subject = subjects.generate(service.run.exp_name, SERVER_ID)
    return NatsGenerateServer(service.bus.connection.client, subject)


async def serve(transport: str, run: str, endpoint: str) -> int:
    """Run the service until it is told to end."""
    log.configure(service="bench", run=run)
    service = Service("bench", RunConfig(exp_name=run), Endpoints.from_env())

    async def start() -> None:
        server = make_server(transport, service, endpoint)
        await server.start(ZeroComputeHandler())
        service.on_drain(server.stop)
        service.set_ready(True)
        gc.collect()
        gc.freeze()
        print("ready", flush=True)

    service.on_start(start)
    return await service.serve()


def main() -> int:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("transport", choices=["nats", "zmq"])
    parser.add_argument("run")
    parser.add_argument("endpoint")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(args.transport, args.run, args.endpoint))


if __name__ == "__main__":
    sys.exit(main())
