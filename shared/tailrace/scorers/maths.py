r"""Equality of mathematical answers: numbers exactly, all else by math-verify (sympy).

A model writes the answers. Texts whose evaluation could explode (`9^{9^9}`, `(10^5)!`) are compared as
texts only, and a comparison may use `MAX_CPU_S` seconds of processor time; then it is not equal.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from tailrace.cpu_limit import MAX_CPU_S, TooSlowError, cpu_limit
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_extra
from tailrace.scorers.answers import NoTruthError, boxed, final_answer, marked_answer, truths_of
from tailrace.scorers.numbers import MAX_CHARS, numbers_in, quantity

_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|operatorname)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|big|Big|,|;|:|!| )|[\s$]|\\quad|~")
_LONG_NUMBER = re.compile(r"\d{4,}")
_FACTORIAL = re.compile(r"(?<![\d)}])\d{1,3}!(?!!)")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*(\{|\(|[^\s{(])")
_RELATION = re.compile(r"^(?:(.+?)(<|>))?([a-zA-Z])(<|>)(.+)$")
_FLIPPED = re.compile(r"^([^<>]+)(<|>)([a-zA-Z])$")
_NAMED = re.compile(r"^\s*[a-zA-Z]\s*=(?!=)")
_BASE = re.compile(r"[0-9A-Za-z]_\{?(\d+)\}?$")
_COMPOUND = re.compile(r"\s*(?:-?\d[\d.,]*[\s~]*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}[\s~]*){2,}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d)")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,;: ]|~|\s)+(?=\d)")
_ROOT = re.compile(r"√\s*(?:(\d+|[a-z])|\(([^()]*)\))")
_CONSTANT = re.compile(r"\\(?:text|mathrm|operatorname)\s*\{([ei])\}")
_SUPERSCRIPT = re.compile(r"(?<![²³])[²³](?![²³])")
_CHOICE = re.compile(
    r"\s*\\(?:text|mathrm|textbf|mathbf)\s*\{\(([A-E])\)[\s~]*\}(?:\\[ ,;:]|\\qquad|\\quad|[\s~])*(.+)",
    re.DOTALL,
)
_UNICODE = {
    "−": "-", "π": "\\pi ", "∞": "\\infty ", "·": "\\cdot ", "×": "\\times ", "÷": "\\div ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "≠": "\\neq ", "±": "\\pm ", "≈": "",
}  # fmt: skip
_SIGNS = (
    ("\\left", ""),  # before \le
    ("\\leqslant", "≤"),
    ("\\geqslant", "≥"),
    ("\\leq", "≤"),
    ("\\geq", "≥"),
    ("\\le", "≤"),
    ("\\ge", "≥"),
    ("<=", "≤"),
    (">=", "≥"),
    ("\\lt", "<"),
    ("\\gt", ">"),
)


def gsm8k(
    reply: str, truth: object, row: Mapping[str, Any] | None = None, *, strict: bool = False
) -> float:
    """1 if the reply's final number is the last number of the truth.

    Without a marked or stated answer the last number of the reply counts, unless `strict`.
    """
    wanted = [
        numbers[-1] for text in truths_of(truth) if (numbers := numbers_in(text.rpartition("####")[2]))
    ]
    if not wanted:
        raise NoTruthError(f"the true answer {str(truth)[:60]!r} has no number: correct the row")
    found = stated_number(reply, strict)
    return float(found is not None and any(_same_number(found, one) for one in wanted))


def aime(
    reply: str, truth: object, row: Mapping[str, Any] | None = None, *, strict: bool = False
) -> float:
    """1 if the reply's final number is the truth, a whole number from 0 to 999."""
    is_right = gsm8k(reply, truth, strict=strict)
    found = stated_number(reply, strict)
    value = quantity(found) if found is not None else None
    if value is None or value.value.denominator != 1 or not 0 <= value.value <= 999:
        return 0.0
    return is_right


def math(
    reply: str, truth: object, row: Mapping[str, Any] | None = None, *, strict: bool = False
) -> float:
    """1 if the reply's final answer equals the truth (or one of several) mathematically.

    The truth is an answer, or a solution with `\\boxed`. Without a marked or stated answer the last
    number of the reply counts, unless `strict`.
    """
    truths = answers_of(truth)
    answer = marked_answer(reply) if strict else final_answer(reply)
    if answer is None and not strict and "\\boxed" not in reply:
        numbers = numbers_in(reply)
        answer = numbers[-1] if numbers else None
    return float(answer is not None and any(is_equal(answer, one) for one in truths))


