"""Scores of choices, short answers and JSON."""

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import category, normalize

import jsonschema
from referencing import Registry

from tailrace.cpu_limit import MAX_CPU_S, TooSlowError, cpu_limit
from tailrace.scorers.answers import final_answer, marked_answer, truths_of

MAX_JSON_CHARS = 1_000_000

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SIGNS = (*range(0x80, 0x3100), *range(0xFF00, 0xFF66))  # blocks that have punctuation
_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation + "".join(chr(code) for code in _SIGNS if category(chr(code)).startswith("P")),
)
_LETTER = re.compile(r"(?<![A-Za-z0-9'])\(?\[?([A-Z]|\d{1,2})\]?\)?(?![A-Za-z0-9'])")
_LAYOUT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_NAMED = re.compile(r"\b(?i:option|choice)\s*(?::|=|is\b)?\s*(\(?[A-Z]\)?(?![A-Za-z])|\([a-z]\))")
_MORE = re.compile(
    r"\s*(?:[,/&|]|or\b|and\b)\s*(?:(?:or|and)\s*)?(?:\(?[A-Z\d]\)?(?![A-Za-z])|\(?[a-z]\))"
)
_SMALL = re.compile(r"\(?[a-z]\)")
_DENIED = re.compile(r"(?:\bnot|n't)\s+(?:option|choice)?\s*$", re.IGNORECASE)
_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
_NO_F1 = frozenset({"yes", "no", "noanswer"})


def mcq(
    reply: str, truth: object, row: Mapping[str, Any] | None = None, *, strict: bool = False
) -> float:
    """1 if the reply chooses the true option, by its letter or its text.

    The truth is a letter, the index of an option (from 0), or its text; `choices` or `options` of the
    row hold the options. An answer that names several letters is wrong.
    """
    labels, texts = _options(row or {})
    answer = marked_answer(reply) if strict else final_answer(reply)
    if answer is None and not strict:
        named = _NAMED.findall(reply)
        answer = named[-1] if named else (reply.strip().splitlines() or [""])[-1]
    chosen = _chosen(answer or "", labels, texts)
    return float(
        chosen is not None and chosen in {_true_label(one, labels, texts) for one in _items(truth)}
    )


def em(reply: str, truth: object, row: Mapping[str, Any] | None = None) -> float:
    """1 if the answer is one of the true ones, apart from case, punctuation and articles."""
    said = normal_text(_short_answer(reply))
    return float(bool(said) and said in {normal_text(one) for one in truths_of(truth)})


def f1(reply: str, truth: object, row: Mapping[str, Any] | None = None) -> float:
    """Harmonic mean of precision and recall of the answer's words, for the best true answer."""
    said = normal_text(_short_answer(reply))
    return max((_f1(said, normal_text(one)) for one in truths_of(truth)), default=0.0)


def json_schema(reply: str, truth: object, row: Mapping[str, Any] | None = None) -> float:
    """1 if the reply is JSON that its schema accepts: `json_schema`, `schema` of the row, or the truth.

    The JSON stands alone or in the last fenced block. With a schema in the row and a truth, the JSON
    must also equal the truth.
    """
    row = row or {}
    given = next((row[key] for key in ("json_schema", "schema") if row.get(key) is not None), None)
    schema = _decoded(truth if given is None else given)
    if not isinstance(schema, Mapping | bool):
        raise ValueError("the row has no JSON schema: name its column `json_schema`")
    blocks = _FENCE.findall(reply)
    found = _json(blocks[-1] if blocks else reply)
    if found is None:
        return 0.0
    try:
        with cpu_limit(MAX_CPU_S):
            kind: Any = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            kind(schema, registry=Registry()).validate(found[0])  # its own: none that asks the network
    except (jsonschema.ValidationError, OverflowError, RecursionError, TooSlowError):
        return 0.0
    return float(given is None or truth is None or _is_same(_decoded(truth), found[0]))


