"""Exact numbers in texts: integers, decimals, fractions, percentages, powers of ten, units."""

import re
from fractions import Fraction
from typing import NamedTuple

from tailrace.scorers.units import without_unit

MAX_CHARS = 400  # a longer text is no answer

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_IN_TEXT = re.compile(rf"(?<![\w.])-?\$?{_DECIMAL}(?:/\d+)?")
_PLAIN = re.compile(rf"([-+]?)({_DECIMAL})(?:/({_DECIMAL}))?(?:e([-+]?\d{{1,3}}))?", re.IGNORECASE)
_FRACTION = re.compile(r"([-+]?)(\d{0,40})\\frac\{(-?\d{1,40})\}\{(\d{1,40})\}")
_MIXED = re.compile(r"([-+]?)(\d{1,40}) (\d{1,40})/(\d{1,40})")
_SHORT_FRACTION = re.compile(r"\\frac(?:\{(-?\w+)\}|(\d)) ?(?:\{(\w+)\}|(\d))")
_REPEATING = re.compile(r"([-+]?)(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}")
_TEN = re.compile(r"(?:(.+?)(?:\\times|\\cdot|\*|×|x))?10(?:\^|\*\*)\{?([-+]?\d{1,3})\}?")
_SPACES = re.compile(r"(?:\\[!,;: ]|\\quad|\\qquad|~|\s)+")
_SEPARATED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])")  # 10 000
_OUTER_SPACES = re.compile(r"(?<!\d) | (?!\d)")


class Quantity(NamedTuple):
    """Number of a text. With `is_percent` the text said per cent; `value` is not divided."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: "Quantity") -> bool:
        """True for the same number; `50%` equals 0.5 and, as people write it, 50."""
        if self.is_percent == other.is_percent or self.value == other.value:
            return self.value == other.value
        percent, plain = (self, other) if self.is_percent else (other, self)
        return percent.value / 100 == plain.value


def numbers_in(text: str) -> list[str]:
    """All numbers of a text as they are written, without currency signs and separators."""
    return [found.replace("$", "").replace(",", "") for found in _IN_TEXT.findall(_plain_signs(text))]


def quantity(text: str) -> Quantity | None:
    """Number that the whole text states, with or without a unit; None for anything else."""
    if len(text) > MAX_CHARS:
        return None
    bare, factor = without_unit(_SPACES.sub(" ", _plain_signs(text)))
    is_percent = bare.endswith("%") or "percent" in text.lower() or "per cent" in text.lower()
    bare = re.sub(r"\\?%|\\?\$|\^\{?\\circ\}?|\\degree|°|[€£¥₹]", "", bare)
    value = _value(_without_spaces(bare).rstrip("."))
    return None if value is None else Quantity(value * factor, is_percent)


def _plain_signs(text: str) -> str:
    text = text.replace("−", "-").replace("–", "-").replace("{,}", ",").replace("\\left", "")
    text = text.replace("\\right", "").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return text.replace("\\!", "").replace("\\%", "%").replace("\\$", "$").strip().strip("$").strip()


def _without_spaces(text: str) -> str:
    """Text without spaces, but for those between digits that separate no thousands."""
    text = _SEPARATED.sub(lambda found: found[0].replace(" ", ""), text.strip())
    return _OUTER_SPACES.sub("", text)


def _value(text: str) -> Fraction | None:
    if ten := _TEN.fullmatch(text):
        base = _value(ten[1] or "1")
        return None if base is None else base * Fraction(10) ** int(ten[2])
    text = _SHORT_FRACTION.sub(_braced, text)
    for form, value_of in _FORMS:
        if found := form.fullmatch(text):
            sign, *parts = found.groups()
            try:
                value = value_of(*parts)
            except ZeroDivisionError:
                return None
            return -value if sign == "-" else value
    return _value(text[1:-1]) if text.startswith("{") and text.endswith("}") else None


def _mixed(whole: str, top: str, bottom: str) -> Fraction:
    return int(whole or 0) + Fraction(int(top), int(bottom))


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    top = int(whole + fixed + period) - int(whole + fixed or 0)
    return Fraction(top, (10 ** len(period) - 1) * 10 ** len(fixed))


def _plain(top: str, bottom: str | None, exponent: str | None) -> Fraction:
    return _decimal(top) / _decimal(bottom or "1") * Fraction(10) ** int(exponent or 0)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))


_FORMS = ((_FRACTION, _mixed), (_MIXED, _mixed), (_REPEATING, _repeating), (_PLAIN, _plain))


def _braced(found: re.Match[str]) -> str:
    return f"\\frac{{{found[1] or found[2]}}}{{{found[3] or found[4]}}}"