def answers_of(truth: object) -> list[str]:
    """True answers of a row, those of solutions too; raises `NoTruthError` for a text that is none."""
    answers = [_bare(one) for one in truths_of(truth)]
    if all(len(answer) > MAX_CHARS for answer in answers):
        raise NoTruthError(
            f"the true answer {answers[0][:60]!r}... has {len(answers[0])} characters and no \\boxed: "
            "name the column of the answer, or leave the row out with a converter"
        )
    return answers


def stated_number(reply: str, strict: bool = False) -> str | None:
    """The one number of the final answer; None if it has several different ones."""
    answer = marked_answer(reply) if strict else final_answer(reply)
    if answer is None:
        numbers = [] if strict or "\\boxed" in reply else numbers_in(reply)
        return numbers[-1] if numbers else None
    answer = answer.rpartition("=")[2].strip()
    if quantity(answer) is not None:
        return answer
    numbers = numbers_in(answer)
    is_one = all(_same_number(numbers[0], one) for one in set(numbers))
    return numbers[0] if numbers and is_one else None


def is_equal(answer: str, truth: str) -> bool:
    """True if two LaTeX or plain texts mean the same: numbers, expressions, intervals, sets, words.

    A choice with its letter, as in `\\textbf{(C)}\\ 5`, equals the letter and the value.
    """
    choices = [_CHOICE.fullmatch(text) for text in (answer, truth)]
    if all(choices):
        return choices[0][1] == choices[1][1]  # type: ignore[index]
    for choice, other in zip(choices, (truth, answer), strict=True):
        if choice:
            return choice[1] == _plain(other) or _means_same(choice[2], other)
    return _means_same(answer, truth)


def _means_same(answer: str, truth: str) -> bool:
    answer, truth = _readable(answer), _readable(truth)
    if ("=" in answer) != ("=" in truth):  # x=3 and 3
        answer, truth = _NAMED.sub("", answer), _NAMED.sub("", truth)
    plain = _plain(answer), _plain(truth)
    if plain[0] == plain[1]:
        return bool(plain[0])
    ours, theirs = quantity(answer), quantity(truth)
    if ours is not None and theirs is not None:
        return ours.equals(theirs)
    sizes = sorted(map(len, plain))
    if not 0 < sizes[0] <= sizes[1] <= MAX_CHARS or any(map(_is_word, plain)):
        return False
    return not _are_of_other_kinds(*plain) and _is_same_expression(answer, truth)


def _is_same_expression(answer: str, truth: str) -> bool:
    if _COMPOUND.fullmatch(answer) or _COMPOUND.fullmatch(truth):  # 6 h 30 min: no product
        return numbers_in(answer) == numbers_in(truth)
    if not (_is_quick(answer) and _is_quick(truth)):
        return False
    return _is_verified(_as_intervals(truth), _as_intervals(answer))


def _are_of_other_kinds(one: str, other: str) -> bool:
    """True for a set beside a tuple or an interval, and for two bases: math-verify equates them."""
    if "\\{" in (one[:2], other[:2]) and {one[0], other[0]} & {"(", "["}:
        return True
    bases = _BASE.findall(one), _BASE.findall(other)
    return all(bases) and bases[0] != bases[1]


@functools.cache
def library() -> Any:
    """The package math-verify, imported once; `ConfigError` if it is not installed."""
    module = load_extra("math_verify", "math", "comparing expressions")
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return module


def _is_verified(truth: str, answer: str) -> bool:
    maths = library()
    try:
        with cpu_limit(MAX_CPU_S), foreign_code("math-verify"):
            # The package's own time limits count wall time, which a busy machine stretches.
            parsed = [maths.parse(f"${text}$", parsing_timeout=None) for text in (truth, answer)]
            return all(parsed) and bool(maths.verify(*parsed, timeout_seconds=None))
    except (TooSlowError, ForeignCodeError):
        return False


def _same_number(one: str, other: str) -> bool:
    first, second = quantity(one), quantity(other)
    return first is not None and second is not None and first.value == second.value


def _bare(truth: str) -> str:
    return boxed(truth) or truth.rpartition("####")[2].strip()


