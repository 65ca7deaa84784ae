"""Python function rewards: `def f(task, messages, metrics) -> float`, plain or `async`.

A reward is a pure function of its arguments: it may be called again for the same episode and must then
return the same number. It runs in a process of its own. It may block, and it may run for up to the
`timeout_s` of its entry in the experiment file.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask


class RewardFunction(Protocol):
    """Interface of the function that `function: "module:name"` of a reward names."""

    def __call__(
        self, task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]
    ) -> float | Awaitable[float]:
        """Returns the reward of one finished episode; `messages` alternate user and assistant."""


F = TypeVar("F", bound=Callable[..., float | Awaitable[float]])


def reward(function: F) -> F:
    """Marks a function as a reward; refuses at import a function that the service could not call."""
    if not callable(function):
        raise TypeError(f"@reward expects a function, found {type(function).__name__}")
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if "<" in name:
        raise TypeError(
            f"@reward {module}.{name}: define it at the top of a module, so that it has an address"
        )
    return function