def normal_text(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces, as SQuAD compares answers.

    Punctuation is that of all scripts. A text of nothing else keeps it: `!!!`, `The The`.
    """
    lowered = normalize("NFC", text).lower()
    bare = lowered.translate(_PUNCTUATION)
    found = (" ".join(each.split()) for each in (_ARTICLES.sub(" ", bare), bare, lowered))
    return next(filter(None, found), "")


def _short_answer(reply: str) -> str:
    answer = final_answer(reply)
    return reply if answer is None else _LAYOUT.sub(r"\1", answer)


def _f1(said: str, truth: str) -> float:
    if said != truth and (said in _NO_F1 or truth in _NO_F1):
        return 0.0
    ours, theirs = said.split(), truth.split()
    num_same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * num_same / (len(ours) + len(theirs)) if num_same else 0.0


def _options(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Labels and texts of a row's options; no texts without them."""
    found = next((row[key] for key in ("choices", "options") if row.get(key)), None)
    if isinstance(found, Mapping) and "text" in found:
        texts = list(map(str, found["text"]))
        return list(map(_label, found.get("label") or _letters(len(texts)))), texts
    if isinstance(found, Mapping):
        return list(map(_label, found)), list(map(str, found.values()))
    if isinstance(found, list | tuple):
        return _letters(len(found)), list(map(str, found))
    return _letters(26), []


def _label(written: object) -> str:
    """Label as replies are read: a capital letter or a number, without brackets."""
    return str(written).strip(" ().").upper()


def _letters(count: int) -> list[str]:
    return list(string.ascii_uppercase[:count])


def _items(truth: object) -> Sequence[object]:
    return truth if isinstance(truth, list | tuple) else [truth]


def _true_label(truth: object, labels: list[str], texts: list[str]) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(labels):
        return labels[truth]
    bare = str(truth).strip().strip("().").strip()
    by_text = {
        normal_text(text): label for text, label in reversed(list(zip(texts, labels, strict=False)))
    }
    for label in (bare, bare.upper(), by_text.get(normal_text(bare), "")):
        if label in labels:
            return label
    if bare.isdecimal() and int(bare) < len(labels):
        return labels[int(bare)]
    raise ValueError(f"the true answer {bare!r} is none of the options {', '.join(labels[:8])}")


def _chosen(answer: str, labels: list[str], texts: list[str]) -> str | None:
    bare = _LAYOUT.sub(r"\1", answer).strip().strip("$*.")
    if small := _SMALL.match(bare):
        bare = f"{small[0].upper()}{bare[small.end() :]}"
    if bare in labels and bare.isalpha():
        return bare
    matches = [label for label, text in zip(labels, texts, strict=False) if _same_text(bare, text)]
    if len(matches) == 1:
        return matches[0]
    if len(bare) == 1 and bare.upper() in labels:
        return bare.upper()
    named = _named(bare, labels)
    return named.pop() if len(named) == 1 else None


def _named(text: str, labels: list[str]) -> set[str]:
    """Labels that a text names; only its first word, if that is a label."""
    named = {
        found[1]
        for found in _LETTER.finditer(text)
        if found[1] in labels and not _DENIED.search(text[max(0, found.start() - 16) : found.start()])
    }
    first = _LETTER.match(text)
    if first is None or first[1] not in labels:
        return named
    rest = text[first.end() :]
    if _MORE.match(rest):
        return set()
    is_word = rest.startswith(" ") and first[0] in ("A", "I")  # an article or a pronoun
    return named if is_word else {first[1]}


def _same_text(answer: str, text: str) -> bool:
    return bool(normal_text(text)) and normal_text(answer) == normal_text(text)


def _json(text: str) -> tuple[Any] | None:
    """JSON of a text, in a tuple; None if it is none."""
    if len(text) > MAX_JSON_CHARS:
        return None
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    """Raises `ValueError` for NaN and infinity, which Python reads and JSON lacks."""
    raise ValueError(name)


def _is_same(one: Any, other: Any) -> bool:
    """Equality of JSON values: `true` is no number, 1 is 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _decoded(value: object) -> object:
    found = _json(value) if isinstance(value, str) else None
    return value if found is None else found[0]
