"""Requests to leave, and probes of the engine."""

from __future__ import annotations

import pytest

from tailrace.bus import CallFailedError
from tailrace.channel import ChunkSink
from tailrace_inference.handlers import ControlHandler
from tailrace_protos.base import pack_int32
from tailrace_protos.control import DrainRequest, ProbeRequest
from tailrace_protos.generation import (
    CallError,
    CallErrorCode,
    FinishReason,
    GenerateRequest,
    TokenChunk,
)
from tests.unit.tailrace_scheduler.simulation import made_status


class FakeCalls:
    """Samples a token, then ends as told."""

    def __init__(self, **end: object) -> None:
        self.end = end
        self.asked: list[int] = []

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.asked.append(request.max_new_tokens)
        sink.send(TokenChunk(request.call_id, pack_int32([7])))
        sink.send(TokenChunk(request.call_id, **self.end))  # type: ignore[arg-type]

    def abort(self, call_id: str) -> None:
        raise AssertionError(call_id)

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        raise AssertionError(episode_ids)


@pytest.mark.parametrize(("meant", "leaves"), [("", True), ("now", True), ("before", False)])
async def test_a_server_leaves_unless_an_earlier_start_of_it_was_meant(
    meant: str, leaves: bool
) -> None:
    status = made_status("inference-0", incarnation="now")
    reasons: list[str] = []
    control = ControlHandler(reasons.append, lambda: status, FakeCalls())
    reply = await control.drain(DrainRequest("wrong", meant))
    assert reply == status
    assert bool(reasons) is leaves


async def test_a_probe_samples_one_token_and_tells_the_engines_error() -> None:
    status = made_status("inference-0")
    healthy = FakeCalls(finish_reason=FinishReason.LENGTH)
    control = ControlHandler(print, lambda: status, healthy)
    assert await control.probe(ProbeRequest()) == status
    assert healthy.asked == [1]
    broken = FakeCalls(error=CallError(CallErrorCode.INTERNAL, "out of memory"))
    with pytest.raises(CallFailedError, match="out of memory"):
        await ControlHandler(print, lambda: status, broken).probe(ProbeRequest())
