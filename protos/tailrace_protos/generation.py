"""Generation: token ids in, streamed token chunks with log-probabilities and policy versions out.

`gc=False`: a server makes ten thousands of these messages. They hold no reference cycles, and the
garbage collector took a quarter of the server's time.
"""

import enum

import msgspec

from tailrace_protos.base import EMPTY, Count, Finite, Float32Bytes, Int32Bytes, Message, PolicyVersion

# `policy_version` of tokens that no policy of the run sampled. Those without a log-probability (NaN)
# count as sampled by the weights that the learner's step starts with.
GIVEN_VERSION = -2
MAX_TOP_LOGPROBS = 20  # largest `GenerateRequest.top_logprobs`


class FinishReason(enum.StrEnum):
    """Reason for the end of a generation; all engines use it in the same sense."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Parameters for the choice of tokens. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off.

    `temperature` 0 is greedy. `inference_logprobs` are those after the temperature and the guide, and
    before top-k, top-p and min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class GuidedCalls(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Tool calls as text: `begin`, JSON of one of `schemas`, `end`; `separator` between two calls."""

    schemas: tuple[str, ...]  # JSON Schemas of the calls, one for each tool, as text
    begin: str = ""
    end: str = ""
    separator: str = ""
    is_single: bool = False  # at most one call


class Guide(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Texts that a reply may be: a JSON value of `json_schema`, or `calls`; either, if both are given.

    The reply ends with one of the request's `stop_token_ids`, which it gets only when it is whole. With
    `thought_end`, thoughts come first: free text from `thought_begin` to `thought_end`. They may be
    left out, unless `thought_begin` is empty: then the prompt has begun them.
    """

    json_schema: str = ""  # JSON text
    calls: GuidedCalls | None = None
    thought_begin: str = ""
    thought_end: str = ""
    is_optional: bool = False  # an engine that cannot follow it samples freely; others refuse the call


class GenerateRequest(Message, frozen=True, tag="generate_request", gc=False):
    """One model turn. `max_new_tokens` is the rest of the episode's budget.

    Another server sampled the last `num_continued` ids of `prompt_ids` for this call before it failed:
    stop strings include them, and a seeded sample continues after them.
    With `top_logprobs` k above 0, each sampled token comes with the k likeliest tokens of its step.
    """

    call_id: str
    episode_id: str  # servers keep the KV cache of an episode's earlier turns under this id
    prompt_ids: Int32Bytes  # [P]
    max_new_tokens: Count
    sampling: SamplingParams = SamplingParams()
    num_continued: Count = 0
    traceparent: str = ""
    top_logprobs: int = 0  # at most `MAX_TOP_LOGPROBS`; a smaller vocabulary gives fewer
    guide: Guide | None = None


class TokenSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`num_tokens` consecutive sampled tokens of one policy version and one server.

    The one form of provenance from engine to learner. `source` is empty on the wire between engine
    and caller: the caller knows the server and fills it in.
    """

    policy_version: PolicyVersion
    # `tailrace_protos.control.source_of` of the server, or `bound_source` of that; empty: not known
    source: str
    num_tokens: Count


class CallErrorCode(enum.StrEnum):
    """Kind of a failed call, from the view of the caller."""

    INVALID = "invalid"  # wrong request; do not retry
    TOO_LONG = "too_long"  # the prompt leaves no room in the longest sequence; do not retry
    OVERLOADED = "overloaded"  # full; retry after `retry_after_s`
    NOT_READY = "not_ready"  # no weights yet, or draining; try elsewhere
    INTERNAL = "internal"  # the server failed; try elsewhere


class CallError(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Failure of a call."""

    code: CallErrorCode
    reason: str
    retry_after_s: Finite = 0.0
    limit_tokens: Count = 0  # of a prompt and its answer, with `too_long`


class TokenChunk(Message, frozen=True, tag="token_chunk", omit_defaults=True, gc=False):
    """Newly sampled tokens of a call; the last chunk has `finish_reason` or `error`.

    `top_ids` and `top_logprobs` hold k entries per token, the likeliest first, of the distribution of
    `inference_logprobs`; they are empty unless the request asks. All chunks of a call have the same k.
    """

    call_id: str
    token_ids: Int32Bytes = EMPTY  # [t]
    inference_logprobs: Float32Bytes = EMPTY  # [t]
    spans: tuple[TokenSpan, ...] = ()  # num_tokens sum to t
    finish_reason: FinishReason | None = None
    stop_matched: int | str | None = None  # the stop token id or stop string that matched
    num_cached_tokens: Count = 0  # prompt tokens with reused keys and values (last chunk only)
    error: CallError | None = None
    top_ids: Int32Bytes = EMPTY  # [t * k]
    top_logprobs: Float32Bytes = EMPTY  # [t * k]
    queue_s: float = -1.0  # wait for a place in the batch (last chunk only); -1: not known


class AbortRequest(Message, frozen=True, tag="abort_request"):
    """Stops these calls; each ends with a last chunk with finish reason `abort`."""

    call_ids: tuple[str, ...]


class ReleasePrefixes(Message, frozen=True, tag="release_prefixes"):
    """Contexts that nobody asks this server for again: the episodes ended, or go on elsewhere.

    It has no answer, and a lost one costs room in the cache alone.
    """

    episode_ids: tuple[str, ...]


class RequestFrame(Message, frozen=True, array_like=True, tag="request_frame"):
    """Frame from one client to one server; an empty frame keeps the link alive.

    `sequence` counts a client's frames to this server from 0. A server that misses one breaks the
    link, since calls are lost. `received` counts the server's frames that the client has taken: it
    bounds the frames without confirmation. `closing`: the client closes the link.
    """

    sequence: Count
    received: Count = 0
    messages: tuple[GenerateRequest | AbortRequest | ReleasePrefixes, ...] = ()
    closing: bool = False


class ChunkFrame(Message, frozen=True, array_like=True, tag="chunk_frame"):
    """Frame from one server to one client; an empty frame answers an empty frame.

    `sequence` counts a server's frames to this client from 0. A client that misses one ends all calls
    of the link, since tokens are lost. `received` counts the client's frames that the server has taken,
    as in `RequestFrame`. `broken`: reason of the server to break the link.
    """

    sequence: Count
    received: Count = 0
    messages: tuple[TokenChunk, ...] = ()
    broken: str = ""
