"""Check of a `GenerateRequest` against the limits of a model and the features of an engine."""

import math

import numpy as np
from numpy.typing import NDArray

from tailrace_inference.ports import EngineFeatures
from tailrace_protos.base import as_int32
from tailrace_protos.generation import (
    CallError,
    CallErrorCode,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)

_MAX_TOP_K = 2**31 - 1  # engines hold it in 32 bits
_MAX_STOP_IDS = 1024  # engines compare each token of all calls with as many as any call has


class InvalidRequestError(ValueError):
    """An invalid request; the message names the field and its bounds."""


class LongPromptError(InvalidRequestError):
    """A prompt without room for an answer. Attribute: `limit_tokens`."""

    def __init__(self, num_prompt: int, limit_tokens: int) -> None:
        super().__init__(
            f"prompt_ids has {num_prompt} tokens; prompt and answer together may have {limit_tokens}"
        )
        self.limit_tokens = limit_tokens


def failed(call_id: str, code: CallErrorCode, reason: str, retry_after_s: float = 0.0) -> TokenChunk:
    """The only chunk of a refused call."""
    return TokenChunk(call_id, error=CallError(code, reason, retry_after_s))


def refused(call_id: str, error: InvalidRequestError) -> TokenChunk:
    """The only chunk of an invalid call."""
    if not isinstance(error, LongPromptError):
        return failed(call_id, CallErrorCode.INVALID, str(error))
    code, limit = CallErrorCode.TOO_LONG, error.limit_tokens
    return TokenChunk(call_id, error=CallError(code, str(error), limit_tokens=limit))


def check_request(
    request: GenerateRequest, max_len: int, vocab_size: int, features: EngineFeatures
) -> NDArray[np.int32]:
    """The prompt [P] of a valid request; raises `InvalidRequestError`."""
    if len(request.prompt_ids) % 4:
        raise InvalidRequestError(
            f"prompt_ids has {len(request.prompt_ids)} bytes, not a multiple of 4"
        )
    prompt = as_int32(request.prompt_ids)
    _check_counts(request, len(prompt), max_len, features.max_top_logprobs)
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise InvalidRequestError(f"prompt_ids must be in 0..{vocab_size - 1}")
    _check_sampling(request.sampling, vocab_size)
    _check_features(request.sampling, features)
    if request.guide is not None:
        _check_guide(request, features)
    return prompt


def _check_features(sampling: SamplingParams, features: EngineFeatures) -> None:
    if sampling.stop and not features.stop_strings:
        raise InvalidRequestError(
            "sampling.stop needs a tokenizer, but this engine has none: use stop_token_ids"
        )
    if 0 < sampling.temperature < features.least_temperature:
        raise InvalidRequestError(
            f"sampling.temperature is {sampling.temperature}: this engine takes 0 (greedy), or at "
            f"least {features.least_temperature:g}"
        )
    if sampling.min_p and not features.min_p:
        raise InvalidRequestError(
            "sampling.min_p: this engine has none while it speculates: leave it out, or leave "
            "speculative decoding out"
        )
    if sampling.seed is not None and features.seeds == "no":
        raise InvalidRequestError("sampling.seed: this engine knows no seeds: leave it out")


def _check_guide(request: GenerateRequest, features: EngineFeatures) -> None:
    guide = request.guide
    assert guide is not None
    if not features.guided and not guide.is_optional:
        raise InvalidRequestError("guide: this engine binds no reply to a grammar: leave it out")
    if not guide.json_schema and guide.calls is None:
        raise InvalidRequestError("guide: it allows no reply: set json_schema or calls")
    if guide.calls is not None and not guide.calls.schemas:
        raise InvalidRequestError("guide.calls.schemas is empty")
    if not request.sampling.stop_token_ids:
        raise InvalidRequestError("guide needs sampling.stop_token_ids: one of them ends the reply")


def _check_counts(
    request: GenerateRequest, num_prompt: int, max_len: int, max_top_logprobs: int
) -> None:
    if num_prompt == 0:
        raise InvalidRequestError("prompt_ids is empty")
    if request.max_new_tokens < 1:
        raise InvalidRequestError(f"max_new_tokens is {request.max_new_tokens}, must be at least 1")
    if num_prompt >= max_len:
        raise LongPromptError(num_prompt, max_len)
    if not 0 <= request.top_logprobs <= max_top_logprobs:
        raise InvalidRequestError(
            f"top_logprobs is {request.top_logprobs}, must be in 0..{max_top_logprobs}"
        )
    if not 0 <= request.num_continued <= num_prompt:
        raise InvalidRequestError(
            f"num_continued is {request.num_continued} of {num_prompt} prompt_ids"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequestError(
            f"sampling.temperature is {sampling.temperature}, must be finite and >= 0"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"sampling.top_p is {sampling.top_p}, must be in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequestError(f"sampling.min_p is {sampling.min_p}, must be in [0, 1]")
    if not 0 <= sampling.top_k <= _MAX_TOP_K:
        raise InvalidRequestError(
            f"sampling.top_k is {sampling.top_k}, must be in 0..{_MAX_TOP_K} (0: off)"
        )
    if len(sampling.stop_token_ids) > _MAX_STOP_IDS:
        raise InvalidRequestError(
            f"sampling.stop_token_ids has {len(sampling.stop_token_ids)} ids, at most {_MAX_STOP_IDS}"
        )
    if any(not 0 <= token_id < vocab_size for token_id in sampling.stop_token_ids):
        raise InvalidRequestError(f"sampling.stop_token_ids must be in 0..{vocab_size - 1}")
    if "" in sampling.stop:
        raise InvalidRequestError("sampling.stop holds an empty string")
