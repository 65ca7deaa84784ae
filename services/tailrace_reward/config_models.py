"""Configuration of models that score: a reward model in the service, or a judge that is asked."""

import re
from typing import Any, Literal

import msgspec

from tailrace.config import Config

GATEWAY = "gateway"
_NUMBER = r"(-?\d+(?:\.\d+)?)"


class RewardModelArgs(Config, frozen=True, kw_only=True):
    """Computation of all reward models."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the computation; `auto` takes the CUDA device if torch sees one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; `auto` is float32 on the CPU, and on CUDA the type that
    the model's `config.json` names."""

    max_batch_tokens: int = 16_384
    """Tokens computed at once, with padding. A longer conversation is computed alone."""

    max_length: int = 0
    """Longest conversation in tokens; a longer one has no score, and its episode is an
    infrastructure failure. 0: the length in the model's configuration."""

    num_threads: int = 1
    """Threads that torch may use on the CPU. More than one helps only if cores are idle."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.num_threads < 1:
            raise ValueError("model_args: max_batch_tokens and num_threads must be at least 1")
        if self.max_length < 0:
            raise ValueError("model_args.max_length must not be negative")


class JudgeArgs(Config, frozen=True, kw_only=True):
    """A language model that reads an episode and writes a number."""

    base_url: str
    """Base URL of its OpenAI API, for example `https://api.example.com/v1`; or `gateway`: the run's own
    gateway, so that the policy judges, with its newest weights, on the run's inference servers."""

    prompt: str
    """Text of the request: a Jinja template that may use `conversation` (all messages as text),
    `question` (the first message of the user), `answer` (the last of the assistant), `messages`, `row`
    (of a data set) and `metrics`."""

    model: str = ""
    """Name of the model at the URL; empty with `base_url: gateway`, which has one model."""

    system_prompt: str = ""
    """System message before the prompt; empty: none."""

    api_key_env: str = ""
    """Name of the environment variable with its key; empty: no key. In a local cluster, also list the
    name in `cluster.keep_environment`."""

    score_pattern: str = rf"(?i)score[^\w-]*{_NUMBER}"
    """Regular expression for the score in its reply, with one group around the number; the last match
    counts."""

    min_score: float = 0.0
    """A lower number is no score."""

    max_score: float = 10.0
    """A higher number is no score."""

    temperature: float = 0.0
    """Temperature of its sampling."""

    max_tokens: int = 1024
    """Tokens that its reply may have."""

    body: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields that replace or extend those of the request; null removes a field. For models that refuse
    `max_tokens` or a temperature, or need other fields."""

    max_attempts: int = 4
    """Requests for one score, if it cannot be reached, is overloaded, fails, or replies without a
    score. A reply of the run's own gateway at temperature 0 is final: it would be repeated."""

    attempt_timeout_s: float = 60.0
    """Time limit of one attempt."""

    max_concurrency: int = 16
    """Requests of one reward worker at once; others wait, and `timeout_s` does not count their wait."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("judge.prompt must not be empty")
        self._check_place()
        for key in ("max_tokens", "max_attempts", "max_concurrency", "attempt_timeout_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"judge.{key} must be positive")
        if self.temperature < 0 or self.min_score >= self.max_score:
            raise ValueError(
                "judge: temperature must not be negative, min_score must be below max_score"
            )
        for key in ("messages", "stream"):
            if key in self.body:
                raise ValueError(
                    f"judge.body: {key} must not be set: the prompt makes the messages, and replies "
                    "are read whole"
                )
        self._check_pattern()

    def _check_place(self) -> None:
        if self.base_url == GATEWAY:
            if self.model not in ("", "policy") or self.api_key_env:
                raise ValueError(
                    "judge.base_url: gateway asks the policy of the run, with a key of its own: leave "
                    "judge.model and judge.api_key_env away, or give the URL of another model"
                )
        elif not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                "judge.base_url must begin with http:// or https://, or be 'gateway': "
                f"{self.base_url!r}"
            )
        elif not self.model:
            raise ValueError("judge.model must not be empty: name the model at judge.base_url")

    def _check_pattern(self) -> None:
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"judge.score_pattern {self.score_pattern!r}: {error}") from error
        if groups != 1:
            raise ValueError(
                f"judge.score_pattern must have one group, around the number; it has {groups}"
            )
