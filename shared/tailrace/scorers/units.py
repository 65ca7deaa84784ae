"""Units in answers, which are not compared: `5 cm`, `5\\text{ m}^2`, `3 million dollars`.

Letters at a number are a unit or a product of variables. A short word is a unit only if it is a known
one: `2xy` and `3\\mathrm{i}` have none.
"""

import re

_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?")
_UNIT = re.compile(r"(?<=[\d}\s°])([A-Za-z][A-Za-z ./]*)(?:\^?\{?[23]\}?|[²³])?$")
_ORDINAL = re.compile(r"(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=\d)th)$")
_LETTERS = frozenset("mgslhLNJWVAKCF")
_SHORT = frozenset({
    "mm", "cm", "dm", "km", "ft", "in", "yd", "mi", "kg", "mg", "lb", "lbs", "oz", "mL", "ml",
    "gal", "qt", "hr", "hrs", "min", "sec", "sq", "yr", "yrs", "wk", "wks", "day", "mph", "kph",
    "am", "pm", "AM", "PM", "a.m", "p.m", "kW", "MW", "kJ", "MJ", "kWh", "kN", "Pa", "kPa", "MPa",
    "Hz", "kHz", "MHz", "GHz", "eV", "keV", "MeV", "GeV", "mol", "atm", "rad", "deg", "pts", "dB",
    "kB", "KB", "MB", "GB", "TB", "USD", "EUR",
})  # fmt: skip
_SHORT_BEHIND_SPACE = frozenset({"nm", "ms", "pt", "ac", "cu", "cl", "ha", "Rs", "us"})
_SYMBOLS = frozenset({
    "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "or", "and", "choose", "abc", "xyz",
})  # fmt: skip
_FUNCTION = re.compile(
    "(?:sin|cos|tan|cot|csc|ln|log|exp|sqrt)[a-rt-z]?"
)  # also of x, without brackets
_GAP = "\0"  # in place of words: a number in front of them and one behind them are two


def without_unit(text: str) -> tuple[str, int]:
    """Text without its unit, and the factor of words like `million`."""
    words = [word for word in _TEXT.findall(text) if _is_stated_unit(word)]
    whole = _TEXT.fullmatch(text)
    is_all = whole is not None and whole.end(1) + 1 == len(text)
    text = whole[1].strip() if whole and is_all else _TEXT.sub(_gap, text).strip(f" {_GAP}")
    text = _ORDINAL.sub("", text)
    if found := _UNIT.search(text):
        unit, number = found[1].strip(" ."), text[: found.start()]
        if any(map(str.isdigit, number)) and _is_unit(unit, number.endswith((" ", "°"))):
            words.append(unit)
            text = number.strip()
    factor = 1
    for word in " ".join(words).lower().split():
        factor *= _MULTIPLES.get(word, 1)
    return text, factor


def _gap(found: re.Match[str]) -> str:
    return _GAP if _is_stated_unit(found[1]) else found[0]


def _is_stated_unit(word: str) -> bool:
    r"""True for the content of a `\text` that is no variable, constant or function."""
    bare = word.strip(" ~.")
    return bare in _LETTERS if len(bare) == 1 else bare not in _SYMBOLS - {"or", "and"}


def _is_unit(unit: str, is_behind_space: bool) -> bool:
    first = re.split("[ /]", unit)[0].strip(".")
    if len(first) == 1:
        return first in _LETTERS
    if first in _SHORT or (is_behind_space and first in _SHORT_BEHIND_SPACE):
        return True
    is_term = first.lower() in _SYMBOLS or _FUNCTION.fullmatch(first)
    return not is_term and len(first) > (2 if is_behind_space else 3)
