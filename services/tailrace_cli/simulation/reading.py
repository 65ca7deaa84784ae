"""Files that users give to `tailrace simulate`: their text, and the bounds of the numbers in them."""

import gzip
import zlib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tailrace.config import ConfigError
from tailrace_protos.base import UNREADABLE

MOST_TOKENS = 1 << 40
MOST_WAIT_S = 7 * 86_400  # simulated servers report every few seconds: longer waits would hardly end

Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_WAIT_S)]
Milliseconds = Annotated[float, Meta(ge=0, le=1000 * MOST_WAIT_S)]

T = TypeVar("T")


def text_of(option: str, path: Path) -> str:
    """Text of a file in UTF-8, with or without a byte order mark; `.gz` is unpacked.

    Raises `ConfigError`, which names the option.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {path}: is no text in UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    except (OSError, EOFError, zlib.error) as error:  # the last two: of `.gz`
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {path}: {reason}; give a file that can be read") from None


def decoded(text: str, kind: type[T], place: str, remedy: str) -> T:
    """Content of JSON; raises `ConfigError`, which names the place, the field in it and the remedy."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE as error:
        raise ConfigError(f"{place}: {error}; {remedy}") from None
