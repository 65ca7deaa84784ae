"""Generation: token ids in, streamed token chunks with log-probabilities and policy versions out.

`gc=False`: these messages are made by the ten thousand and can hold no reference cycles, so the
collector need not look at them (it cost a server a quarter of its time).
"""

from __future__ import annotations

import enum

import msgspec

from tailrace_protos.base import EMPTY, Float32Bytes, Int32Bytes, Message

MAX_TOP_LOGPROBS = 20  # what `GenerateRequest.top_logprobs` may be at most


class FinishReason(enum.StrEnum):
    """End of a generation; means the same for every engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Parameters of sampling. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off.

    `temperature` 0 is greedy. `inference_logprobs` are those of the distribution sampled from: after
    the temperature, before top-k/top-p/min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class GenerateRequest(Message, frozen=True, tag="generate_request", gc=False):
    """One model turn. `max_new_tokens` is what is left of the episode's budget.

    The last `num_continued` ids of `prompt_ids` were sampled by another server for this same call
    before it failed: stop strings see them and a seeded sample continues after them.
    With `top_logprobs` k above 0, each sampled token comes with the k likeliest tokens of its step.
    """

    call_id: str
    episode_id: str  # servers keep the KV cache of an episode's earlier turns under this id
    prompt_ids: Int32Bytes  # [P]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    num_continued: int = 0
    traceparent: str = ""
    top_logprobs: int = 0  # at most `MAX_TOP_LOGPROBS`; a smaller vocabulary gives fewer


class TokenSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`num_tokens` consecutive sampled tokens of one policy version and one server.

    The one form of provenance from engine to learner. `source` is empty on the wire between engine
    and caller: the caller knows the server and fills it in.
    """

    policy_version: int
    source: str  # `tailrace_protos.control.source_of` of the server; empty: not known
    num_tokens: int


class CallErrorCode(enum.StrEnum):
    """Kind of failure of a call, as its caller sees it."""

    INVALID = "invalid"  # the request itself is wrong; do not retry
    OVERLOADED = "overloaded"  # full; retry after `retry_after_s`
    NOT_READY = "not_ready"  # no weights yet, or draining; try elsewhere
    INTERNAL = "internal"  # the server failed; try elsewhere


class CallError(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A failed call's reason, in a form that the caller can act on."""

    code: CallErrorCode
    reason: str
    retry_after_s: float = 0.0


class TokenChunk(Message, frozen=True, tag="token_chunk", omit_defaults=True, gc=False):
    """Some newly sampled tokens of a call; the last chunk has `finish_reason` or `error`.

    `top_ids` and `top_logprobs` hold k entries a token, the likeliest first, of the distribution that
    `inference_logprobs` are of; empty unless the request asked. k is one for all chunks of a call.
    """

    call_id: str
    token_ids: Int32Bytes = EMPTY  # [t]
    inference_logprobs: Float32Bytes = EMPTY  # [t]
    spans: tuple[TokenSpan, ...] = ()  # num_tokens sum to t
    finish_reason: FinishReason | None = None
    stop_matched: int | str | None = None  # the stop token id or stop string that matched
    num_cached_tokens: int = 0  # prompt tokens whose KV was reused (last chunk only)
    error: CallError | None = None
    top_ids: Int32Bytes = EMPTY  # [t * k]
    top_logprobs: Float32Bytes = EMPTY  # [t * k]


class AbortRequest(Message, frozen=True, tag="abort_request"):
    """Stop these calls; each answers with a last chunk whose finish reason is `abort`."""

    call_ids: tuple[str, ...]


class RequestFrame(Message, frozen=True, array_like=True, tag="request_frame"):
    """Frame from one client to one server; an empty one is a sign of life.

    `sequence` counts a client's frames to this server from 0. A server that misses one breaks the
    link, since it cannot know which calls were lost. `received` counts the server's frames that were
    taken: the server may send only so much that is not confirmed. `closing`: nothing more is wanted.
    """

    sequence: int
    received: int = 0
    messages: tuple[GenerateRequest | AbortRequest, ...] = ()
    closing: bool = False


class ChunkFrame(Message, frozen=True, array_like=True, tag="chunk_frame"):
    """Frame from one server to one client; an empty one answers an empty one.

    `sequence` counts a server's frames to this client from 0. A client that misses one gives up all
    calls on the link: tokens are missing. `received` counts the client's frames that were taken, as in
    `RequestFrame`. `broken` says why the server gave the link up.
    """

    sequence: int
    received: int = 0
    messages: tuple[TokenChunk, ...] = ()
    broken: str = ""
