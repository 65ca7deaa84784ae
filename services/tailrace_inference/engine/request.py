"""Makes an `EngineCall` of a `GenerateRequest`."""

import secrets

from tokenizers import Tokenizer

from tailrace_inference.core.requests import check_request
from tailrace_inference.engine.batch import EngineCall
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import EngineFeatures, OnChunk
from tailrace_protos.generation import GenerateRequest


def make_call(
    request: GenerateRequest,
    on_chunk: OnChunk,
    max_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> EngineCall:
    """Checks a request against the limits of the model; raises `InvalidRequestError`."""
    features = EngineFeatures(stop_strings=tokenizer is not None)
    prompt = check_request(request, max_len, vocab_size, features)
    sampling = request.sampling
    stops = None
    if sampling.stop and tokenizer is not None:
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
