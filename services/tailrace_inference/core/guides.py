"""Guides as grammars of llguidance, in its dialect of Lark."""

import json
from typing import Any

from tailrace_protos.generation import Guide, GuidedCalls

_SPACE = (
    r"[ \n\t]{0,8}"  # between JSON tokens and after thoughts: a model must not fill its budget with it
)


def lark_grammar(guide: Guide) -> str:
    """A guide as a grammar of llguidance; raises `ValueError` for a schema that is not JSON."""
    rules: dict[str, str] = {}
    answers = []
    if guide.json_schema:
        rules["answer_json"] = _json_rule(guide.json_schema)
        answers.append("answer_json")
    if guide.calls is not None:
        answers.append("answer_calls")
        rules |= _call_rules(guide.calls)
    rules["answer"] = " | ".join(answers)
    start = "answer"
    if guide.thought_end:
        first, last = _regex(guide.thought_begin), _regex(guide.thought_end)
        rules["thought[lazy]"] = f"/{first}(?s:.*){last}/"
        rules["SPACE"] = f"/{_SPACE}/"
        start = ("(thought SPACE)? " if first else "thought SPACE ") + start
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules}.items())


def _call_rules(calls: GuidedCalls) -> dict[str, str]:
    names = [f"call_{number}" for number in range(len(calls.schemas))]
    rules = {name: _json_rule(schema) for name, schema in zip(names, calls.schemas, strict=True)}
    begin, end = (json.dumps(text) if text else "" for text in (calls.begin, calls.end))
    rules["call"] = f"{begin} ({' | '.join(names)}) {end}"
    more = f" ({json.dumps(calls.separator) if calls.separator else ''} call)*"
    rules["answer_calls"] = "call" if calls.is_single else "call" + more
    return rules


def _json_rule(schema: str) -> str:
    return "%json " + json.dumps(_object(schema) | {"x-guidance": {"whitespace_pattern": _SPACE}})


def _object(schema: str) -> dict[str, Any]:
    value: object = json.loads(schema)
    if isinstance(value, bool):
        return {} if value else {"not": {}}
    if not isinstance(value, dict):
        raise ValueError(f"a JSON Schema is an object, not {schema[:40]!r}")
    return value


def _regex(text: str) -> str:
    """A regular expression of llguidance that matches a text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
