"""Output of the engine: chunks of sampled tokens, and the ends of calls.

Invariants: a chunk's tokens are of one policy version, since pending tokens are sent before a swap; a
call's tokens leave in order and once; a stop id wins over a stop string, a stop string over the length.
"""

import numpy as np

from tailrace_inference.core.requests import failed
from tailrace_inference.engine.batch import Batch, EngineCall
from tailrace_inference.engine.kv_cache import Int64Array
from tailrace_protos.base import EMPTY, Float32Bytes, Int32Bytes, pack_float32, pack_int32
from tailrace_protos.generation import CallErrorCode, FinishReason, TokenChunk, TokenSpan

Ended = tuple[int, FinishReason, int | str | None]  # row, reason, matched stop


class Emitter:
    """Sends the pending tokens of rows to the callbacks of their calls."""

    def __init__(self, batch: Batch, chunk_tokens: int, interval_s: float) -> None:
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._interval_s = interval_s
        self.num_generated = 0
        self.num_finished = 0
        self.num_nonfinite = 0

    def ended(self, rows: Int64Array) -> list[Ended]:
        """Those of `rows` [n] that end with their newest token."""
        batch = self._batch
        tokens = batch.tokens[rows, batch.length[rows] - 1]
        stopped = (batch.stop_ids[rows] == tokens[:, None]).any(axis=1)
        full = batch.length[rows] >= batch.max_len[rows]
        strings = batch.has_strings[rows]
        ended: list[Ended] = []
        for index in np.flatnonzero(stopped | full | strings).tolist():
            row, token = int(rows[index]), int(tokens[index])
            stops = batch.call(row).stops
            matched = stops.push(token) if stops is not None else None
            if stopped[index]:
                ended.append((row, FinishReason.STOP, token))
            elif matched is not None:
                ended.append((row, FinishReason.STOP, matched))
            elif full[index]:
                ended.append((row, FinishReason.LENGTH, None))
        return ended

    def flush_due(self, policy_version: int, now_s: float) -> None:
        """Sends pending tokens of rows whose chunk is full or whose interval has passed."""
        batch = self._batch
        rows = batch.active()
        pending = batch.num_out[rows]
        late = (now_s - batch.sent_s[rows] >= self._interval_s) & (pending > 0)
        self.flush(rows[late | (pending >= self._chunk_tokens)], policy_version, now_s)

    def flush(self, rows: Int64Array, policy_version: int, now_s: float) -> None:
        """Sends the pending tokens of `rows` [n]."""
        for row in rows[self._batch.num_out[rows] > 0].tolist():
            call = self._batch.call(row)
            call.on_chunk(self._chunk(row, call, policy_version, None, None))
            self._batch.sent_s[row] = now_s

    def close(
        self, row: int, policy_version: int, reason: FinishReason, stop_matched: int | str | None
    ) -> None:
        """Sends the last chunk of a row."""
        call = self._batch.call(row)
        self.num_finished += 1
        call.on_chunk(self._chunk(row, call, policy_version, reason, stop_matched))

    def fail(self, row: int, reason: str) -> None:
        """Ends the call of a row without pending tokens by an error of the request."""
        call = self._batch.call(row)
        call.on_chunk(failed(call.call_id, CallErrorCode.INVALID, reason))

    def close_waiting(self, call: EngineCall) -> None:
        """Sends the last chunk of an aborted call without a row."""
        self.num_finished += 1
        call.on_chunk(
            TokenChunk(
                call.call_id, finish_reason=FinishReason.ABORT, num_cached_tokens=call.num_cached
            )
        )

    def _chunk(
        self,
        row: int,
        call: EngineCall,
        policy_version: int,
        reason: FinishReason | None,
        matched: int | str | None,
    ) -> TokenChunk:
        batch = self._batch
        count = int(batch.num_out[row])
        logprobs = batch.out_logprobs[row, :count].copy()
        batch.num_out[row] = 0
        top_ids, top_logprobs = self._top_logprobs(row, count, call.num_top_logprobs)
        self.num_generated += count
        self.num_nonfinite += count - int(np.count_nonzero(np.isfinite(logprobs)))
        return TokenChunk(
            call.call_id,
            pack_int32(batch.out_ids[row, :count].copy()),
            pack_float32(logprobs),
            (TokenSpan(policy_version, "", count),) if count else (),
            reason,
            matched,
            call.num_cached if reason is not None else 0,
            None,
            top_ids,
            top_logprobs,
            call.queue_s if reason is not None else -1.0,
        )

    def _top_logprobs(self, row: int, count: int, width: int) -> tuple[Int32Bytes, Float32Bytes]:
        """The likeliest tokens of a row's pending steps [count * width] and their log-probabilities."""
        batch = self._batch
        if not width:
            return EMPTY, EMPTY
        return (
            pack_int32(batch.out_top_ids[row, :count, :width].flatten()),
            pack_float32(batch.out_top_logprobs[row, :count, :width].flatten()),
        )
