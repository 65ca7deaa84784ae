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
_ABBREVIATION_CHARS = 40  # before a dot, which tell whether it ends a sentence
_TAG = re.compile("</?answer>", re.IGNORECASE)
_STATED = re.compile(
    r"\banswers?(?:\*\*)?\s*(?:is|are|was|[:=])[ \t:*]*"
    r"(?-i:(?:therefore|thus|hence|then|simply|approximately|about|roughly)\b[ \t:,*]*)?",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(
    r"\s*(?:\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$)", re.DOTALL
)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)|\*\*")
_TITLE = re.compile(r"\b(?:Dr|Mrs?|Ms|St|Mt|Ft|Prof|Sgt|Lt|Col|Gen|Capt|Rev|Gov|Sen|Pres|vs)$")
_COUNTED = re.compile(r"\b(?:Nos?|Vol|Op)$")  # No. 1
_INITIAL = re.compile(r"(?:^|[^A-Za-z])[A-Z]$")
_IN_NAME = re.compile(r"\b(?!(?:Option|Choice|Letter|Answer)\b)[A-Z][A-Za-z]*(?:\.\s?|\s)[A-Z]$")
_CAPITALIZED = re.compile(
    r"(?!(?:The|This|That|These|Those|Its?|He|She|His|Her|They|Their|There|We|Our|You|I|My|An?|In|On|At|"
    r"As|So|If|For|Since|Because|However|Therefore|Thus|Hence|But|And|Also|To|Then|When|While|Although|"
    r"Not|Let|Here|Now|By|From|With|Explanation|Note|Reason|Option|Choice|Answer)\b)[A-Z]"
)
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
    stated = _first_sentence(tail[ends[-1] :].lstrip(" \t\r\n*"))
    formulas = _DOLLARS.findall(stated)
    return formulas[0].strip() if len(formulas) == 1 else stated or None


def _first_sentence(text: str) -> str:
    for end in _SENTENCE_END.finditer(text):
        if end[0] != "." or not _is_inside(text[: end.start()], text[end.end() :].lstrip()):
            return text[: end.start()].strip(" *")
    return text.strip(" *")


def _is_inside(before: str, after: str) -> bool:
    """True if a dot between the texts ends no sentence: `Dr. Who`, `No. 1`, `George W. Bush`."""
    before = before[-_ABBREVIATION_CHARS:]
    if _TITLE.search(before):
        return True
    if _COUNTED.search(before):
        return after[:1].isdigit()
    if not _INITIAL.search(before):
        return False
    is_initial = bool(_INITIAL.search(after[:1])) and after[1:2] == "."
    return is_initial or bool(_IN_NAME.search(before) and _CAPITALIZED.match(after))
