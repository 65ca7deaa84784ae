"""Running requests as rows of arrays, for vectorised bookkeeping of a step.

Invariants: a row's tokens are `tokens[row, :length]`; the keys and values of the first `computed` of
them are in the cache blocks `table[row, :num_blocks]`, whose other entries are 0 (the block of zeros);
`computed < length`; sampled tokens that are not sent yet are `out_ids[row, :num_out]`, of one policy
version, and the likeliest tokens of their steps `out_top_ids[row, :num_out, :num_top_logprobs]`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tailrace_inference.engine.guided import GuideMatcher
from tailrace_inference.engine.kv_cache import Int64Array
from tailrace_inference.engine.sampling import SamplingRows
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import OnChunk
from tailrace_protos.generation import MAX_TOP_LOGPROBS, SamplingParams

_NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class EngineCall:
    """One request from `submit` to its last chunk."""

    call_id: str
    episode_id: str
    token_ids: NDArray[np.int32]  # prompt and, after a preemption, sampled tokens
    num_prompt: int
    num_continued: int
    max_len: int  # prompt and answer, at which the call ends
    sampling: SamplingParams
    key: int  # of the random numbers
    on_chunk: OnChunk
    stops: StopStrings | None
    num_top_logprobs: int = 0  # likeliest tokens to report for each step
    guide: GuideMatcher | None = None
    num_cached: int = 0
    num_seen: int = 0  # tokens computed at least once
    prompt_key: bytes | None = None  # digest of the prompt, once computed
    row: int = -1  # -1 while it waits
    submitted_s: float = 0.0  # in the time of the engine's steps
    queue_s: float = -1.0  # until it first got a row; -1: it has had none


class Batch:
    """Rows of at most `max_running` calls; see the invariants of the module."""

    def __init__(self, max_running: int, max_len: int, max_blocks: int, chunk_tokens: int) -> None:
        def column(dtype: DTypeLike, *more: int) -> NDArray[Any]:
            return np.zeros((max_running, *more), dtype)  # pages are only committed when touched

        self._calls: list[EngineCall | None] = [None] * max_running
        self.tokens: NDArray[np.int32] = column(np.int32, max_len + 1)
        self.table: Int64Array = column(np.int64, max_blocks)
        self.num_blocks: Int64Array = column(np.int64)
        self.length: Int64Array = column(np.int64)
        self.computed: Int64Array = column(np.int64)
        self.seen: Int64Array = column(np.int64)
        self.max_len: Int64Array = column(np.int64)
        self.kv_version: Int64Array = column(np.int64)
        self.counter_base: Int64Array = column(np.int64)
        self.key: NDArray[np.uint64] = column(np.uint64)
        self.temperature: NDArray[np.float32] = column(np.float32)
        self.top_p: NDArray[np.float32] = column(np.float32)
        self.top_k: Int64Array = column(np.int64)
        self.min_p: NDArray[np.float32] = column(np.float32)
        self.stop_ids: Int64Array = np.full((max_running, 2), _NO_TOKEN, np.int64)
        self.has_strings: NDArray[np.bool_] = column(np.bool_)
        self.out_ids: NDArray[np.int32] = column(np.int32, chunk_tokens)
        self.out_logprobs: NDArray[np.float32] = column(np.float32, chunk_tokens)
        self.num_out: Int64Array = column(np.int64)
        self.num_top_logprobs: Int64Array = column(np.int64)
        self.is_guided: NDArray[np.bool_] = column(np.bool_)
        self.num_guided = 0
        self.num_asking = 0  # rows whose `num_top_logprobs` is above 0
        self.out_top_ids: NDArray[np.int32] = column(np.int32, chunk_tokens, MAX_TOP_LOGPROBS)
        self.out_top_logprobs: NDArray[np.float32] = column(np.float32, chunk_tokens, MAX_TOP_LOGPROBS)
        self.sent_s: NDArray[np.float64] = column(np.float64)
        self._free = list(range(max_running - 1, -1, -1))
        self._order: list[int] = []
        self._active: Int64Array | None = np.empty(0, np.int64)

    @property
    def has_room(self) -> bool:
        """True if a row is free."""
        return bool(self._free)

    @property
    def newest(self) -> int:
        """The row added last."""
        return self._order[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows. Other threads than that of the steps may ask."""
        return int(self.length[list(self._order)].sum())

    def __len__(self) -> int:
        return len(self._order)

    def active(self) -> Int64Array:
        """Rows in use [R], in the order of their addition."""
        if self._active is None:
            self._active = np.array(self._order, np.int64)
        return self._active

    def add(
        self, call: EngineCall, blocks: Int64Array, computed: int, kv_version: int, now_s: float
    ) -> int:
        """Adds a row for `call`, whose first `computed` tokens are in `blocks`."""
        row = call.row = self._free.pop()
        self._order.append(row)
        self._active = None
        self._calls[row] = call
        if call.queue_s < 0:
            call.queue_s = max(0.0, now_s - call.submitted_s)
        length = len(call.token_ids)
        self.tokens[row, :length] = call.token_ids
        self.table[row, : len(blocks)] = blocks
        self.num_blocks[row], self.length[row], self.computed[row] = len(blocks), length, computed
        self.seen[row] = max(call.num_seen, computed)
        self.max_len[row], self.kv_version[row], self.num_out[row] = call.max_len, kv_version, 0
        self.sent_s[row] = now_s
        self.num_top_logprobs[row] = call.num_top_logprobs
        self.num_asking += call.num_top_logprobs > 0
        self.is_guided[row] = call.guide is not None
        self.num_guided += call.guide is not None
        self._set_sampling(row, call)
        return row

    def _set_sampling(self, row: int, call: EngineCall) -> None:
        sampling = call.sampling
        self.key[row] = call.key
        self.counter_base[row] = call.num_prompt - call.num_continued
        self.temperature[row], self.top_p[row] = sampling.temperature, sampling.top_p
        self.top_k[row], self.min_p[row] = sampling.top_k, sampling.min_p
        self.has_strings[row] = call.stops is not None
        num_stops = len(sampling.stop_token_ids)
        if num_stops > self.stop_ids.shape[1]:
            more = np.full(
                (len(self.stop_ids), num_stops - self.stop_ids.shape[1]), _NO_TOKEN, np.int64
            )
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, :num_stops] = sampling.stop_token_ids

    def call(self, row: int) -> EngineCall:
        """Call of a row in use."""
        call = self._calls[row]
        assert call is not None, f"row {row} is free"
        return call

    def keep_tokens(self, row: int) -> None:
        """Copies a row's tokens to its call, which will be computed again."""
        self.call(row).token_ids = self.tokens[row, : self.length[row]].copy()

    def remove(self, row: int) -> EngineCall:
        """Frees a row whose blocks are released."""
        call = self.call(row)
        assert self.num_blocks[row] == 0, "blocks are released before their row is removed"
        call.num_seen = int(self.seen[row])
        call.row = -1
        self.num_asking -= call.num_top_logprobs > 0
        self.num_guided -= call.guide is not None
        self.is_guided[row] = False
        self._calls[row] = None
        self._free.append(row)
        self._order.remove(row)
        self._active = None
        return call

    def release(self, row: int) -> Int64Array:
        """Takes the blocks of a row away; none of its tokens count as computed then."""
        count = self.num_blocks[row]
        blocks = self.table[row, :count].copy()
        self.table[row, :count] = 0
        self.num_blocks[row] = self.computed[row] = 0
        return blocks

    def extend(self, rows: Int64Array, counts: Int64Array, blocks: Int64Array) -> None:
        """Appends `counts` [R] of the new `blocks` to the block tables of `rows` [R]."""
        owners = np.repeat(rows, counts)
        place = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.table[owners, self.num_blocks[owners] + place] = blocks
        self.num_blocks[rows] += counts

    def sampling_rows(self, rows: Int64Array) -> SamplingRows:
        """Sampling parameters of `rows` [n] for their next token."""
        return SamplingRows(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.key[rows],
            self.length[rows] - self.counter_base[rows],
        )

    def put_top_logprobs(
        self, rows: Int64Array, ids: Int64Array, logprobs: NDArray[np.float32]
    ) -> None:
        """Stores the likeliest tokens [n, k] of the step whose tokens `append` stores next."""
        place = self.num_out[rows]
        self.out_top_ids[rows, place, : ids.shape[1]] = ids
        self.out_top_logprobs[rows, place, : ids.shape[1]] = logprobs

    def append(self, rows: Int64Array, tokens: Int64Array, logprobs: NDArray[np.float32]) -> None:
        """Appends a sampled token to each of `rows` [n]."""
        self.tokens[rows, self.length[rows]] = tokens
        self.length[rows] += 1
        place = self.num_out[rows]
        self.out_ids[rows, place] = tokens
        self.out_logprobs[rows, place] = logprobs
        self.num_out[rows] += 1
