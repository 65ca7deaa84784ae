"""What a worker says back: acceptances, results (big ones by claim check), refusals."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tailrace.bus import Bus, CallFailedError
from tailrace.bus.calls import error_headers
from tailrace.tools.results import infra_result, too_large
from tailrace.tools.wire import ClaimCheck, ClaimCheckError, Form
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import CallTool, ToolResult


@dataclass(frozen=True)
class ReplyTo:
    """Where a caller listens, and the form that it reads. An empty subject: nobody listens."""

    subject: str
    form: Form


class Replies:
    """Answers requests."""

    def __init__(self, bus: Bus, claims: ClaimCheck) -> None:
        self._bus = bus
        self._claims = claims

    async def send(self, to: ReplyTo, message: object) -> None:
        """A message of any kind."""
        if to.subject:
            data = to.form.encode(message)
            await self._bus.connection.publish(to.subject, data, headers=to.form.headers)

    async def result(self, to: ReplyTo, result: ToolResult, run: str) -> None:
        """A result; its content is put aside if it is too big for a message."""
        data = to.form.encode(result)
        if len(data) > self._claims.max_bytes:
            data = to.form.encode(await self._put_aside(result, run))
        await self._bus.connection.publish(to.subject, data, headers=to.form.headers)

    async def refuse(
        self, to: ReplyTo, code: CallErrorCode, reason: str, retry_after_s: float = 0.0
    ) -> None:
        """Say that a request will not be served."""
        if to.subject:
            headers = error_headers(CallFailedError(code, reason, retry_after_s))
            await self._bus.connection.publish(to.subject, b"", headers=headers)

    async def _put_aside(self, result: ToolResult, run: str) -> ToolResult:
        content = result.content.encode()
        call = CallTool(result.call_id, result.name)
        if not self._claims.is_possible:
            remedy = " by a worker that has no Redis"
            return too_large(call, len(content), self._claims.max_bytes, remedy)
        try:
            ref = await self._claims.put(run, content)
        except ClaimCheckError as error:
            return infra_result(call, f"cannot keep the result: {error}")
        return msgspec.structs.replace(result, content="", content_blob=ref)
