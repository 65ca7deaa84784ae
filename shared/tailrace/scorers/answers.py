"""Final answers in replies, and true answers in rows.

A model writes the replies, so every function takes time linear in the text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailrace_protos.chat import ChatMessage

TRUTH_KEYS = ("ground_truth", "answer", "answers", "golden_answers", "target", "solution", "label")

_ANSWER_KEYS = ("target", "value", "aliases", "text", "answer", "ground_truth")
_TAIL_CHARS = 4000  # a stated answer is searched at the end of a reply
_TAG = re.compile("</?answer>", re.IGNORECASE)
_STATED = re.compile(
    r"\banswers?(?:\*\*)?\s*(?:is|are|was|[:=])[ \t:*]*"
    r"(?-i:(?:therefore|thus|hence|then|simply|approximately|about|roughly)\b[ \t:,*]*)?",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(
    r"\s*(?:\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$)", re.DOTALL
)
_SENTENCE_END = re.compile(r"\n|(?<!\bDr|\bMr|\bMs|\bSt|\bMt|\bvs)\.(?=\s|$)|\*\*")
_DOLLARS = re.compile(r"(?<!\\)\$([^$\n]{1,400})(?<!\\)\$")


class NoTruthError(ValueError):
    """A row has no true answer."""


def last_reply(messages: Sequence[ChatMessage]) -> str:
    """Text of the last assistant message, without its thoughts."""
    said = next((each.content for each in reversed(messages) if each.role == "assistant"), "")
    return without_thoughts(said)


def without_thoughts(text: str) -> str:
    """Text behind the last `</think>`; nothing if a thought is not closed."""
    before, closing, rest = text.rpartition("</think>")
    if closing:
        return rest
    return before if "<think>" in text else text


def truth_of(row: Mapping[str, Any]) -> Any:
    """True answer of a row: `reward_model.ground_truth`, or the first key of `TRUTH_KEYS`."""
    model = row.get("reward_model")
    places = (model, row) if isinstance(model, Mapping) else (row,)
    for place in places:
        for key in TRUTH_KEYS:
            if place.get(key) not in (None, "", [], ()):
                return place[key]
    raise NoTruthError(
        f"the row has no true answer (keys {', '.join(sorted(row)) or 'none'}): name its column "
        "`answer` or `ground_truth`, with `columns` of the data set"
    )


def truths_of(truth: object) -> list[str]:
    """All accepted answers: of text, a number, a list, or an object with aliases; at least one."""
    if found := list(_texts_of(truth)):
        return found
    keys = f"; an answer may stand in {', '.join(_ANSWER_KEYS)}" if isinstance(truth, Mapping) else ""
    raise NoTruthError(
        f"the true answer {str(truth)[:60]!r} has no number and no text{keys}: correct the row, or "
        "leave it out with a converter"
    )


def _texts_of(truth: object) -> Iterator[str]:
    if isinstance(truth, Mapping):
        yield from _texts_of([truth.get(key) for key in _ANSWER_KEYS])
    elif isinstance(truth, list | tuple):
        for each in truth:
            yield from _texts_of(each)
    elif truth is not None and str(truth).strip():
        yield str(truth)


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed`; None without one, or if it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box")[2].removeprefix("ed").lstrip()
    if not rest.startswith("{"):
        return rest.split()[0].strip("$.") if rest.split() else None
    depth, escaped = 0, False
    for index, char in enumerate(rest):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return rest[1:index].strip()
    return None


def marked_answer(reply: str) -> str | None:
    r"""Answer in the form that prompts ask for: `\boxed{}`, `#### `, or `<answer>` tags."""
    if "\\boxed" in reply or "\\fbox" in reply:
        return boxed(reply)
    _, mark, rest = reply.rpartition("####")
    if mark:
        return rest.strip().partition("\n")[0].strip() or None
    return _tagged(reply)


def _tagged(reply: str) -> str | None:
    """Text of the last `<answer>` that is closed."""
    found, start = None, -1
    for tag in _TAG.finditer(reply):
        if tag[0].startswith("</"):
            found, start = (reply[start : tag.start()].strip(), -1) if start >= 0 else (found, -1)
        elif start < 0:
            start = tag.end()
    return found


def final_answer(reply: str) -> str | None:
    """Marked answer, or the one behind the last "answer is" or "answer:"; None without either."""
    if (marked := marked_answer(reply)) is not None:
        return marked
    tail = reply[-_TAIL_CHARS:]
    ends = [match.end() for match in _STATED.finditer(tail)]
    if not ends:
        return None
    if displayed := _DISPLAYED.match(tail, ends[-1]):
        return next(filter(None, displayed.groups())).strip().rstrip(".,") or None
    stated = _SENTENCE_END.split(tail[ends[-1] :].strip(), maxsplit=1)[0].strip(" *")
    formulas = _DOLLARS.findall(stated)
    return formulas[0].strip() if len(formulas) == 1 else stated or None
