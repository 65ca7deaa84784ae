"""Follows one token through a running program: the types that carry it, and the buffers that hold it.

Two things identify a token: the bits of its log-probability, a float32 that hardly two tokens share,
and a run of ids that ends with its own. `TokenWatch` looks at the variables, arguments and results of
each function of Tailrace when it returns. A *carrier* is a type of Tailrace with a field that holds one
of the two as numbers: an array, a tensor or the raw bytes of one. A *place* is memory that holds the
log-probability: an array, or an encoded message, which holds the ids too. A view is not a new place.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

_ROOTS = ("/protos/tailrace_protos/", "/shared/tailrace", "/services/tailrace_")
_MAX_BYTES = 1 << 15  # the messages and arrays of a small episode, but no weights
_MAX_ITEMS = 64  # of a list that is looked through


class Place(NamedTuple):
    """Memory in which the token was found."""

    function: str  # the first that held it
    name: str  # of the variable, or of the type and its field
    is_encoded: bool


class TokenWatch:
    """Watches the thread within `with`; `carriers` and `places` are in the order of the first sight."""

    def __init__(self, logprob: float, ids: Sequence[int]) -> None:
        self._logprob = np.float32(logprob).tobytes()
        self._ids = [np.array(ids, dtype).tobytes() for dtype in (np.int32, np.int64)]
        self._found: dict[int, Place] = {}
        self._kept: list[object] = []  # no address is given out twice
        self.carriers: list[type] = []

    @property
    def places(self) -> list[Place]:
        """Every memory that held the log-probability."""
        return list(self._found.values())

    def __enter__(self) -> TokenWatch:
        sys.setprofile(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "return" and any(root in code.co_filename for root in _ROOTS):
            for name, value in [*frame.f_locals.items(), ("", result)]:
                self._see(value, name, code.co_qualname)

    def _see(self, value: Any, name: str, function: str) -> None:
        kind = type(value)
        if kind.__module__.startswith("tailrace"):
            for field, inner in _fields(value):
                is_held = self._holds_numbers(inner, f"{kind.__name__}.{field}", function)
                if is_held and kind not in self.carriers:
                    self.carriers.append(kind)
        elif kind in (list, tuple):
            for each in value[:_MAX_ITEMS]:
                self._see(each, name, function)
        else:
            self._holds_numbers(value, name, function)

    def _holds_numbers(self, value: Any, name: str, function: str) -> bool:
        """True if `value` is memory, or a list of such, with the token as numbers; notes the place."""
        if type(value) in (list, tuple):
            return any([self._holds_numbers(each, name, function) for each in value[:_MAX_ITEMS]])
        memory = _memory_of(value)
        if memory is None or not 4 <= len(memory) <= _MAX_BYTES:
            return False
        content = memory.tobytes()
        at = content.find(self._logprob)
        has_ids = any(ids in content for ids in self._ids)
        if at < 0:
            return has_ids and id(_owner(memory)) not in self._found
        return not self._place_of(memory, at, Place(function, name, is_encoded=has_ids)).is_encoded

    def _place_of(self, memory: np.ndarray[Any, Any], at: int, found: Place) -> Place:
        """The known place of this memory, or else `found`, which is known from now on."""
        owner = _owner(memory)
        # A bytearray may move, cannot grow while a view is kept, and is used again for other messages.
        grows = isinstance(owner, bytearray | array)
        key = id(owner) if grows else memory.__array_interface__["data"][0] + at
        if key not in self._found:
            self._found[key] = found
            self._kept.append(owner if grows else memory)
        return self._found[key]


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        names: Iterable[str] = value.__struct_fields__
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        names = value._fields
    else:
        yield from getattr(value, "__dict__", {}).items()
        names = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))


def _owner(value: Any) -> Any:
    """The object whose memory a view shows."""
    while True:
        inner = value.obj if isinstance(value, memoryview) else getattr(value, "base", None)
        if inner is None:
            return value
        value = inner


def _memory_of(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The memory of a buffer as bytes, without a copy."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not value.is_contiguous() or value.dtype == torch.bfloat16:
            return None
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype == object or not value.flags.c_contiguous or not value.size:
            return None
        return value.reshape(-1).view(np.uint8)
    if isinstance(value, bytes | bytearray | memoryview | array) and len(value):
        return np.frombuffer(value, np.uint8)
    return None
