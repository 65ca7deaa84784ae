"""A process that calls reward functions, one after another; `process_pool` starts it.

It first sends one `FunctionsLoaded`. Then it answers every `ScoringCall` with one `Returned`, in order.
"""

import asyncio
import importlib
import inspect
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.foreign import ForeignCodeError, foreign_code, place_of, told
from tailrace.processes import ParentLink
from tailrace.scorers.registry import SCORE_ADDRESS, prepare
from tailrace_protos.reward import ScoreItem

Function = Callable[..., Any]


class ScoringCall(msgspec.Struct, frozen=True):
    """Call of `function` (`module:name`) for an item, with keyword arguments.

    With `cpu_s` the kernel kills the process after so much processor time.
    """

    function: str
    item: ScoreItem
    args: dict[str, Any] = {}
    cpu_s: float = 0.0


class Returned(msgspec.Struct, frozen=True):
    """Number of a function, or the reason why there is none."""

    value: float = 0.0
    error: str = ""


class FunctionsLoaded(msgspec.Struct, frozen=True):
    """Functions that could not be imported, with reasons."""

    errors: dict[str, str] = {}


def main(addresses: list[str]) -> int:
    """Load the functions at `addresses`, then answer calls until the input ends."""
    link = ParentLink.open()
    functions, errors = _load(addresses)
    if SCORE_ADDRESS in addresses:
        prepare()
    link.send(FunctionsLoaded(errors))
    decoder = msgspec.msgpack.Decoder(ScoringCall)
    with asyncio.Runner() as runner:
        while (call := link.receive(decoder)) is not None:
            link.send(_answer(functions[call.function], call, runner))
    return 0


def _load(addresses: list[str]) -> tuple[dict[str, Function], dict[str, str]]:
    functions: dict[str, Function] = {}
    errors: dict[str, str] = {}
    for address in addresses:
        module_name, _, name = address.partition(":")
        try:
            with foreign_code(f"importing {module_name}"):
                function = getattr(importlib.import_module(module_name), name, None)
        except ForeignCodeError as error:
            errors[address] = str(error)
            continue
        if callable(function):
            functions[address] = function
        else:
            errors[address] = f"module {module_name} has no function {name}"
    return functions, errors


def _answer(function: Function, call: ScoringCall, runner: asyncio.Runner) -> Returned:
    item = call.item
    signal.setitimer(signal.ITIMER_PROF, call.cpu_s)  # at 0 s: off. Its signal ends the process
    try:
        with foreign_code("the function"):
            value = function(item.task, item.messages, item.metrics, **call.args)
        if inspect.isawaitable(value):
            value = runner.run(_await(value))
        with foreign_code("the function"):
            return _returned(value)
    except ForeignCodeError as error:
        place = "" if call.function == SCORE_ADDRESS else place_of(error.error)
        return Returned(error=f"raised {told(error.error)}{place}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _returned(value: Any) -> Returned:
    """The function's number; an error for anything else, also for text that looks like one."""
    kind = type(value).__name__
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return Returned(error=f"returned {kind}: let it return one number")
    try:
        return Returned(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        return Returned(error=f"returned {kind}, and that is no one number ({error}): correct it")


async def _await(value: Any) -> Any:
    with foreign_code("the function"):  # here, so that the error's place is the user's
        return await value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
