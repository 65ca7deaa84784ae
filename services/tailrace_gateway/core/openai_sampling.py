"""Fields of OpenAI requests, in all three dialects, that set how a reply is sampled."""

from operator import attrgetter
from typing import Any

from tailrace_gateway.core.body import Body, DefaultOnly, NumberRanges, stop_strings
from tailrace_gateway.core.call import SamplingOverrides
from tailrace_gateway.core.errors import BadRequestError

MAX_ID = (1 << 31) - 1

_NO_OVERRIDES = SamplingOverrides()
_DEFAULT_ONLY = DefaultOnly(
    frequency_penalty=(0,),
    presence_penalty=(0,),
    logit_bias=({},),
    repetition_penalty=(1,),
    ignore_eos=(False,),
    include_stop_str_in_output=(False,),
    include_reasoning=(True,),
    skip_special_tokens=(True,),
    structured_outputs=({},),
    watermarking=(False,),
    vllm_xargs=({},),
    kv_transfer_params=({},),
    ec_transfer_params=({},),
    media_io_kwargs=({},),
    mm_processor_kwargs=({},),
)
_RANGES = NumberRanges(
    temperature=(0, 100),
    top_p=(1e-6, 1),
    top_k=(-1, 1 << 30),
    min_p=(0, 1),
    seed=(-(1 << 63), (1 << 63) - 1),
)


class SampledRequest(Body, frozen=True, kw_only=True):
    """Fields of requests for a sample. Fields of the second group, most of them vLLM's, are accepted
    only without effect."""

    model: str = ""
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    # No effect here: a run has one model and one queue, and reads text only.
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    # Metadata of the client without effect on a reply.
    user: str | None = None

    def require_sampling(self) -> None:
        """Raise `BadRequestError` for a value that the gateway does not support."""
        _DEFAULT_ONLY.require(self)
        _RANGES.require(self)
        if not all(0 <= one <= MAX_ID for one in self.stop_token_ids or ()):
            reason = f"stop_token_ids: an id is not between 0 and {MAX_ID}"
            raise BadRequestError(reason, param="stop_token_ids")

    def overrides(self) -> SamplingOverrides:
        """Return the requested sampling parameters; `top_k` -1 means no limit, as in vLLM."""
        given = _overrides_of(self)
        if given == _NO_VALUES:
            return _NO_OVERRIDES
        return SamplingOverrides(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids")
_NO_VALUES = (None,) * len(_NAMES)
_overrides_of = attrgetter(*_NAMES)
