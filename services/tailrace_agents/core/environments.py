"""Environments as user code: one boundary checks their exceptions and their return values.

`EnvHandle` is one environment in use, `EnvPool` keeps idle ones of a kind. `reset(seed=...)` starts
from the beginning, so an environment serves one episode after another. An environment that raised is
not used again.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, TypeVar

import msgspec

from tailrace.foreign import encodable, foreign_call, foreign_code
from tailrace.policy.activity import Stages
from tailrace.sdk.env import NUMBER, Env, opening_text
from tailrace_envs.game import TextGame

A = TypeVar("A")
T = TypeVar("T")

SUCCESS = "success"
_BEGINNING = ("observation", "info")
_ANSWER = ("observation", "reward", "terminated", "truncated", "info")
_IN_RESET, _IN_STEP = foreign_code("env.reset"), foreign_code("env.step")


class EnvAnswerError(TypeError):
    """An environment returned what no episode can use."""


class Beginning(NamedTuple):
    """First observation. `opening` is the text before a later observation if the policy sees nothing
    older (`history_turns`), with its own end of line; it may be empty."""

    observation: str
    opening: str


class StepResult(msgspec.Struct, frozen=True):
    """Answer of an environment to a reply."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    numbers: dict[str, float]  # of `info`


class EnvHandle:
    """An environment played in the event loop, or in a thread of `threads` if it may block.

    `told`: numbers by which environments of its kind have told how an episode ended, shared by them.
    """

    __slots__ = ("_running", "_stages", "_threads", "_told", "env")

    def __init__(
        self,
        env: Env,
        threads: Executor | None = None,
        stages: Stages | None = None,
        told: set[str] | None = None,
    ) -> None:
        self.env = env
        self._told = set() if told is None else told
        self._threads = threads
        self._stages = stages or Stages()
        self._running: Future[Any] | None = None  # the call in a thread, until it returned

    async def reset(self, seed: int) -> Beginning:
        """Begins an episode; raises `ForeignCodeError`."""
        return self._reset(seed) if self._threads is None else await self._in_thread(self._reset, seed)

    async def step(self, reply: str) -> StepResult:
        """Answers a reply; raises `ForeignCodeError`."""
        return self._step(reply) if self._threads is None else await self._in_thread(self._step, reply)

    @property
    def reports_success(self) -> bool:
        """True if an episode that ends tells its success: that of a `TextGame`, or of an environment
        whose kind has told it before."""
        return SUCCESS in self._told or isinstance(self.env, TextGame)

    def close(self) -> None:
        """Frees the environment, at once or when the call that still runs in it returns."""
        if self._running is None or self._running.done():
            self._close()
        else:
            self._running.add_done_callback(lambda _: self._close())

    async def _in_thread(self, call: Callable[[A], T], argument: A) -> T:
        assert self._threads is not None
        running = self._threads.submit(call, argument)
        self._running = running
        self._stages.num_in_tools += 1
        try:
            return await asyncio.wrap_future(running)
        finally:
            self._stages.num_in_tools -= 1

    def _reset(self, seed: int) -> Beginning:
        with _IN_RESET:
            observation, info = _parts(self.env.reset(seed=seed), _BEGINNING)
            return Beginning(_text(observation), _text(opening_text(observation, info)))

    def _step(self, reply: str) -> StepResult:
        with _IN_STEP:
            observation, reward, terminated, truncated, info = _parts(self.env.step(reply), _ANSWER)
            if not isinstance(info, Mapping):
                raise EnvAnswerError(f"info must be a dict, found {type(info).__name__}")
            numbers = {
                encodable(str(key)): _float(value)
                for key, value in info.items()
                if isinstance(value, NUMBER)
            }
            if SUCCESS in numbers:
                self._told.add(SUCCESS)
            return StepResult(
                _text(observation), _finite(reward), bool(terminated), bool(truncated), numbers
            )

    def _close(self) -> None:
        with foreign_code("env.close"):
            self.env.close()


class EnvPool:
    """Environments of one kind, made when none is idle; at most `max_idle` are kept."""

    def __init__(
        self,
        make: Callable[[], Env],
        threads: Executor | None = None,
        stages: Stages | None = None,
        max_idle: int = 256,
    ) -> None:
        self._make = make
        self._threads = threads
        self._stages = stages
        self._max_idle = max_idle
        self._idle: list[EnvHandle] = []
        self._told: set[str] = set()

    def take(self) -> EnvHandle:
        """Returns an idle environment or a new one; raises `ForeignCodeError` if it cannot be made."""
        if self._idle:
            return self._idle.pop()
        with foreign_call("making the environment"):
            return EnvHandle(self._make(), self._threads, self._stages, self._told)

    def give_back(self, handle: EnvHandle) -> None:
        """Keeps an environment whose episode ended without an error."""
        if len(self._idle) < self._max_idle:
            self._idle.append(handle)
        else:
            handle.close()


def _parts(returned: Any, names: tuple[str, ...]) -> Any:
    """Returns what an environment returned; `EnvAnswerError` if it is no tuple of these parts."""
    if isinstance(returned, tuple | list) and len(returned) == len(names):
        return returned
    kind = type(returned).__name__
    found = f"{kind} of {len(returned)}" if isinstance(returned, tuple | list) else kind
    raise EnvAnswerError(f"it must return ({', '.join(names)}), found {found}")


def _text(observation: object) -> str:
    """An observation as plain text that can be sent; `EnvAnswerError` for anything else."""
    if not isinstance(observation, str):
        raise EnvAnswerError(f"observations must be str, found {type(observation).__name__}")
    return encodable(observation)


def _finite(reward: Any) -> float:
    """A reward as a float; raises `EnvAnswerError`."""
    try:
        value = math.nan if isinstance(reward, str) else _float(reward)
    except TypeError as error:
        raise EnvAnswerError(f"rewards must be numbers, found {type(reward).__name__}") from error
    if not math.isfinite(value):
        found = f"str {reward[:40]!r}" if isinstance(reward, str) else value
        raise EnvAnswerError(f"rewards must be finite numbers, found {found}")
    return value


def _float(number: Any) -> float:
    """A number as a float; infinity for an integer that no float holds."""
    try:
        return float(number)
    except OverflowError:
        return math.inf
