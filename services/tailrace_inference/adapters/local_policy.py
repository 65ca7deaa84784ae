"""Policy within one process, for episodes without a cluster."""

import asyncio
from types import TracebackType
from typing import NoReturn

import msgspec

from tailrace.channel.generation import Generation, TokenBuffer
from tailrace.sdk.policy import GenerationFailedError, PromptTooLongError, TurnRequest
from tailrace_inference.ports import Engine
from tailrace_protos.generation import CallErrorCode, GenerateRequest, TokenChunk


class LocalPolicy:
    """`sdk.policy.Policy` of an engine: `async with LocalPolicy(engine) as policy:`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> "LocalPolicy":
        await self._engine.start()
        self._running = asyncio.create_task(self._engine.watch(), name="engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait({self._running})
        await self._engine.close()

    async def generate(self, request: TurnRequest) -> Generation:
        """See `Policy`. A cancelled caller aborts its call; a failed engine raises its error."""
        assert self._running is not None, "used outside `async with`"
        ledger = TokenBuffer()
        ended = asyncio.get_running_loop().create_future()

        def on_part(chunk: TokenChunk) -> None:
            ledger.add(chunk)
            if request.on_chunk is not None and len(chunk.token_ids):
                request.on_chunk(msgspec.structs.replace(chunk, finish_reason=None, stop_matched=None))
            if ledger.last is not None and not ended.done():
                ended.set_result(None)

        call_id = f"{request.episode_id}.{request.turn}"
        call = GenerateRequest(
            call_id,
            request.episode_id,
            request.prompt_ids,
            request.max_new_tokens,
            request.sampling,
            top_logprobs=request.top_logprobs,
            guide=request.guide,
        )
        self._engine.submit(call, on_part)
        try:
            await asyncio.wait({ended, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not ended.done():
                self._engine.abort(call_id)
        if self._running.done():
            self._running.result()
        assert ledger.last is not None
        if (error := ledger.last.error) is not None:
            if error.code is CallErrorCode.TOO_LONG:
                num_prompt = len(request.prompt_ids) // 4
                raise PromptTooLongError(call_id, num_prompt, error.limit_tokens)
            raise GenerationFailedError(call_id, 1, error.reason)
        return ledger.generation()