def _readable(text: str) -> str:
    """Text with LaTeX for signs of Unicode, and without separators of thousands."""
    text = " ".join(text.split())
    for sign, latex in _UNICODE.items():
        text = text.replace(sign, latex)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = _SUPERSCRIPT.sub(lambda found: "^2" if found[0] == "²" else "^3", text)
    text = _CONSTANT.sub(r"\1", text)
    text = text.replace(",\\!", ",").replace("\\!", "")
    bare = text.replace("{,}", ",")
    without = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), bare)
    if "," in without or any(bracket in bare for bracket in ("(", "[", "\\{")):
        return text  # a list or an interval: its commas separate parts
    return without


def _plain(text: str) -> str:
    """Text without layout, for comparison letter by letter."""
    text = text.strip().rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _BETWEEN_DIGITS.sub("\0", text)
    text = _LAYOUT.sub("", _WORDS.sub(r"\1", text)).replace("\\%", "%").replace("{,}", ",")
    text = re.sub(r"\^\{?\\circ\}?", "", text).replace("\\varnothing", "\\emptyset")
    if re.fullmatch(r"\([A-Za-z]\)|\{[A-Za-z]\}", text):
        text = text[1]
    return text.casefold() if _is_word(text) else text


def _is_word(plain: str) -> bool:
    return len(plain) > 1 and plain.isalpha()


def _is_quick(text: str) -> bool:
    """True if evaluating the text takes a short time for sure."""
    if "!" in text.replace("\\!", "") and (
        "!" in _FACTORIAL.sub("", text.replace("\\!", "")) or "^" in text
    ):
        return False
    if "\\binom" in text and _LONG_NUMBER.search(text):
        return False
    product = 1
    for found in _EXPONENT.finditer(text.replace("\\circ", "")):
        exponent = _group(text.replace("\\circ", ""), found.start(1))
        inner = exponent.strip("{}() ")
        if re.search(r"\d\s*(?:[)}]\s*)*(?:\^|\*\*)|!|\d\s*E\d", inner) or _LONG_NUMBER.search(inner):
            return False
        for number in re.findall(r"\d+", inner):
            product *= max(int(number), 1)
    return product <= 10_000


def _group(text: str, start: int) -> str:
    """The exponent that begins at `start`: one group in brackets, or a run of letters and digits."""
    if text[start] not in "{(":
        return re.match(r"-?[\w.]+|.", text[start:], re.DOTALL)[0]  # type: ignore[index]
    closing = {"{": "}", "(": ")"}[text[start]]
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == text[start]) - (text[index] == closing)
        if depth == 0:
            return text[start : index + 1]
    return text[start:]


def _as_intervals(text: str) -> str:
    r"""Inequalities of one variable as intervals: `x<2 \text{ or } x\ge 3`; other texts unchanged."""
    plain = _WORDS.sub(r" \1 ", text)
    for sign, short in _SIGNS:
        plain = plain.replace(sign, short)
    plain = re.sub(r"^\s*[a-zA-Z]\s*\\in\s*", "", plain)
    if not any(sign in plain for sign in "<>≤≥"):
        return plain if "\\cup" in plain or "\\in" in text else text
    parts = [_interval(part) for part in re.split(r"\bor\b|\\cup|\\lor|\\vee", plain)]
    return "\\cup".join(parts) if all(parts) else text  # type: ignore[arg-type]


def _variable_first(relation: str) -> str:
    """`x<3` for `3>x`."""
    if flipped := _FLIPPED.match(relation):
        return f"{flipped[3]}{'<' if flipped[2] == '>' else '>'}{flipped[1]}"
    return relation


def _interval(part: str) -> str | None:
    """Interval of a chain like `1<x≤2` or of `x>3`, None for anything else."""
    bare = _LAYOUT.sub("", part)
    is_closed = [sign in "≤≥" for sign in re.findall("[<>≤≥]", bare)]
    found = _RELATION.match(_variable_first(bare.replace("≤", "<").replace("≥", ">")))
    if not found:
        return None
    left, first, _, sign, right = found.groups()
    if left is None:
        left, is_closed = "-\\infty" if sign == "<" else "\\infty", [False, *is_closed]
    if first not in (None, sign) or len(is_closed) != 2:
        return None
    if sign == ">":
        left, right, is_closed = right, left, is_closed[::-1]
    return f"{'[' if is_closed[0] else '('}{left},{right}{']' if is_closed[1] else ')'}"
