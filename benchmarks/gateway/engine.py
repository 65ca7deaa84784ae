"""An inference server without a model and the scheduler that leases it, as a process of its own.

    python -m benchmarks.gateway.engine RUN ENDPOINT

Every call is answered with the same reply. A prompt that contains `@<seconds>@` waits so long first, as
a model would.
"""

from __future__ import annotations

import asyncio
import re
import sys

import uvloop

from benchmarks.gateway.model import reply_ids, text_of
from tailrace.channel import ChunkSink, ZmqGenerateServer
from tailrace.config import Endpoints, RunConfig
from tailrace.runtime import Service
from tailrace_protos import subjects
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.control import LeaseReply, LeaseRequest
from tailrace_protos.episode import Lease
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan

_WAIT = re.compile(r"@([0-9.]+)@")


class InstantEngine:
    """`GenerateHandler` that computes nothing."""

    def __init__(self) -> None:
        ids = reply_ids()
        self._ids, self._num = pack_int32(ids), len(ids)
        self._logprobs = pack_float32([-0.5] * self._num)
        self._spans = (TokenSpan(1, "", self._num),)

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        """Answer, now or after the wait that the prompt asks for."""
        found = _WAIT.findall(text_of(as_int32(request.prompt_ids)[-80:]))
        if found:
            asyncio.get_running_loop().call_later(float(found[-1]), self._answer, request, sink)
        else:
            self._answer(request, sink)

    def abort(self, call_id: str) -> None:
        """Nothing to end."""

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """Nothing is kept."""

    def _answer(self, request: GenerateRequest, sink: ChunkSink) -> None:
        ids, logprobs, spans = self._ids, self._logprobs, self._spans
        stop = FinishReason.STOP
        sink.send(TokenChunk(request.call_id, ids, logprobs, spans, stop, None, 0))


async def serve(run: str, endpoint: str) -> None:
    """Serve until killed."""
    server = ZmqGenerateServer(endpoint)
    await server.start(InstantEngine())
    service = Service("scheduler", RunConfig(exp_name=run), Endpoints.from_env())

    async def lease(request: LeaseRequest) -> LeaseReply:
        leases = (Lease(one, "s0", "", server.endpoint) for one in request.episode_ids)
        return LeaseReply(tuple(leases))

    service.endpoint(subjects.lease(run), LeaseRequest, lease)
    await service.serve()


def main() -> None:
    """Run."""
    uvloop.run(serve(sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    main()
