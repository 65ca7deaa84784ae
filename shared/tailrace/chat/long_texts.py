"""Long texts: encoded in a thread, so that an event loop goes on meanwhile.

`with_long_texts(prepare)` calls `prepare`, which renders and encodes. At a long text that is not yet
encoded, the call ends, a thread encodes the text without Python's lock, and `prepare` is called again
and finds the ids. So all other work of `prepare` stays on the loop, in one piece.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

LONG_CHARS = 16_384  # some milliseconds to encode

Encode = Callable[[str], NDArray[np.int32]]
T = TypeVar("T")

_encoded: ContextVar[dict[str, NDArray[np.int32]] | None] = ContextVar("encoded", default=None)
# More threads would wait for each other when they make arrays, and the loop for them.
_threads = ThreadPoolExecutor(2, thread_name_prefix="encode")


class _NotEncodedError(Exception):
    """A long text is not encoded yet."""

    def __init__(self, text: str, encode: Encode) -> None:
        super().__init__(f"a text of {len(text)} characters is not encoded yet")
        self.text = text
        self.encode = encode


def encode_or_defer(text: str, encode: Encode) -> NDArray[np.int32]:
    """Returns the ids [t] of a text. Within `with_long_texts`, long ones come from its thread."""
    known = _encoded.get()
    if known is None or len(text) < LONG_CHARS:
        return encode(text)
    if text not in known:
        raise _NotEncodedError(text, encode)
    return known[text]


async def with_long_texts(prepare: Callable[[], T]) -> T:
    """Returns the result of `prepare`, which is called again after each long text."""
    known: dict[str, NDArray[np.int32]] = {}
    while True:
        token = _encoded.set(known)
        try:
            return prepare()
        except _NotEncodedError as error:
            text, encode = error.text, error.encode
        finally:
            _encoded.reset(token)
        known[text] = await asyncio.get_running_loop().run_in_executor(_threads, encode, text)
