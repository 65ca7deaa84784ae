"""Checks a `GenerateRequest` against the model's limits and makes an `EngineCall` of it."""

import math
import secrets

from tokenizers import Tokenizer

from tailrace_inference.engine.batch import EngineCall
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import OnChunk
from tailrace_protos.base import as_int32
from tailrace_protos.generation import MAX_TOP_LOGPROBS, GenerateRequest, SamplingParams


class InvalidRequestError(ValueError):
    """An invalid request; the message names the field and its bounds."""


def make_call(
    request: GenerateRequest,
    on_chunk: OnChunk,
    max_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> EngineCall:
    """Checks a request against the limits of the model; raises `InvalidRequestError`."""
    if len(request.prompt_ids) % 4:
        raise InvalidRequestError(
            f"prompt_ids has {len(request.prompt_ids)} bytes, not a multiple of 4"
        )
    prompt = as_int32(request.prompt_ids)
    _check_counts(request, len(prompt), max_len)
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise InvalidRequestError(f"prompt_ids must be in 0..{vocab_size - 1}")
    sampling = request.sampling
    _check_sampling(sampling, vocab_size)
    stops = None
    if sampling.stop:
        if tokenizer is None:
            raise InvalidRequestError(
                "sampling.stop needs a tokenizer, but this engine has none: use stop_token_ids"
            )
        continued = prompt[len(prompt) - request.num_continued :].tolist()
        stops = StopStrings(tokenizer, sampling.stop, continued)
    return EngineCall(
        call_id=request.call_id,
        episode_id=request.episode_id,
        token_ids=prompt.copy(),  # the request is a view of a received frame
        num_prompt=len(prompt),
        num_continued=request.num_continued,
        max_len=min(max_len, len(prompt) + request.max_new_tokens),
        sampling=sampling,
        key=secrets.randbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1),
        on_chunk=on_chunk,
        stops=stops,
        num_top_logprobs=min(request.top_logprobs, vocab_size),
    )


def _check_counts(request: GenerateRequest, num_prompt: int, max_len: int) -> None:
    if num_prompt == 0:
        raise InvalidRequestError("prompt_ids is empty")
    if request.max_new_tokens < 1:
        raise InvalidRequestError(f"max_new_tokens is {request.max_new_tokens}, must be at least 1")
    if num_prompt >= max_len:
        raise InvalidRequestError(
            f"prompt_ids has {num_prompt} tokens; prompt and answer together may have {max_len}"
        )
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs is {request.top_logprobs}, must be in 0..{MAX_TOP_LOGPROBS}"
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
    if sampling.top_k < 0:
        raise InvalidRequestError(f"sampling.top_k is {sampling.top_k}, must be >= 0 (0: off)")
    if any(not 0 <= token_id < vocab_size for token_id in sampling.stop_token_ids):
        raise InvalidRequestError(f"sampling.stop_token_ids must be in 0..{vocab_size - 1}")
    if "" in sampling.stop:
        raise InvalidRequestError("sampling.stop holds an empty string")
