"""Makes an `EngineCall` of a `GenerateRequest`."""

import secrets

from tokenizers import Tokenizer

from tailrace.log import get_logger
from tailrace_inference.core.requests import InvalidRequestError, check_request
from tailrace_inference.engine.batch import EngineCall
from tailrace_inference.engine.guided import GuideMatcher, Guides, GuideSpec
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import EngineFeatures, OnChunk
from tailrace_protos.base import as_int32
from tailrace_protos.generation import GenerateRequest

log = get_logger(__name__)


def make_call(
    request: GenerateRequest,
    on_chunk: OnChunk,
    max_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    guides: Guides | None = None,
) -> EngineCall:
    """Checks a request against the limits of the model; raises `InvalidRequestError`."""
    features = EngineFeatures(stop_strings=tokenizer is not None, guided=guides is not None)
    prompt = check_request(request, max_len, vocab_size, features)
    sampling = request.sampling
    stops = None
    if sampling.stop and tokenizer is not None:
        stops = StopStrings(tokenizer, sampling.stop, _continued(request))
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
        guide=guide_matcher(request, guides),
    )


def guide_spec(request: GenerateRequest, guides: Guides | None) -> str:
    """`GuideSpec` of a guided call for an engine of another process, or empty; see `guide_matcher`."""
    if guide_matcher(request, guides) is None:
        return ""
    assert request.guide is not None
    return GuideSpec(request.guide, request.sampling.stop_token_ids, tuple(_continued(request))).text()


def _continued(request: GenerateRequest) -> list[int]:
    ids: list[int] = as_int32(request.prompt_ids).tolist()
    return ids[len(ids) - request.num_continued :]


def guide_matcher(request: GenerateRequest, guides: Guides | None) -> GuideMatcher | None:
    """Matcher of a guided call; an optional guide that cannot be followed is left out.

    Raises `InvalidRequestError` for one that is not optional.
    """
    guide = request.guide
    if guide is None or guides is None:
        return None
    try:
        return guides.matcher(guide, request.sampling.stop_token_ids, _continued(request))
    except InvalidRequestError as error:
        if not guide.is_optional:
            raise
        log.info("reply not guided", call_id=request.call_id, reason=str(error))
        return None
