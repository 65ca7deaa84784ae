"""Reading the answer of a reply, and telling whether it is right.

Replies are a model's: whatever they hold, comparing them takes bounded time. Texts longer than
`MAX_CHARS`, factorials and powers of more than three digits are never right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from tailrace.config import ConfigError
from tailrace_envs.maths.config import Equality

MARK = "####"
MAX_CHARS = 64

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/0*[1-9]\d*)?")
_NOISE = re.compile(r"[\s,$%]|\\boxed|[{}]")
_POWER = re.compile(r"\^|\*\*")
_SMALL_POWER = re.compile(r"(?:\^|\*\*)[{(]?-?\d{1,3}(?!\d)")

IsRight = Callable[[str, str], bool]  # (said, truth)


def said_answer(reply: str) -> str | None:
    """What stands behind the last `####`, up to the end of its line; None without it."""
    _, mark, rest = reply.rpartition(MARK)
    said = rest.strip().partition("\n")[0].strip().rstrip(".")
    return said if mark and said else None


def comparison(equality: Equality) -> IsRight:
    """How answers are compared; `ConfigError` if its package is missing."""
    if equality == "number":
        return is_same_number
    try:
        from math_verify import parse, verify  # an extra
    except ImportError as error:
        raise ConfigError(
            f"equality 'expression' needs the package math-verify ({error}): "
            "pip install 'tailrace[math]', or use equality 'number'"
        ) from error

    def is_equal(said: str, truth: str) -> bool:
        if as_number(said) is not None and as_number(truth) is not None:
            return is_same_number(said, truth)
        if len(said) > MAX_CHARS or not _is_quick(said):
            return False
        # Its own time limits need signals, which only the main thread has.
        parsed = [parse(f"${text}$", parsing_timeout=None) for text in (truth, said)]
        return bool(verify(*parsed, timeout_seconds=None))

    return is_equal


def is_same_number(said: str, truth: str) -> bool:
    """Whether both are numbers, and the same one; exact."""
    number = as_number(said)
    return number is not None and number == as_number(truth)


def as_number(text: str) -> Fraction | None:
    """The number that a text is, whatever its thousands separators, currency or per cent signs."""
    if len(text) > MAX_CHARS:
        return None
    bare = _NOISE.sub("", text)
    return Fraction(bare) if _NUMBER.fullmatch(bare) and "." not in bare.partition("/")[2] else None


def _is_quick(text: str) -> bool:
    """Whether evaluating it is sure to end soon."""
    num_powers = len(_POWER.findall(text))
    return "!" not in text and num_powers <= 1 and num_powers == len(_SMALL_POWER.findall(text))
