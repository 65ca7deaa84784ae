"""What the bodies of OpenAI's chat completions and completions have in common."""

from __future__ import annotations

from tailrace_gateway.core.body import Body, Neutral, Ranges, stop_strings
from tailrace_gateway.core.call import SamplingWishes

MAX_CHOICES = 128

_NOTHING_SAID = SamplingWishes()
_NEUTRAL = Neutral(frequency_penalty=(0,), presence_penalty=(0,), logit_bias=({},))
_RANGES = Ranges(
    max_tokens=(1, 1 << 31),
    n=(1, MAX_CHOICES),
    temperature=(0, 100),
    top_p=(1e-6, 1),
    top_k=(-1, 1 << 30),
    min_p=(0, 1),
    seed=(-(1 << 63), (1 << 63) - 1),
)


class StreamOptions(Body, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class OpenAIRequest(Body, frozen=True, kw_only=True):
    """A request for one or several samples. The second part is refused unless it changes nothing."""

    model: str = ""
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Said for somebody else's books: it changes nothing in a reply.
    user: str | None = None

    @property
    def num_choices(self) -> int:
        """`n`."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def require_shared(self) -> None:
        """Raise `InvalidRequestError` for a value that cannot be had."""
        _NEUTRAL.require(self)
        _RANGES.require(self)

    def wishes(self) -> SamplingWishes:
        """What is said of sampling; `top_k` -1 is "from all", as in vLLM."""
        said = (self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.stop)
        if said == (None,) * 6:
            return _NOTHING_SAID
        return SamplingWishes(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            stop=stop_strings(self.stop),
        )
