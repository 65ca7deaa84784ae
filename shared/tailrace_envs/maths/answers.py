"""Extraction and comparison of answers.

A model writes the replies, so a comparison takes bounded time for any text. Texts longer than
`MAX_CHARS`, factorials and powers of more than three digits are never right.
"""

import importlib
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

IsRight = Callable[[str, str], bool]  # (answer, truth)


def extract_answer(reply: str) -> str | None:
    """Text after the last `####`, up to the end of its line; None without it."""
    _, mark, rest = reply.rpartition(MARK)
    answer = rest.strip().partition("\n")[0].strip().rstrip(".")
    return answer if mark and answer else None


def comparison(equality: Equality) -> IsRight:
    """Returns the comparison of a kind; `ConfigError` if its package is missing."""
    if equality == "number":
        return is_same_number
    try:
        math_verify = importlib.import_module("math_verify")  # an extra
    except ImportError as error:
        raise ConfigError(
            f"equality 'expression' needs the package math-verify ({error}): "
            "pip install 'tailrace[math]', or use equality 'number'"
        ) from error

    def is_equal(answer: str, truth: str) -> bool:
        if as_number(answer) is not None and as_number(truth) is not None:
            return is_same_number(answer, truth)
        if len(answer) > MAX_CHARS or not _is_quick(answer):
            return False
        # The package's time limits need signals, which only the main thread has.
        parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (truth, answer)]
        return bool(math_verify.verify(*parsed, timeout_seconds=None))

    return is_equal


def is_same_number(answer: str, truth: str) -> bool:
    """True if both texts are the same number, compared exactly."""
    number = as_number(answer)
    return number is not None and number == as_number(truth)


def as_number(text: str) -> Fraction | None:
    """Number that a text states; thousands separators, currency and per cent signs are ignored."""
    if len(text) > MAX_CHARS:
        return None
    bare = _NOISE.sub("", text)
    return Fraction(bare) if _NUMBER.fullmatch(bare) and "." not in bare.partition("/")[2] else None


def _is_quick(text: str) -> bool:
    """True if evaluating the text takes a short time for sure."""
    num_powers = len(_POWER.findall(text))
    return "!" not in text and num_powers <= 1 and num_powers == len(_SMALL_POWER.findall(text))
