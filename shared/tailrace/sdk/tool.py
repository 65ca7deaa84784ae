"""Tools: functions with `@tool`, or classes derived from `Tool` that keep state for an episode.

A plain function runs in a thread of its own, so it may block. An async function runs in the worker's
event loop and must not block. The model sees an exception of a tool as an error, except
`ToolUnavailableError`: then the answer of the tool is unknown.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, overload

import msgspec

from tailrace.sdk.signature import ArgumentsError, Signature
from tailrace_protos.chat import ToolSchema

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_RESULT_BYTES = 16 << 20

_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}\Z")


class ToolUnavailableError(Exception):
    """The tool cannot work, through no fault of the call: the episode is an infrastructure failure."""


class ToolOutput(msgspec.Struct, frozen=True):
    """Result with an error flag and metrics. `is_error`: the tool failed, and `content` says why."""

    content: str
    is_error: bool = False
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Numbers that are summed over the episode; of `success`, the task's, the newest counts."""


class ToolSession(msgspec.Struct, frozen=True):
    """Episode that an object of a stateful tool serves."""

    session_id: str
    episode_id: str
    run: str
    create_kwargs: dict[str, Any]  # of the episode's data row, for this tool


class Tool:
    """A tool with state: one object per episode, made when the episode first calls it.

    `create` runs once, `execute` once per call and one at a time, `release` once, even if the episode
    failed or its worker died.
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    parameters: ClassVar[dict[str, Any]] = {}  # JSON Schema of the arguments, an object
    is_idempotent: ClassVar[bool] = False  # may run again elsewhere if its worker dies
    is_stateful: ClassVar[bool] = True  # False: one object serves all episodes, many calls at a time
    timeout_s: ClassVar[float] = DEFAULT_TIMEOUT_S
    max_result_bytes: ClassVar[int] = DEFAULT_MAX_RESULT_BYTES

    async def create(self, session: ToolSession) -> None:
        """Begins an episode. An exception is an infrastructure failure."""

    async def execute(self, arguments: dict[str, Any]) -> str | ToolOutput:
        """Runs one call; `arguments` fit `parameters`. The model sees an exception as an error."""
        raise NotImplementedError(f"{type(self).__name__} has no execute()")

    async def release(self) -> None:
        """Ends the episode: frees the resources that `create` took."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a tool, for its workers and for the model."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    is_idempotent: bool = False
    is_stateful: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    max_result_bytes: int = DEFAULT_MAX_RESULT_BYTES

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(
                f"tool name {self.name!r}: models and subjects take 1 to 64 letters, digits, '_' or '-'"
            )
        if self.timeout_s <= 0 or self.max_result_bytes < 1:
            raise ValueError(f"tool {self.name!r}: timeout_s and max_result_bytes must be positive")
        if self.parameters.get("type", "object") != "object":
            raise ValueError(f"tool {self.name!r}: parameters must be the JSON Schema of an object")

    @property
    def schema(self) -> ToolSchema:
        """Description of the tool for a chat template."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return ToolSchema(self.name, self.description, parameters)


class FunctionTool:
    """Function that models may call, made by `@tool`. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self._signature = Signature(function)
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.spec = ToolSpec(
            name=options.pop("name", "") or function.__name__,
            description=options.pop("description", "") or self._signature.description,
            parameters=self._signature.parameters,
            **options,
        )

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Converts arguments to typed keyword arguments; raises `ArgumentsError`."""
        return self._signature.bind(arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself."""
        return self.function(*args, **kwargs)


class ToolOffer:
    """Class of tools with a factory of its objects, for constructors that need arguments.

    `room`: bounds the calls of one or several tools that run at once; the wait for it takes no time of
    a call.
    """

    def __init__(
        self, spec: ToolSpec, make: Callable[[], Tool], room: asyncio.Semaphore | None = None
    ) -> None:
        self.spec = spec
        self.room = room
        self._make = make

    @classmethod
    def of(
        cls,
        kind: type[Tool],
        make: Callable[[], Tool] | None = None,
        *,
        room: asyncio.Semaphore | None = None,
        **changes: Any,
    ) -> "ToolOffer":
        """Offers `kind` with the factory `make`; `changes` are made to its spec: `timeout_s=5`."""
        spec = ToolSpec(
            name=kind.name,
            description=inspect.cleandoc(kind.description),
            parameters=kind.parameters,
            is_idempotent=kind.is_idempotent,
            is_stateful=kind.is_stateful,
            timeout_s=kind.timeout_s,
            max_result_bytes=kind.max_result_bytes,
        )
        return cls(msgspec.structs.replace(spec, **changes), make or kind, room)

    def __call__(self) -> Tool:
        """Makes a new object."""
        return self._make()


AnyTool = FunctionTool | ToolOffer | type[Tool] | Tool


def as_offer(thing: AnyTool) -> FunctionTool | ToolOffer:
    """Returns a function tool or an offer of a class; raises `TypeError` for other objects."""
    if isinstance(thing, FunctionTool | ToolOffer):
        return thing
    if isinstance(thing, type) and issubclass(thing, Tool):
        return ToolOffer.of(thing)
    if isinstance(thing, Tool):
        if thing.is_stateful:
            raise TypeError(
                f"tool {thing.name!r} has state, so every episode needs an object of its own: give the "
                "class, or ToolOffer.of(class, how to make one)"
            )
        return ToolOffer.of(type(thing), lambda: thing)
    raise TypeError(
        f"{thing!r} is no tool: mark a function with @tool, or derive a class from tailrace.sdk.Tool"
    )


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *,
    name: str = ...,
    description: str = ...,
    is_idempotent: bool = ...,
    timeout_s: float = ...,
    max_result_bytes: int = ...,
) -> Callable[[Callable[..., Any | Awaitable[Any]]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    is_idempotent: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_result_bytes: int = DEFAULT_MAX_RESULT_BYTES,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Lets models call a function: `@tool`, or `@tool(timeout_s=5, is_idempotent=True)`.

    Schema and description come from signature and docstring. It may return text, a `ToolOutput`, None,
    or any value that JSON can represent. `is_idempotent`: running twice does no harm.
    """

    def mark(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            function,
            name=name,
            description=description,
            is_idempotent=is_idempotent,
            timeout_s=timeout_s,
            max_result_bytes=max_result_bytes,
        )

    return mark(function) if function is not None else mark


__all__ = [
    "AnyTool",
    "ArgumentsError",
    "FunctionTool",
    "Tool",
    "ToolOffer",
    "ToolOutput",
    "ToolSession",
    "ToolSpec",
    "ToolUnavailableError",
    "as_offer",
    "tool",
]
